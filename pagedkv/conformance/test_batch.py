"""What the fields of a batch mean, and what about them is free."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from pagedkv.api import Batch
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.rig import Rig, Row

pytestmark = pytest.mark.level("core")


def mixed(rig: Rig) -> list[Row]:
    """Two decode rows, a chunk and a prefill; what came before is in the cache."""
    size = rig.block_size
    shapes = [(size + 1, 1), (2 * size, 1), (2 * size + 1, size), (3, 3)]
    rows = [(rig.sequence(length), length, count) for length, count in shapes]
    for seq, length, count in rows:
        rig.write(seq, 0, length - count)
    return rows


def run(rig: Rig, rows: list[Row], batch: Batch) -> Any:
    """Append and attend with a batch of the case's own."""
    return rig.attend(rig.backend.plan(rig.pool, rig.group_index, batch), rows, rig.layer())


def garbage(batch: Batch) -> None:
    """Other legal looking numbers in every host array of a batch."""
    batch.cu_q[:] = 0
    batch.ctx_len[:] = 1
    batch.rows[:] = 0
    batch.block_table[:] = 1
    if batch.slots is not None:
        batch.slots[:] = -1


@pytest.mark.law("batch: decode rows, chunks and prefills go together in one batch")
def test_mixed(kit: Kit) -> None:
    rig = kit.rig()
    rows = mixed(rig)
    out = rig.step(*rows)
    kit.check(rig, out, rig.expected(*rows), mistake="rows of different query counts were given one another's tokens")


@pytest.mark.law("rows: batch row i reads table row rows[i], not row i")
def test_rows_name_the_table_rows(kit: Kit) -> None:
    rig = kit.rig()
    rows = mixed(rig)
    batch = rig.batch(rows)
    table = np.zeros((len(rows) + 1, batch.block_table.shape[1]), np.int32)
    at = np.arange(len(rows), 0, -1, dtype=np.int32)
    table[at] = batch.block_table[batch.rows]
    out = run(rig, rows, dataclasses.replace(batch, block_table=table, rows=at))
    kit.check(rig, out, rig.expected(*rows), mistake="table row i was read for batch row i instead of rows[i]")


@pytest.mark.law("rows: several batch rows may name one table row")
def test_repeated_rows(kit: Kit) -> None:
    rig = kit.rig()
    seq = rig.sequence(2 * rig.block_size + 1)
    rig.write(seq, 0, seq.length)
    rows = [(seq, context, 1) for context in (seq.length, rig.block_size, 1)]
    batch = rig.batch(rows, write=False)
    batch.rows[:] = batch.rows[0]
    plan = rig.backend.plan(rig.pool, 0, batch)
    out = rig.attend(plan, rows, rig.layer(), write=False)
    kit.check(rig, out, rig.expected(*rows), mistake="rows that repeat were taken for one, or for the next ones")


@pytest.mark.law("rows: the order of the rows in a batch changes no result")
def test_permuted_rows(kit: Kit) -> None:
    rig = kit.rig()
    rows = mixed(rig)
    for order in ([3, 2, 1, 0], [2, 0, 3, 1]):
        turned = [rows[i] for i in order]
        out = rig.step(*turned)
        kit.check(
            rig, out, rig.expected(*turned), mistake="results went to another row, or decode rows were assumed first"
        )


@pytest.mark.law("host arrays: everything in a batch may be overwritten once plan returns")
def test_arrays_overwritten_after_plan(kit: Kit) -> None:
    rig = kit.rig(kit.layer(0), kit.layer(1))
    rows = mixed(rig)
    batch = rig.batch(rows)
    plan = rig.backend.plan(rig.pool, 0, batch)
    garbage(batch)
    for layer in rig.group.layers:
        out = rig.attend(plan, rows, layer)
        wanted = rig.expected(*rows, layer=layer.index)
        kit.check(rig, out, wanted, mistake="the plan kept a view of a host array: copy what it needs")


@pytest.mark.needs("window")
@pytest.mark.law("table: entries wholly behind the window may be 0 or another block of the sequence")
@pytest.mark.parametrize("entry", ["null", "owned"])
def test_entries_behind_the_window(kit: Kit, entry: str) -> None:
    size = kit.block_size
    rig = kit.rig(kit.layer(window=size + 1))
    seq = rig.sequence(4 * size + 2)
    rig.write(seq, 0, seq.length)
    count = 2
    hidden = max(0, seq.length - count - size) // size  # the first query sees positions past length - count - window
    gone = seq.moved([0 if entry == "null" else seq.blocks[-1]] * hidden + seq.blocks[hidden:])
    rows = [(gone, seq.length, count), (gone, seq.length, 1)]
    out = rig.step(*rows, write=False)
    kit.check(rig, out, rig.expected(*rows), mistake="a key behind the window was read")


@pytest.mark.law("table: entries past the context may be 0 or another block of the sequence")
def test_entries_past_the_context(kit: Kit) -> None:
    rig = kit.rig()
    rows = []
    for length, count in ((rig.block_size, 1), (rig.block_size + 1, 2)):
        seq = rig.sequence(length)
        rig.write(seq, 0, length - count)
        rows.append((seq.moved([*seq.blocks, seq.blocks[0], 0, seq.blocks[0]]), length, count))
    kit.check(rig, rig.step(*rows), rig.expected(*rows), mistake="a block past the context was read")


@pytest.mark.law("table: its row stride is free")
@pytest.mark.parametrize("more", [0, 13])
def test_row_stride_of_the_table(kit: Kit, more: int) -> None:
    rig = kit.rig()
    rows = mixed(rig)
    batch = rig.batch(rows)
    height, width = batch.block_table.shape
    whole = np.ones((height, width + more), np.int32)
    whole[:, :width] = batch.block_table
    out = run(rig, rows, dataclasses.replace(batch, block_table=whole[:, :width]))
    kit.check(rig, out, rig.expected(*rows), mistake="the row stride of the table was taken for its width")


@pytest.mark.law("bounds: max_q and max_ctx are upper bounds, not the true maxima")
def test_generous_bounds(kit: Kit) -> None:
    rig = kit.rig()
    rows = mixed(rig)
    limits = rig.spec.limits
    out = rig.step(*rows, max_q=limits.tokens, max_ctx=limits.context)
    kit.check(rig, out, rig.expected(*rows), mistake="max_q or max_ctx was taken for a true length")


@pytest.mark.law("bounds: num_decode may be 0 although rows have one query token")
def test_no_row_called_decode(kit: Kit) -> None:
    rig = kit.rig()
    rows = mixed(rig)
    kit.check(rig, rig.step(*rows, num_decode=0), rig.expected(*rows), mistake="rows of one token were lost")
