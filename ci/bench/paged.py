"""A pool filled with random keys and values, its blocks in random order, and the batches that read and write it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagedkv.api import AttentionBackend, Batch, GroupSpec, Limits, Plan, PoolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """So many equal sequences, the last `queries` tokens of each `context` being this step's."""

    count: int
    queries: int
    context: int

    @property
    def tokens(self) -> int:
        """Queries of all rows."""
        return self.count * self.queries

    @property
    def pairs(self) -> int:
        """Visible pairs of query and key, of one head: the query at position p sees p + 1 keys."""
        before = self.context - self.queries
        return self.count * (self.queries * before + self.queries * (self.queries + 1) // 2)


class Paged:
    """One pool of one group, written through the contract. Row i of the table belongs to sequence i - 1."""

    def __init__(self, backend: AttentionBackend, group: GroupSpec, rows: Rows) -> None:
        self._backend, self._group = backend, group
        width = -(-rows.context // group.block_size)
        self._table = np.zeros((rows.count + 1, width), np.int32)
        ids = np.random.default_rng(0).permutation(rows.count * width).astype(np.int32)
        self._table[1:] = ids.reshape(rows.count, width) + 1
        limits = Limits(rows=rows.count, tokens=max(rows.context, rows.tokens), context=rows.context)
        blocks = rows.count * width + 1
        self.pool = backend.alloc_pool(PoolSpec(groups=(group,), num_blocks=blocks, dtype="fp32", limits=limits))
        self.layers = len(group.layers)
        self._fill(rows)

    def plan(self, rows: Rows, *, writes: bool = False, first: int = 1) -> Plan:
        """A plan of these rows, from row `first` of the table on; with `writes` it has slots for their tokens."""
        places = np.arange(first, first + rows.count, dtype=np.int32)
        batch = Batch(
            num_seqs=rows.count,
            num_tokens=rows.tokens,
            cu_q=np.arange(rows.count + 1, dtype=np.int32) * rows.queries,
            ctx_len=np.full(rows.count, rows.context, np.int32),
            block_table=self._table,
            rows=places,
            slots=self._slots(rows, places) if writes else None,
            max_q=rows.queries,
            max_ctx=rows.context,
            num_decode=rows.count if rows.queries == 1 else 0,
        )
        return self._backend.plan(self.pool, 0, batch)

    def _slots(self, rows: Rows, places: np.ndarray) -> np.ndarray:
        size = self._group.block_size
        at = np.arange(rows.context - rows.queries, rows.context)
        slots: np.ndarray = self._table[places][:, at // size].astype(np.int64) * size + at % size
        return slots.reshape(-1)

    def _fill(self, rows: Rows) -> None:
        """Write every slot of every layer: memory that nobody wrote is read from one page of zeros, far too fast."""
        layer = self._group.layers[0]
        keys = torch.randn(rows.context, layer.kv_heads, layer.k_dim)
        values = torch.randn(rows.context, layer.kv_heads, layer.v_dim)
        one = Rows(count=1, queries=rows.context, context=rows.context)
        for row in range(rows.count):
            plan = self.plan(one, writes=True, first=row + 1)
            for index in range(self.layers):
                self._backend.attend(plan, index, None, keys, values, None)
