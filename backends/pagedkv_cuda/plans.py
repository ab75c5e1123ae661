"""Plans: a batch checked, brought into arrays of our own, and sent to the device in one copy.

    host arrays ── pinned buffer ── one copy on the compute stream ──> device buffer ── views for the kernels

Each group has `limits.plans` pairs of buffers, used in turn. A device buffer is overwritten on the compute stream, and
so after every attend that was enqueued before; a pinned one once its last copy has ended, which the host waits for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pagedkv.api import Batch, ContractViolation, Event, Plan
from pagedkv.api.extensions import GraphShape
from pagedkv_cuda.path import Arrays, Path, Staged
from pagedkv_cuda.pool import CudaPool, up
from pagedkv_cuda.runtime import Runtime

_ITEM = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class Buffers:
    """A pinned buffer and one on the device."""

    def __init__(self, runtime: Runtime, nbytes: int) -> None:
        self._runtime = runtime
        self._pinned = runtime.staging(nbytes)
        self._host = self._pinned.numpy()
        self._device = torch.empty(nbytes, dtype=torch.uint8, device=runtime.torch_device)
        self._sent = Event()

    def send(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """The arrays on the device, by name; equal shapes give equal addresses."""
        self._sent.join()
        views, end = {}, 0
        for name, array in arrays.items():
            start, end = end, end + array.nbytes
            if end > len(self._host):
                raise ContractViolation(
                    f"a batch of {len(arrays['slots'])} slots is larger than the pool's limits", law="limits"
                )
            self._host[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            views[name] = self._device[start:end].view(_ITEM[array.dtype]).view(array.shape)
            end = up(end, 8)
        self._device[:end].copy_(self._pinned[:end], non_blocking=True)
        self._sent = self._runtime.record()
        return views


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
        empty = padded_batch(empty_batch(), pool.spec.groups[group].block_size, shape)
        size = sum(up(array.nbytes, 8) for array in path.arrays(empty, pool.num_blocks).values())
        self.nbytes = size
        self._buffers = Buffers(runtime, size)
        self.refresh(path, empty)

    def refresh(self, path: Path, batch: Staged) -> None:
        """Hold this batch, at the same addresses."""
        self.take(path, batch, self._buffers)
        self.num_tokens = self.shape.tokens


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


def check_limits(batch: Batch, rows: int, tokens: int, context: int) -> None:
    """`ContractViolation` where a batch is larger than what was announced."""
    longest = int(batch.ctx_len[: batch.num_seqs].max(initial=0))
    given = {"rows": (batch.num_seqs, rows), "tokens": (batch.num_tokens, tokens), "context": (longest, context)}
    for name, (value, limit) in given.items():
        if value > limit:
            raise ContractViolation(f"the batch has {name} {value}, the limit is {limit}", law="limits")


def check_batch(batch: Batch, block_size: int, num_blocks: int) -> None:
    """`ContractViolation` for arrays that do not describe one batch of such a pool."""
    count = batch.num_seqs
    starts, contexts, rows = batch.cu_q[: count + 1], batch.ctx_len[:count], batch.rows[:count]
    if len(starts) != count + 1 or starts[0] != 0 or starts[-1] != batch.num_tokens or (np.diff(starts) < 0).any():
        raise ContractViolation("cu_q must rise from 0 to num_tokens over num_seqs + 1 entries", law="batch")
    if min(len(contexts), len(rows)) < count or (contexts < 0).any():
        raise ContractViolation("ctx_len and rows have one entry of at least 0 for each sequence", law="batch")
    if not 0 <= rows.min(initial=0) <= rows.max(initial=0) < len(batch.block_table):
        raise ContractViolation(f"rows names a row outside 0..{len(batch.block_table) - 1}", law="batch")
    _check_table(batch, -(-int(contexts.max(initial=0)) // block_size), num_blocks)
    if batch.slots is not None:
        _check_slots(batch.slots, block_size, num_blocks * block_size)


def _check_table(batch: Batch, columns: int, num_blocks: int) -> None:
    if columns > batch.block_table.shape[1]:
        raise ContractViolation(
            f"a context needs {columns} blocks and the block table has {batch.block_table.shape[1]} columns",
            law="batch",
        )
    named = batch.block_table[batch.rows[: batch.num_seqs], :columns]
    if named.size and not 0 <= named.min() <= named.max() < num_blocks:
        raise ContractViolation(f"the block table names a block outside 0..{num_blocks - 1}", law="batch")


def _check_slots(slots: Any, block_size: int, end: int) -> None:
    used = slots[slots != -1]
    if used.size and not block_size <= used.min() <= used.max() < end:
        raise ContractViolation(
            f"slots must be -1 or {block_size}..{end - 1}, as block 0 is never written; got {used.min()}..{used.max()}",
            law="slots",
        )
