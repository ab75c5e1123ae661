"""A backend with every extension around the CPU backend, and a core that calls it as the contract says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pagedkv.api import AttentionBackend, Batch, Event, GroupSpec, LayerSpec, Limits, OpSpec, Plan, PoolSpec
from pagedkv.api.extensions import Graph, GraphShape, canonical_fingerprint
from pagedkv.checking import CheckedBackend, check
from tests.backends.cpu.rig import layer_spec, shared_backend

BLOCK = 16
SHAPE = GraphShape(rows=3, tokens=8, max_ctx=64)
CAPABILITIES = dataclasses.replace(
    shared_backend().capabilities(),
    extensions={"graph": (1, 0), "canonical_kv": (1, 0)},
    graph="decode",
    max_graphs=1,
    features=shared_backend().capabilities().features - {"alibi", "lse"},
)


class StaticPlan(Plan):
    """A plan of the CPU backend that `refresh` replaces."""

    def __init__(self, pool: Any, group: int) -> None:
        self.pool, self.group = pool, group
        self.inner: Any = None


class Recorded(Graph):
    """Issues the calls again."""

    def __init__(self, fn: Callable[[], None]) -> None:
        self._fn = fn

    @property
    def nbytes(self) -> int:
        return 0

    def replay(self) -> None:
        self._fn()

    def close(self) -> None:
        return


class Alone:
    """Collectives of one rank, said to be two: what is gathered is there twice."""

    def all_reduce(self, tensor: Any) -> Any:
        return tensor

    def all_gather(self, tensor: Any, dim: int = -1) -> Any:
        return torch.cat([tensor, tensor], dim)

    def broadcast(self, tensor: Any, src: int = 0) -> Any:
        return tensor

    def barrier(self) -> None:
        return


class Around(AttentionBackend):
    """Keeps every law; tests break one at a time by overriding a method. It is its own extension object."""

    def __init__(self) -> None:
        self.inner = shared_backend()
        self.closes = 0

    def capabilities(self) -> Any:
        return CAPABILITIES

    def pool_cost(self, spec: PoolSpec) -> Any:
        return self.inner.pool_cost(spec)

    def alloc_pool(self, spec: PoolSpec) -> Any:
        return self.inner.alloc_pool(spec)

    def plan(self, pool: Any, group: int, batch: Batch) -> Any:
        return self.inner.plan(pool, group, batch)

    def attend(
        self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        self.inner.attend(plan.inner if isinstance(plan, StaticPlan) else plan, layer, q, k, v, out, extra=extra)

    def copy_blocks(self, src: Any, dst: Any, pairs: Any, *, after: Event | None = None) -> Any:
        return self.inner.copy_blocks(src, dst, pairs, after=after)

    def bind(self, pool: Any, layer: int, params: Mapping[str, Any]) -> None:
        self.inner.bind(pool, layer, params)

    def memory(self) -> Any:
        return self.inner.memory()

    def op(self, name: str, spec: OpSpec) -> Any:
        return self.inner.op(name, spec)

    def communicator(self, group: Sequence[int]) -> Any:
        return Alone()

    def extension(self, name: str) -> Any:
        return self if name in CAPABILITIES.extensions else None

    def close(self) -> None:
        self.closes += 1

    def static_plan(self, pool: Any, group: int, shape: GraphShape) -> Any:
        return StaticPlan(pool, group)

    def refresh(self, plan: Any, batch: Batch) -> None:
        plan.inner = self.inner.plan(plan.pool, plan.group, batch)

    def capture(self, fn: Callable[[], None], plans: Sequence[Any]) -> Any:
        fn()
        return Recorded(fn)

    def export(self, pool: Any, group: int, ids: Any, lengths: Any) -> Any:
        spec = pool.spec.groups[group]
        per_token = sum(layer.kv_heads * (layer.k_dim + layer.v_dim) * 4 for layer in spec.layers if not layer.kv_of)
        bytes_ = np.zeros(per_token * int(lengths.sum()), np.uint8)
        return Event(), np.concatenate([np.frombuffer(canonical_fingerprint(spec), np.uint8), bytes_])

    def import_(self, pool: Any, group: int, ids: Any, lengths: Any, data: Any) -> Any:
        return Event()


LAYERS = (layer_spec(0), layer_spec(1, window=8), layer_spec(2, sinks=True))
WINDOWED = (layer_spec(4, window=8), layer_spec(5, window=8, kv_of=4))
SPEC = PoolSpec(
    groups=(
        GroupSpec(layers=LAYERS, block_size=BLOCK, kv_dtype="fp32"),
        GroupSpec(
            layers=(layer_spec(4, window=8), layer_spec(5, window=8, kv_of=4)), block_size=BLOCK, kv_dtype="fp32"
        ),
    ),
    num_blocks=32,
    dtype="fp32",
    limits=Limits(rows=4, tokens=64, context=128),
)


def batch(**changes: Any) -> Batch:
    """Row A decodes at context 20 in blocks 1, 2; row B brings its first 5 tokens to block 3."""
    fields: dict[str, Any] = {
        "num_seqs": 2,
        "num_tokens": 6,
        "cu_q": np.array([0, 1, 6], np.int32),
        "ctx_len": np.array([20, 5], np.int32),
        "block_table": np.array([[0, 0, 0], [1, 2, 0], [3, 0, 0]], np.int32),
        "rows": np.array([1, 2], np.int32),
        "slots": np.array([2 * BLOCK + 3, *range(3 * BLOCK, 3 * BLOCK + 5)], np.int64),
        "max_q": 5,
        "max_ctx": 20,
        "num_decode": 1,
    }
    return Batch(**(fields | changes))


def static_batch(**changes: Any) -> Batch:
    """Row A decodes, padded to `SHAPE`."""
    fields: dict[str, Any] = {
        "num_seqs": 1,
        "num_tokens": 1,
        "cu_q": np.array([0, 1, 1, 1], np.int32),
        "ctx_len": np.array([20, 0, 0], np.int32),
        "rows": np.array([1, 0, 0], np.int32),
        "slots": np.array([2 * BLOCK + 3] + [-1] * (SHAPE.tokens - 1), np.int64),
        "max_q": 1,
        "max_ctx": 20,
    }
    return batch(**(fields | changes))


class Core:
    """One checked instance with a pool, its sinks bound, and the calls of a step."""

    def __init__(self, backend: AttentionBackend | None = None, *, bound: bool = True) -> None:
        self.inner = backend or Around()
        self.checked: CheckedBackend = check(self.inner, CAPABILITIES, name="around")
        self.pool: Any = self.checked.alloc_pool(SPEC)
        everything = np.array([[0, block] for block in range(1, SPEC.num_blocks)], np.int32)
        shared_backend().copy_blocks(self.pool.inner, self.pool.inner, everything)  # zeros, for results to compare
        if bound:
            self.checked.bind(self.pool, 2, {"sinks": np.zeros(4, np.float32)})

    def plan(self, group: int = 0, **changes: Any) -> Any:
        return self.checked.plan(self.pool, group, batch(**changes))

    def tensors(self, rows: int = 6, layer: LayerSpec = LAYERS[0], seed: int = 0) -> list[torch.Tensor]:
        """q, k, v, out."""
        made = torch.Generator().manual_seed(seed)
        heads = (layer.q_heads, layer.kv_heads, layer.kv_heads)
        q, k, v = (torch.randn(rows, count, layer.k_dim, generator=made) for count in heads)
        return [q, k, v, torch.full((rows, layer.q_heads, layer.v_dim), float("nan"))]

    def attend(self, plan: Any = None, layer: int = 0, **changes: Any) -> torch.Tensor:
        """One call, some of its arguments changed; `out`."""
        q, k, v, out = self.tensors()
        arguments = {"q": q, "k": k, "v": v, "out": out} | changes
        names = {"extra": arguments.pop("extra")} if "extra" in arguments else {}
        self.checked.attend(plan or self.plan(), layer, *arguments.values(), **names)
        return out

    def copy(self, *pairs: tuple[int, int], after: Any = None, to: Any = None) -> Any:
        array = np.array(pairs, np.int32).reshape(-1, 2)
        return self.checked.copy_blocks(self.pool, to or self.pool, array, after=after)

    def graphs(self) -> Any:
        return self.checked.extension("graph")

    def static_plan(self) -> Any:
        return self.graphs().static_plan(self.pool, 0, SHAPE)

    def refreshed(self, **changes: Any) -> Any:
        plan = self.static_plan()
        self.graphs().refresh(plan, static_batch(**changes))
        return plan

    def capture(self, plan: Any, inside: Callable[[], None] | None = None) -> Any:
        """A graph of one layer's attention with `plan`, and of `inside`."""
        q, k, v, out = self.tensors(SHAPE.tokens)

        def fn() -> None:
            self.checked.attend(plan, 0, q, k, v, out)
            if inside is not None:
                inside()

        return self.graphs().capture(fn, [plan])
