"""Rows of one layer on an Ascend backend, and what float64 makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagedkv.api import Batch, PoolSpec
from pagedkv_ascend.backend import AscendBackend


def batch(rows: Sequence[tuple[int, int]], *, size: int) -> Batch:
    """Rows of (context, query tokens), appended at their ends; row r has blocks 1 + 2 r and the one after it."""
    counts = [count for _, count in rows]
    table, slots = np.array([[1 + 2 * row, 2 + 2 * row] for row in range(len(rows))], np.int32), []
    for row, (context, count) in enumerate(rows):
        slots += [int(table[row, at // size]) * size + at % size for at in range(context - count, context)]
    return Batch(
        num_seqs=len(rows),
        num_tokens=sum(counts),
        cu_q=np.cumsum([0, *counts], dtype=np.int32),
        ctx_len=np.array([context for context, _ in rows], np.int32),
        block_table=table,
        rows=np.arange(len(rows), dtype=np.int32),
        slots=np.array(slots, np.int64),
        max_q=max(counts),
        max_ctx=max(context for context, _ in rows),
    )


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


class Sequences:
    """Rows of one layer that are appended and attended, and the same in float64."""

    def __init__(self, backend: AscendBackend, wanted: PoolSpec, rows: Sequence[int]) -> None:
        self.backend, self.pool = backend, backend.alloc_pool(wanted)
        self.device = backend.torch_device
        self.layer, self.size = wanted.groups[0].layers[0], wanted.groups[0].block_size
        one = self.layer
        self.k = [numbers(n, one.kv_heads, one.k_dim, seed=n) for n in rows]
        self.v = [numbers(n, one.kv_heads, one.v_dim, seed=n + 1) for n in rows]
        self.q = [numbers(n, one.q_heads, one.k_dim, seed=n + 2) for n in rows]

    def step(self, done: Sequence[int], counts: Sequence[int]) -> list[torch.Tensor]:
        """The next `counts` tokens of the first rows, of which `done` are there; results by row."""
        rows = [(before + count, count) for before, count in zip(done, counts, strict=True)]
        plan = self.backend.plan(self.pool, 0, batch(rows, size=self.size))
        q, k, v = (
            torch.cat([one[before : before + count] for one, before, count in zip(many, done, counts, strict=False)])
            for many in (self.q, self.k, self.v)
        )
        q, k, v = (tensor.to(self.device) for tensor in (q, k, v))
        out = torch.empty(len(q), self.layer.q_heads, self.layer.v_dim, dtype=q.dtype, device=self.device)
        self.backend.attend(plan, self.layer.index, q, k, v, out)
        return list(out.cpu().split(list(counts)))

    def expected(self, row: int, place: int) -> torch.Tensor:
        """float64 [heads, dim] of the query at this place: softmax over the keys that its window leaves."""
        window, ratio = self.layer.window, self.layer.q_heads // self.layer.kv_heads
        first = 0 if window is None else max(0, place + 1 - window)
        q, k, v = (many[row].double() for many in (self.q, self.k, self.v))
        k, v = (one[first : place + 1].repeat_interleave(ratio, dim=1) for one in (k, v))
        weights = torch.softmax(torch.einsum("hd,khd->hk", q[place], k) * self.layer.scale, -1)
        return torch.einsum("hk,khd->hd", weights, v)

    def check(self, made: Sequence[torch.Tensor], done: Sequence[int]) -> None:
        for row, (results, before) in enumerate(zip(made, done, strict=True)):
            for at, result in enumerate(results):
                assert torch.allclose(result.double(), self.expected(row, before + at), atol=4e-3)
