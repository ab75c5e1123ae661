"""Batches misread: whose row, whose array, whose buffer."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.conformance.mutants.table import mutant

OVERWRITTEN = (
    "host arrays: everything in a batch may be overwritten",
    "test_batch.py::test_arrays_overwritten_after_plan",
)


# -- host arrays that stay the caller's --------------------------------------------------------------------------------


class Live:
    """Block tables that are looked up when they are read."""

    def __init__(self, table: Any, rows: Any) -> None:
        self._table, self._rows = table, rows

    def __getitem__(self, row: int) -> Any:
        return self._table[self._rows[row]]


@mutant("_stage", *OVERWRITTEN)
def block_table_is_aliased(original: Any, self: Any, batch: Any, block_size: int) -> Any:
    """The core's block table is read in attend."""
    staged = original(self, batch, block_size)
    return dataclasses.replace(staged, tables=Live(batch.block_table, batch.rows.copy()))


@mutant("_stage", *OVERWRITTEN)
def rows_are_aliased(original: Any, self: Any, batch: Any, block_size: int) -> Any:
    """The numbers of the table's rows are read in attend."""
    staged = original(self, batch, block_size)
    return dataclasses.replace(staged, tables=Live(batch.block_table.copy(), batch.rows))


@mutant("_stage", *OVERWRITTEN)
def contexts_are_aliased(original: Any, self: Any, batch: Any, block_size: int) -> Any:
    """The context lengths are read in attend."""
    return dataclasses.replace(original(self, batch, block_size), contexts=batch.ctx_len[: batch.num_seqs])


@mutant("_stage", *OVERWRITTEN)
def starts_are_aliased(original: Any, self: Any, batch: Any, block_size: int) -> Any:
    """`cu_q` is read in attend."""
    return dataclasses.replace(original(self, batch, block_size), starts=batch.cu_q[: batch.num_seqs + 1])


@mutant("_stage", *OVERWRITTEN)
def slots_are_aliased(original: Any, self: Any, batch: Any, block_size: int) -> Any:
    """The slots are read when the append runs."""
    staged = original(self, batch, block_size)
    return staged if batch.slots is None else dataclasses.replace(staged, slots=batch.slots)


# -- fields misread ----------------------------------------------------------------------------------------------------


@mutant("_tables", "rows: batch row i reads table row rows[i]", "test_batch.py::test_rows_name_the_table_rows")
def table_row_i(original: Any, self: Any, batch: Any) -> Any:
    """Table row i is read for batch row i."""
    return batch.block_table[: batch.num_seqs]


@mutant("_tables", "table: its row stride is free", "test_batch.py::test_row_stride_of_the_table")
def table_stride_ignored(original: Any, self: Any, batch: Any) -> Any:
    """The table is read as if its rows lay one behind the other."""
    height, width = batch.block_table.shape
    flat = np.lib.stride_tricks.as_strided(batch.block_table, (height, width), (4 * width, 4))
    return flat[batch.rows[: batch.num_seqs]]


@mutant("_stage", "bounds: max_q and max_ctx are upper bounds", "test_batch.py::test_generous_bounds")
def max_ctx_is_taken_for_true(original: Any, self: Any, batch: Any, block_size: int) -> Any:
    """The longest row has `max_ctx` keys."""
    longest = np.argmax(batch.ctx_len[: batch.num_seqs]) if batch.num_seqs else 0
    staged = original(self, batch, block_size)
    staged.contexts[longest : longest + 1] = batch.max_ctx
    return staged


@mutant("_stage", "padding: rows past num_seqs have no query", "test_append.py::test_padding_rows_of_the_batch")
def padding_rows_have_a_query(original: Any, self: Any, batch: Any, block_size: int) -> Any:
    """A row past num_seqs is taken for a decode row, whose query is the last token before its end."""
    staged = original(self, batch, block_size)
    if len(batch.ctx_len) == batch.num_seqs or not batch.num_tokens:
        return staged
    end, tables = batch.num_tokens, staged.tables
    return dataclasses.replace(
        staged,
        starts=np.append(staged.starts, [end - 1, end]),  # the row from end to end - 1 has no query
        contexts=np.append(staged.contexts, [0, 0]),
        tables=np.concatenate([tables, tables[:1], tables[:1]]),
    )


@mutant(
    "_stage",
    "bounds: num_decode may be 0 although rows have one query token",
    "test_batch.py::test_no_row_called_decode",
)
def single_tokens_are_decode(original: Any, self: Any, batch: Any, block_size: int) -> Any:
    """Rows of one query that `num_decode` does not count are lost."""
    staged = original(self, batch, block_size)
    lost = (np.diff(staged.starts) == 1) & (np.arange(batch.num_seqs) >= batch.num_decode)
    return dataclasses.replace(staged, contexts=np.where(lost, 0, staged.contexts))


# -- plans -------------------------------------------------------------------------------------------------------------


def _overwrite(tables: Any, later: Any) -> None:
    """The corner of a buffer that a later plan uses too."""
    rows, columns = np.minimum(tables.shape, later.shape)
    tables[:rows, :columns] = later[:rows, :columns]


@mutant("_retire", "plans: two of one group are alive together", "test_plans.py::test_two_plans_of_one_group")
def two_plans_share_a_buffer(original: Any, self: Any, pool: Any, group: int, plan: Any) -> None:
    """The block tables of all plans of a group are written to the same place."""
    for other in pool._plans[group]:
        _overwrite(other._next.tables, plan._next.tables)
    original(self, pool, group, plan)


@mutant("_retire", "plans: those of two groups of one pool", "test_plans.py::test_plans_of_two_groups")
def groups_share_a_buffer(original: Any, self: Any, pool: Any, group: int, plan: Any) -> None:
    """The block tables of another group's plans are written to the same place."""
    for number, alive in enumerate(pool._plans):
        for other in alive if number != group else ():
            _overwrite(other._next.tables, plan._next.tables)
    original(self, pool, group, plan)
