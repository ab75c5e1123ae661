"""A small core for one backend: sequences with their blocks, batches over them, and a float64 oracle in plain loops."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pagedkv.api import Batch, GroupSpec, LayerSpec, Limits, PoolSpec, World
from pagedkv_cpu.backend import CpuBackend
from pagedkv_cpu.descriptor import CpuDescriptor

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


KERNELS = "auto"
"""The path of the instances made here."""


def backend(threads: int = 1) -> CpuBackend:
    """A CPU instance as the entry point makes it; one thread, so that tests beside each other do not wait for it."""
    made = CpuDescriptor().create(0, {"threads": threads, "kernels": KERNELS}, World())
    assert isinstance(made, CpuBackend)
    return made


def shared_backend() -> CpuBackend:
    """The instance of all rigs that do not close theirs, one for each path."""
    return _shared(KERNELS)


@functools.cache
def _shared(kernels: str) -> CpuBackend:
    return backend()


def layer_spec(index: int = 0, **changes: Any) -> LayerSpec:
    """A small layer: 4 query heads on 2 KV heads of 16, scale 16^-1/2."""
    fields: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "k_dim": 16, "v_dim": 16}
    fields |= changes
    fields.setdefault("scale", fields["k_dim"] ** -0.5)
    return LayerSpec(index=index, **fields)


def pool_spec(*layers: LayerSpec, **changes: Any) -> PoolSpec:
    """A pool of one group."""
    block_size, kv_dtype = changes.pop("block_size", 16), changes.pop("kv_dtype", "fp32")
    group = GroupSpec(layers=layers or (layer_spec(),), block_size=block_size, kv_dtype=kv_dtype)
    fields: dict[str, Any] = {
        "groups": (group,),
        "num_blocks": 64,
        "dtype": "fp32",
        "limits": Limits(rows=16, tokens=512, context=1024),
    }
    return PoolSpec(**(fields | changes))


class Seq:
    """One sequence: keys and values of every position, and the blocks they lie in."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor, blocks: list[int]) -> None:
        self.keys, self.values, self.queries, self.blocks = keys, values, queries, blocks


class Rig:
    """One pool, and sequences whose ids come from a shuffled list."""

    def __init__(self, spec: PoolSpec, *, seed: int = 0, made: CpuBackend | None = None, group: int = 0) -> None:
        self.backend = made or shared_backend()
        self.pool = self.backend.alloc_pool(spec)
        self.spec, self.group_index = spec, group
        self.group = spec.groups[group]
        self.layer = self.group.layers[0]
        self.generator = torch.Generator().manual_seed(seed)
        ids = torch.randperm(spec.num_blocks - 1, generator=self.generator) + 1
        self.free = [int(i) for i in ids]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(TORCH[self.spec.dtype])

    def sequence(self, length: int) -> Seq:
        """A sequence with random content and fresh blocks; nothing is written yet."""
        spec = self.layer
        blocks = [self.free.pop() for _ in range(-(-length // self.group.block_size))]
        return Seq(
            self.random(length, spec.kv_heads, spec.k_dim),
            self.random(length, spec.kv_heads, spec.v_dim),
            self.random(length, spec.q_heads, spec.k_dim),
            blocks,
        )

    def batch(self, rows: Sequence[tuple[Seq, int, int]], *, write: bool = True) -> Batch:
        """Rows of (sequence, context, query tokens); slots for the query tokens unless not `write`."""
        size = self.group.block_size
        width = max([len(s.blocks) for s, _, _ in rows], default=1)
        table = np.zeros((len(rows) + 1, width), np.int32)
        slots: list[int] = []
        for i, (seq, context, count) in enumerate(rows):
            table[i + 1, : len(seq.blocks)] = seq.blocks
            slots += [seq.blocks[p // size] * size + p % size for p in range(context - count, context)]
        counts = [count for _, _, count in rows]
        return Batch(
            num_seqs=len(rows),
            num_tokens=sum(counts),
            cu_q=np.cumsum([0, *counts]).astype(np.int32),
            ctx_len=np.array([context for _, context, _ in rows], np.int32),
            block_table=table,
            rows=np.arange(1, len(rows) + 1, dtype=np.int32),
            slots=np.array(slots, np.int64) if write else None,
            max_q=max(counts, default=0),
            max_ctx=max([context for _, context, _ in rows], default=0),
            num_decode=0,
        )

    def tensors(self, rows: Sequence[tuple[Seq, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v of the rows' query tokens."""
        spans = [(s, slice(context - count, context)) for s, context, count in rows]
        q, k, v = ([getattr(s, name)[span] for s, span in spans] for name in ("queries", "keys", "values"))
        spec = self.layer
        return (
            torch.cat([*q, self.random(0, spec.q_heads, spec.k_dim)]),
            torch.cat([*k, self.random(0, spec.kv_heads, spec.k_dim)]),
            torch.cat([*v, self.random(0, spec.kv_heads, spec.v_dim)]),
        )

    def step(self, *rows: tuple[Seq, int, int], layer: int | None = None) -> torch.Tensor:
        """Append and attend in one call: out [T, Hq, Dv]."""
        plan = self.backend.plan(self.pool, self.group_index, self.batch(rows))
        q, k, v = self.tensors(rows)
        out = torch.full((len(q), self.layer.q_heads, self.layer.v_dim), float("nan")).to(q.dtype)
        self.backend.attend(plan, self.layer.index if layer is None else layer, q, k, v, out)
        return out

    def write(self, seq: Seq, start: int, end: int) -> None:
        """Append positions [start, end) without attending."""
        if end > start:
            rows = [(seq, end, end - start)]
            plan = self.backend.plan(self.pool, self.group_index, self.batch(rows))
            _, k, v = self.tensors(rows)
            self.backend.attend(plan, self.layer.index, None, k, v, None)

    def poison(self, value: float) -> None:
        """Fill every slot of every block but the null block, as an earlier owner would have."""
        size, spec = self.group.block_size, self.layer
        slots = np.arange(size, self.spec.num_blocks * size, dtype=np.int64)
        for part in np.array_split(slots, max(1, -(-len(slots) // self.spec.limits.tokens))):
            k = torch.full((len(part), spec.kv_heads, spec.k_dim), value).to(TORCH[self.spec.dtype])
            v = torch.full((len(part), spec.kv_heads, spec.v_dim), value).to(TORCH[self.spec.dtype])
            self.backend.attend(self.append_plan(part), spec.index, None, k, v, None)

    def append_plan(self, slots: np.ndarray[Any, Any]) -> Any:
        """A plan that writes to `slots` and has no query."""
        batch = Batch(
            num_seqs=0,
            num_tokens=0,
            cu_q=np.zeros(1, np.int32),
            ctx_len=np.zeros(0, np.int32),
            block_table=np.zeros((1, 1), np.int32),
            rows=np.zeros(0, np.int32),
            slots=slots,
            max_q=0,
            max_ctx=0,
        )
        return self.backend.plan(self.pool, self.group_index, batch)

    def expected(self, seq: Seq, context: int, count: int, params: Mapping[str, Any] | None = None) -> np.ndarray:
        """The oracle's answer for one row, from keys and values rounded as the pool stores them."""
        stored = TORCH[self.group.kv_dtype]
        return oracle(
            self.layer,
            seq.queries[context - count : context].double().numpy(),
            seq.keys[:context].to(stored).double().numpy(),
            seq.values[:context].to(stored).double().numpy(),
            params or {},
        )


def oracle(
    spec: LayerSpec, q: np.ndarray, keys: np.ndarray, values: np.ndarray, params: Mapping[str, Any]
) -> np.ndarray:
    """Attention of q [n, Hq, Dk], the last n of context keys [c, Hkv, Dk], in float64, one query and head at a time."""
    count, context = len(q), len(keys)
    out = np.zeros((count, spec.q_heads, spec.v_dim))
    for j in range(count):
        p = context - count + j
        first = 0 if spec.window is None else max(0, p - spec.window + 1)
        seen = np.arange(first, p + 1 if spec.causal else context)
        for h in range(spec.q_heads):
            kv = h * spec.kv_heads // spec.q_heads
            s = keys[seen, kv] @ q[j, h] * spec.scale
            if spec.softcap is not None:
                s = spec.softcap * np.tanh(s / spec.softcap)
            if spec.alibi:
                s = s + float(params["alibi"][h]) * (seen - p)
            sink = float(params["sinks"][h]) if spec.sinks else -math.inf
            top = max([*s, sink])
            weights = np.exp(s - top)
            out[j, h] = weights @ values[seen, kv] / (weights.sum() + math.exp(sink - top))
    return out
