"""Attention, graphs and copies of one backend, beside limits measured on the same device: figures as JSON.

    python ci/device/measure.py --backend cuda --output kernels.json

For a machine with a card; with `--backend cpu --small` it runs anywhere, which shows that it runs, and no more.
Decode is held to the speed at which the device reads memory, prefill to that of a large matrix product, both to torch's
scaled_dot_product_attention and, for a few, FlexAttention on the same keys and values, laid out without blocks. Times
are the best of some rounds. Where keys and values fit the device's cache, the share of the limit may be above 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pagedkv import plugins
from pagedkv.api import AttentionBackend, Batch, GroupSpec, LayerSpec, Limits, PoolSpec
from pagedkv.api.extensions import GraphShape

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
"""Attention of an 8B model."""
MOVED = 16
"""Blocks that are copied out and back."""
ROUNDS = 5
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Rows of one step: so many tokens of query each, at this context."""

    rows: int
    queries: int
    context: int

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products, what the causal mask hides left out."""
        seen = self.context - (self.queries - 1) / 2
        return 4 * self.rows * HEADS * DIM * self.queries * seen

    def nbytes(self, item: int) -> int:
        """Keys and values that are read once."""
        return 2 * self.rows * KV_HEADS * DIM * self.context * item


def best(backend: AttentionBackend, run: Callable[[], Any], calls: int) -> float:
    """Seconds of one call."""
    run()
    backend.synchronize()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(calls):
            run()
        backend.synchronize()
        times.append((time.perf_counter() - began) / calls)
    return min(times)


def limits(backend: AttentionBackend, dtype: torch.dtype, small: bool) -> dict[str, float]:
    """Bytes a second that a sum reads, and operations a second of a square product."""
    device, size = backend.torch_device, 1024 if small else 8192
    many = torch.ones(1 << (20 if small else 28), device=device)
    square = torch.randn(size, size, device=device).to(dtype)
    return {
        "read_bytes_per_second": many.nbytes / best(backend, lambda: many.sum(), 3),
        "flops_per_second": 2 * size**3 / best(backend, lambda: square @ square, 3),
    }


class Case:
    """One layer's cache filled for a piece of work, and the calls to time."""

    def __init__(self, backend: AttentionBackend, work: Work, dtype: torch.dtype) -> None:
        self.backend, self.work, self.dtype = backend, work, dtype
        layer = LayerSpec(index=0, q_heads=HEADS, kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM, scale=DIM**-0.5)
        group = GroupSpec(layers=(layer,), block_size=BLOCK, kv_dtype=NAMES[dtype])
        self.columns = -(-work.context // BLOCK)
        tokens = max(work.rows * work.queries, 4096)
        spec = PoolSpec(
            groups=(group,),
            num_blocks=work.rows * self.columns + 2 * MOVED + 1,
            dtype=NAMES[dtype],
            limits=Limits(rows=work.rows, tokens=tokens, context=max(work.context, MOVED * BLOCK)),
        )
        self.pool = backend.alloc_pool(spec)
        self.spare = np.arange(1, 2 * MOVED + 1, dtype=np.int32)
        blocks = np.random.default_rng(0).permutation(np.arange(2 * MOVED + 1, spec.num_blocks)).astype(np.int32)
        self.table = np.zeros((work.rows + 1, self.columns), np.int32)
        self.table[1:] = blocks.reshape(work.rows, self.columns)
        self.keys, self.values = (self._random(work.rows, work.context, KV_HEADS, DIM) for _ in range(2))
        self.q = self._random(work.rows * work.queries, HEADS, DIM)
        self.out = torch.empty_like(self.q)
        self._fill(tokens)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.backend.torch_device).to(self.dtype)

    def _slots(self) -> np.ndarray:
        places = np.arange(self.work.context)
        return (self.table[1:, places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK).reshape(-1)

    def _fill(self, step: int) -> None:
        """Append every key and value."""
        slots, keys, values = self._slots(), self.keys.flatten(0, 1), self.values.flatten(0, 1)
        for start in range(0, len(slots), step):
            part = slice(start, start + step)
            plan = self.backend.plan(self.pool, 0, _appending(slots[part]))
            self.backend.attend(plan, 0, None, keys[part], values[part], None)

    def batch(self, part: float = 1.0) -> Batch:
        """The step: every row with its queries at the end of its context, or of that part of it."""
        work = self.work
        context = max(work.queries, int(part * work.context))
        return Batch(
            num_seqs=work.rows,
            num_tokens=work.rows * work.queries,
            cu_q=(np.arange(work.rows + 1) * work.queries).astype(np.int32),
            ctx_len=np.full(work.rows, context, np.int32),
            block_table=self.table,
            rows=np.arange(1, work.rows + 1, dtype=np.int32),
            slots=np.full(work.rows * work.queries, -1, np.int64),
            max_q=work.queries,
            max_ctx=context,
            num_decode=work.rows if work.queries == 1 else 0,
        )

    def attend(self, plan: Any) -> None:
        self.backend.attend(plan, 0, self.q, None, None, self.out)

    def reference(self) -> torch.Tensor:
        """The same by scaled_dot_product_attention: [rows, heads, queries, dim]."""
        q, keys, values = self._dense()
        return F.scaled_dot_product_attention(q, keys, values, is_causal=self._causal(), enable_gqa=True)

    def _dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, keys and values, each [rows, heads, tokens, dim]."""
        work = self.work
        q = self.q.view(work.rows, work.queries, HEADS, DIM).transpose(1, 2)
        return q, self.keys.transpose(1, 2), self.values.transpose(1, 2)

    def _causal(self) -> bool:
        causal = self.work.queries == self.work.context
        if not causal and self.work.queries > 1:
            raise ValueError("prefill is measured without a cached prefix")
        return causal

    def flex(self) -> Callable[[], torch.Tensor]:
        """The same by FlexAttention, compiled for this shape."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, keys, values = (tensor.contiguous() for tensor in self._dense())
        mask, queries, context = None, self.work.queries, self.work.context
        if self._causal():
            visible = lambda batch, head, query, key: query >= key  # noqa: E731 - what torch traces
            mask = create_block_mask(visible, None, None, queries, context, device=q.device)
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(q, keys, values, block_mask=mask, enable_gqa=True)


def _appending(slots: np.ndarray) -> Batch:
    nothing = np.zeros(0, np.int32)
    return Batch(
        num_seqs=0,
        num_tokens=0,
        cu_q=np.zeros(1, np.int32),
        ctx_len=nothing,
        block_table=np.zeros((1, 1), np.int32),
        rows=nothing,
        slots=slots,
        max_q=0,
        max_ctx=0,
    )


def measured(case: Case, device: dict[str, float]) -> dict[str, Any]:
    """Seconds of the backend and of the reference, the share of the device's limit, and how far the results differ."""
    work, plan = case.work, case.backend.plan(case.pool, 0, case.batch())
    ours = best(case.backend, lambda: case.attend(plan), 10)
    theirs = best(case.backend, case.reference, 10)
    wanted = case.reference().transpose(1, 2).reshape(case.out.shape)
    floor = work.nbytes(case.dtype.itemsize) / device["read_bytes_per_second"]
    floor = max(floor, work.flops / device["flops_per_second"])
    return {
        "rows": work.rows,
        "queries": work.queries,
        "context": work.context,
        "seconds": ours,
        "seconds_sdpa": theirs,
        "share_of_limit": floor / ours,
        "worst_difference": float((case.out.float() - wanted.float()).abs().max()),
    }


def flex(case: Case) -> dict[str, Any]:
    """Seconds of FlexAttention and how far it is from the reference; why not, where torch cannot compile it here."""
    try:
        run = case.flex()
        worst = float((run().float() - case.reference().float()).abs().max())
        return {"seconds_flex": best(case.backend, run, 10), "worst_difference_flex": worst}
    except Exception as error:  # noqa: BLE001 - no compiler, a shape that it refuses: told, and the rest goes on
        return {"flex": f"{type(error).__name__}: {str(error)[:300]}"}


def graphs(case: Case) -> dict[str, Any]:
    """A decode step recorded once and replayed for other contexts too, each beside the eager one."""
    extension = case.backend.extension("graph")
    if extension is None:
        return {"graph": "this backend has no graphs"}
    work = case.work
    static = extension.static_plan(case.pool, 0, GraphShape(rows=work.rows, tokens=work.rows, max_ctx=work.context))
    extension.refresh(static, case.batch())
    graph = extension.capture(lambda: case.attend(static), [static])
    worst = max(_replayed(case, extension, static, graph, part) for part in (0.5, 0.0, 1.0))
    eager, replay = case.backend.plan(case.pool, 0, case.batch()), best(case.backend, graph.replay, 10)
    seconds = best(case.backend, lambda: case.attend(eager), 10)
    graph.close()
    return {"graph_seconds": replay, "eager_seconds": seconds, "worst": worst, "nbytes": graph.nbytes}


def _replayed(case: Case, extension: Any, static: Any, graph: Any, part: float) -> float:
    """How far a replay is from the eager step of the same batch."""
    batch = case.batch(part)
    case.attend(case.backend.plan(case.pool, 0, batch))
    wanted = case.out.clone()
    extension.refresh(static, batch)
    case.out.fill_(float("nan"))
    graph.replay()
    return float((case.out.float() - wanted.float()).abs().nan_to_num(float("inf")).max())


class Race:
    """Fresh keys and values in some blocks, out to the host, overwritten, and back to other blocks, beside compute.

        append S ─ attend S ─── busy ─── wait ─ append S anew ─ busy ─ wait ─ attend D
                     └ copy S -> host ────┘                             │
                             └ after it: copy host -> D ────────────────┘

    What is read in D must be what was read in S, bit for bit; a copy that runs too early or too late shows.
    """

    def __init__(self, case: Case) -> None:
        self.case, backend, spec = case, case.backend, case.pool.spec
        self.host = backend.alloc_pool(dataclasses.replace(spec, num_blocks=MOVED + 1, placement="host"))
        self.here, self.there = case.spare[:MOVED], case.spare[MOVED:]
        self.ids = np.arange(1, MOVED + 1, dtype=np.int32)
        self.q = case._random(1, HEADS, DIM)

    def rounds(self, count: int) -> int:
        """How many of so many rounds differ. The host waits for none of them meanwhile."""
        seen = [self._round() for _ in range(count)]
        self.case.backend.synchronize()
        return sum(not torch.equal(before, after) for before, after in seen)

    def _round(self) -> tuple[torch.Tensor, torch.Tensor]:
        case, backend = self.case, self.case.backend
        self._write()
        before = self._read(self.here)
        out = backend.copy_blocks(case.pool, self.host, np.stack([self.here, self.ids], 1))
        back = backend.copy_blocks(self.host, case.pool, np.stack([self.ids, self.there], 1), after=out)
        self._busy()
        backend.wait(out)
        self._write()
        self._busy()
        backend.wait(back)
        return before, self._read(self.there)

    def _busy(self) -> None:
        """Other work."""
        self.case.attend(self.case.backend.plan(self.case.pool, 0, self.case.batch()))

    def _write(self) -> None:
        """New keys and values in all of S."""
        tokens = MOVED * BLOCK
        slots = (self.here[:, None].astype(np.int64) * BLOCK + np.arange(BLOCK)).reshape(-1)
        keys, values = (self.case._random(tokens, KV_HEADS, DIM) for _ in range(2))
        backend, pool = self.case.backend, self.case.pool
        backend.attend(backend.plan(pool, 0, _appending(slots)), 0, None, keys, values, None)

    def _read(self, blocks: np.ndarray) -> torch.Tensor:
        """One query over all of these blocks."""
        context = MOVED * BLOCK
        batch = Batch(
            num_seqs=1,
            num_tokens=1,
            cu_q=np.array([0, 1], np.int32),
            ctx_len=np.array([context], np.int32),
            block_table=np.stack([np.zeros_like(blocks), blocks]),
            rows=np.ones(1, np.int32),
            slots=np.full(1, -1, np.int64),
            max_q=1,
            max_ctx=context,
            num_decode=1,
        )
        out = torch.empty_like(self.q)
        backend = self.case.backend
        backend.attend(backend.plan(self.case.pool, 0, batch), 0, self.q, None, None, out)
        return out

    def close(self) -> None:
        """Give the host's memory back."""
        self.host.close()


def copies(case: Case, rounds: int) -> dict[str, Any]:
    """Races, and bytes a second of copies alone, each way."""
    race, backend = Race(case), case.backend
    lost = race.rounds(rounds)
    out, back = np.stack([race.here, race.ids], 1), np.stack([race.ids, race.there], 1)
    nbytes = MOVED * backend.pool_cost(case.pool.spec).per_block
    ways = {"out": (case.pool, race.host, out), "back": (race.host, case.pool, back)}
    speeds = {
        f"copy_bytes_per_second_{name}": nbytes / best(backend, lambda way=way: backend.copy_blocks(*way), 10)
        for name, way in ways.items()
    }
    race.close()
    return {"rounds": rounds, "rounds_that_differ": lost, **speeds}


def works(small: bool) -> Iterator[Work]:
    """Decode at several batch sizes and contexts, and prefill."""
    if small:
        yield from (Work(rows=2, queries=1, context=130), Work(rows=1, queries=64, context=64))
        return
    for rows in (1, 8, 32, 128):
        for context in (512, 2048, 8192):
            yield Work(rows=rows, queries=1, context=context)
    yield from (Work(rows=1, queries=n, context=n) for n in (512, 2048, 8192))


def native(backend: AttentionBackend) -> str:
    """The dtype that the engine would choose."""
    can = backend.capabilities()
    return (can.native_dtypes or can.dtypes)[0]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--backend-option", action="append", default=[])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dtype", choices=NAMES.values(), help="else the backend's first native one")
    parser.add_argument("--flex", action="store_true", help="also FlexAttention for two of them, which compiles first")
    parser.add_argument("--small", action="store_true", help="sizes for a processor, to try the script itself")
    return parser.parse_args(words)


def main() -> None:
    given = arguments()
    selected = plugins.select(given.backend)
    options = plugins.parse_options(selected.descriptor, given.backend_option)
    backend = plugins.create(selected, options)
    dtype = next(kind for kind, name in NAMES.items() if name == (given.dtype or native(backend)))
    device = limits(backend, dtype, given.small)
    said: dict[str, Any] = {"device": selected.device.kind, "dtype": NAMES[dtype], "limits": device, "attention": []}
    all_works = list(works(given.small))
    middle = next(work for work in all_works if given.small or (work.rows, work.context) == (32, 2048))
    compared = {middle, all_works[-1 if given.small else -2]} if given.flex else set()
    for work in all_works:
        case = Case(backend, work, dtype)
        row = measured(case, device) | (flex(case) if work in compared else {})
        said["attention"].append(row)
        print(json.dumps(row), flush=True)
        if work == middle:
            said["graphs"] = graphs(case)
            if "host" in backend.capabilities().placements:
                said["copies"] = copies(case, 3 if given.small else 200)
            print(json.dumps({name: said.get(name) for name in ("graphs", "copies")}), flush=True)
        case.pool.close()
        given.output.write_text(json.dumps(said, indent=2) + "\n")
    backend.close()


if __name__ == "__main__":
    main()
