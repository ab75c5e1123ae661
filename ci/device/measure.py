"""Attention, graphs and copies of one backend, beside limits measured on the same device: figures as JSON.

    python ci/device/measure.py --backend cuda --output kernels.json

For a machine with a card; with `--backend cpu --small` it runs anywhere, which shows that it runs, and no more.
Decode is held to the speed at which the device reads memory, prefill to that of a large matrix product, both to torch's
scaled_dot_product_attention on the same keys and values, laid out without blocks. Times are the best of some rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
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
ROUNDS = 5
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


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
    many = torch.ones(1 << (22 if small else 30), dtype=torch.uint8, device=device).view(torch.int32)
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
            num_blocks=work.rows * self.columns + 1,
            dtype=NAMES[dtype],
            limits=Limits(rows=work.rows, tokens=tokens, context=work.context),
        )
        self.pool = backend.alloc_pool(spec)
        blocks = np.random.default_rng(0).permutation(np.arange(1, spec.num_blocks)).astype(np.int32)
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

    def batch(self) -> Batch:
        """The step: every row with its queries at the end of its context."""
        work = self.work
        return Batch(
            num_seqs=work.rows,
            num_tokens=work.rows * work.queries,
            cu_q=(np.arange(work.rows + 1) * work.queries).astype(np.int32),
            ctx_len=np.full(work.rows, work.context, np.int32),
            block_table=self.table,
            rows=np.arange(1, work.rows + 1, dtype=np.int32),
            slots=np.full(work.rows * work.queries, -1, np.int64),
            max_q=work.queries,
            max_ctx=work.context,
            num_decode=work.rows if work.queries == 1 else 0,
        )

    def attend(self, plan: Any) -> None:
        self.backend.attend(plan, 0, self.q, None, None, self.out)

    def reference(self) -> torch.Tensor:
        """The same by scaled_dot_product_attention: [rows, heads, queries, dim]."""
        work = self.work
        q = self.q.view(work.rows, work.queries, HEADS, DIM).transpose(1, 2)
        keys, values = self.keys.transpose(1, 2), self.values.transpose(1, 2)
        causal = work.queries == work.context
        if not causal and work.queries > 1:
            raise ValueError("prefill is measured without a cached prefix")
        return F.scaled_dot_product_attention(q, keys, values, is_causal=causal, enable_gqa=True)


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


def graphs(case: Case) -> dict[str, Any]:
    """A decode step recorded and replayed, beside the eager one."""
    extension = case.backend.extension("graph")
    if extension is None:
        return {"graph": "this backend has no graphs"}
    work, batch = case.work, case.batch()
    static = extension.static_plan(case.pool, 0, GraphShape(rows=work.rows, tokens=work.rows, max_ctx=work.context))
    extension.refresh(static, batch)
    graph = extension.capture(lambda: case.attend(static), [static])
    eager = case.backend.plan(case.pool, 0, batch)
    case.attend(eager)
    wanted = case.out.clone()
    case.out.zero_()
    graph.replay()
    case.backend.synchronize()
    same = float((case.out.float() - wanted.float()).abs().max())
    replay = best(case.backend, graph.replay, 10)
    return {"graph_seconds": replay, "eager_seconds": best(case.backend, lambda: case.attend(eager), 10), "worst": same}


def copies(backend: AttentionBackend, case: Case, rounds: int) -> dict[str, Any]:
    """Blocks out to the host and back to other places while attention runs beside: bytes a second, and lost blocks."""
    spec = case.pool.spec
    count = min(64, (spec.num_blocks - 1) // 2)
    host = backend.alloc_pool(
        PoolSpec(groups=spec.groups, num_blocks=count + 1, dtype=spec.dtype, limits=spec.limits, placement="host")
    )
    ids, plan, lost = np.arange(1, count + 1, dtype=np.int32), backend.plan(case.pool, 0, case.batch()), 0
    case.attend(plan)
    before = case.out.clone()
    began = time.perf_counter()
    for _ in range(rounds):
        out = backend.copy_blocks(case.pool, host, np.stack([ids, ids], 1))
        case.attend(plan)
        back = backend.copy_blocks(host, case.pool, np.stack([ids, ids], 1), after=out)
        backend.wait(back)
        case.attend(plan)
        lost += int(not torch.equal(case.out, before))
    backend.synchronize()
    seconds = time.perf_counter() - began
    nbytes = 2 * rounds * count * backend.pool_cost(spec).per_block
    host.close()
    return {"copy_bytes_per_second_beside_compute": nbytes / seconds, "rounds": rounds, "rounds_that_differ": lost}


def works(small: bool) -> Iterator[Work]:
    """Decode at several batch sizes and contexts, and prefill."""
    if small:
        yield from (Work(rows=2, queries=1, context=130), Work(rows=1, queries=64, context=64))
        return
    for rows in (1, 8, 32, 128):
        for context in (512, 2048, 8192):
            yield Work(rows=rows, queries=1, context=context)
    yield from (Work(rows=1, queries=n, context=n) for n in (512, 2048, 8192))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--backend-option", action="append", default=[])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="sizes for a processor, to try the script itself")
    given = parser.parse_args()
    selected = plugins.select(given.backend)
    options = plugins.parse_options(selected.descriptor, given.backend_option)
    backend = plugins.create(selected, options)
    dtype = torch.bfloat16 if "bf16" in backend.capabilities().native_dtypes else torch.float32
    device = limits(backend, dtype, given.small)
    said: dict[str, Any] = {"device": selected.device.kind, "dtype": NAMES[dtype], "limits": device, "attention": []}
    for work in works(given.small):
        case = Case(backend, work, dtype)
        row = measured(case, device)
        said["attention"].append(row)
        print(json.dumps(row), flush=True)
        last_decode = work.queries == 1 and work.rows <= 32
        if last_decode:
            said["graphs"] = graphs(case)
            if "host" in backend.capabilities().placements:
                said["copies"] = copies(backend, case, 3 if given.small else 50)
        case.pool.close()
        given.output.write_text(json.dumps(said, indent=2) + "\n")
    backend.close()


if __name__ == "__main__":
    main()
