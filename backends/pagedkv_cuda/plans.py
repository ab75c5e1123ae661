"""Plans: a batch checked, brought into arrays of our own, and sent to the device in one copy.

    host arrays ── pinned buffer ── one copy on the compute stream ──> device buffer ── views for the kernels

Each group has `limits.plans` pairs of buffers, used in turn. A device buffer is overwritten on the compute stream, and
so after every attend that was enqueued before; a pinned one once its last copy has ended, which the host waits for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pagedkv.api import Batch, Plan
from pagedkv.api.extensions import GraphShape
from pagedkv.api.torch_streams import Buffers, Runtime
from pagedkv_cuda.path import Path, Staged
from pagedkv_cuda.pool import CudaPool


class CudaPlan(Plan):
    """One batch on the device. `bounds` is what the path's host side knows of it."""

    def __init__(self, pool: CudaPool, group: int) -> None:
        self.pool, self.group = pool, group
        self.num_tokens, self.num_slots = 0, 0
        self.arrays: dict[str, torch.Tensor] = {}
        self.bounds: Any = None
        self.static = False
        self.record: Any = None

    def take(self, path: Path, batch: Staged, buffers: Buffers) -> None:
        """Hold this batch from now on."""
        self.arrays = buffers.send(path.arrays(batch, self.pool.num_blocks))
        self.bounds = path.bounds(batch)
        self.num_tokens, self.num_slots = batch.num_tokens, len(batch.slots)


class StaticPlan(CudaPlan):
    """A plan of fixed shape; `refresh` gives it a batch. Its buffers are its own, so that recordings may hold them."""

    def __init__(self, pool: CudaPool, group: int, shape: GraphShape, path: Path, runtime: Runtime) -> None:
        super().__init__(pool, group)
        self.static, self.shape = True, shape
        self._path, self._block_size = path, pool.spec.groups[group].block_size
        empty = empty_batch()
        self.nbytes = Buffers.size(path.arrays(self._padded(empty), pool.num_blocks))
        self._buffers = Buffers(runtime, self.nbytes)
        self.refresh(empty)

    def refresh(self, batch: Batch) -> None:
        """Hold this batch, at the same addresses."""
        self.take(self._path, self._padded(batch), self._buffers)
        self.num_tokens = self.shape.tokens

    def _padded(self, batch: Batch) -> Staged:
        return padded_batch(batch, self._block_size, self.shape)


class Ring:
    """The buffers of one group's plans, used in turn."""

    def __init__(self, pool: CudaPool, group: int, path: Path, runtime: Runtime) -> None:
        size = path.staging_bytes(pool.spec, pool.spec.groups[group])
        self._all = [Buffers(runtime, size) for _ in range(max(1, pool.spec.limits.plans))]
        self._turn = 0

    def next(self) -> Buffers:
        """The pair that was used longest ago."""
        self._turn = (self._turn + 1) % len(self._all)
        return self._all[self._turn]


# -- batches -----------------------------------------------------------------------------------------------------------


def empty_batch() -> Batch:
    """No row at all."""
    nothing = np.zeros(0, np.int32)
    return Batch(
        num_seqs=0,
        num_tokens=0,
        cu_q=np.zeros(1, np.int32),
        ctx_len=nothing,
        block_table=np.zeros((1, 1), np.int32),
        rows=nothing,
        slots=np.zeros(0, np.int64),
        max_q=0,
        max_ctx=0,
    )


def staged(batch: Batch, block_size: int, path: Path) -> Staged:
    """The batch as it is, in our own arrays."""
    count = batch.num_seqs
    contexts = batch.ctx_len[:count].astype(np.int32)
    most = int(contexts.max(initial=0))
    return Staged(
        num_tokens=batch.num_tokens,
        counts=np.diff(batch.cu_q[: count + 1]).astype(np.int32),
        contexts=contexts,
        table=batch.block_table[batch.rows[:count], : max(1, -(-most // block_size))].astype(np.int32),
        slots=np.zeros(0, np.int64) if batch.slots is None else batch.slots.astype(np.int64),
        block_size=block_size,
        most_context=most,
        decode_q=min(max(1, batch.decode_q), path.decode_q),
        static=False,
    )


def padded_batch(batch: Batch, block_size: int, shape: GraphShape) -> Staged:
    """The batch in arrays as large as the shape."""
    count, columns = batch.num_seqs, max(1, -(-shape.max_ctx // block_size))
    counts, contexts = np.zeros(shape.rows, np.int32), np.zeros(shape.rows, np.int32)
    counts[:count], contexts[:count] = np.diff(batch.cu_q[: count + 1]), batch.ctx_len[:count]
    table = np.zeros((shape.rows, columns), np.int32)
    given = batch.block_table[batch.rows[:count], :columns]
    table[:count, : given.shape[1]] = given
    slots = np.full(shape.tokens, -1, np.int64)
    if batch.slots is not None:
        slots[: len(batch.slots)] = batch.slots
    return Staged(
        num_tokens=batch.num_tokens,
        counts=counts,
        contexts=contexts,
        table=table,
        slots=slots,
        block_size=block_size,
        most_context=shape.max_ctx,
        decode_q=shape.decode_q,
        static=True,
    )
