"""Appends that go elsewhere, come too late or write too much, and values bound wrongly."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.conformance.mutants.table import mutant


@mutant("_append", "append: each row of k and v is written at its slot", "test_append.py::test_rows_are_written")
def write_is_a_no_op(original: Any, self: Any, layer: Any, slots: Any, keys: Any, values: Any) -> None:
    """Nothing is appended."""


@mutant(
    "_append",
    "append: the last row of k and the last slot of a block are written",
    "test_append.py::test_last_slot_is_written",
)
def last_slot_not_written(original: Any, self: Any, layer: Any, slots: Any, keys: Any, values: Any) -> None:
    """The last slot of each block is left out."""
    size = layer.keys.shape[1]
    original(self, layer, np.where(slots % size == size - 1, -1, slots), keys, values)


@mutant(
    "_append",
    "append: the last row of k and the last slot of a block are written",
    "test_append.py::test_last_slot_is_written",
    base="template",
)
def last_row_not_written(original: Any, self: Any, layer: Any, slots: Any, keys: Any, values: Any) -> None:
    """The last row of each append is left out."""
    original(self, layer, slots[:-1], keys, values)


@mutant("_append", "append: a slot of -1 is not written anywhere", "test_append.py::test_minus_one_is_not_written")
def padding_wraps(original: Any, self: Any, layer: Any, slots: Any, keys: Any, values: Any) -> None:
    """A slot of -1 is the pool's last one."""
    blocks, size = layer.keys.shape[:2]
    original(self, layer, slots % (blocks * size), keys, values)


@mutant("_append", "null block: block 0 reads as zero after every kind", "test_append.py::test_null_block_stays_zero")
def null_block_is_written(original: Any, self: Any, layer: Any, slots: Any, keys: Any, values: Any) -> None:
    """Padding is written to the null block."""
    original(self, layer, np.maximum(slots, 0), keys, values)


@mutant(
    "_append",
    "append: rows of k and v behind the last slot are padding",
    "test_append.py::test_more_rows_than_slots",
    base="template",
)
def rows_behind_the_last_slot(original: Any, self: Any, layer: Any, slots: Any, keys: Any, values: Any) -> None:
    """Rows of k and v that have no slot are written to the null block."""
    original(self, layer, np.pad(slots, (0, len(keys) - len(slots))), keys, values)


@mutant(
    "_append", "append: only the given slots of the given layer change", "test_append.py::test_nothing_else_is_written"
)
def append_clears_the_block(original: Any, self: Any, layer: Any, slots: Any, keys: Any, values: Any) -> None:
    """Writing the first slot of a block clears the rest of it."""
    size = layer.keys.shape[1]
    layer.values[slots[(slots >= 0) & (slots % size == 0)] // size] = 0
    original(self, layer, slots, keys, values)


@mutant("_append", "ids: every block but 0 can be used, the last one too", "test_pool.py::test_every_block")
def last_block_shares_bytes(original: Any, self: Any, layer: Any, slots: Any, keys: Any, values: Any) -> None:
    """The last id writes where the first one lies."""
    blocks, size = layer.keys.shape[:2]
    original(self, layer, np.where(slots // size == blocks - 1, slots % size + size, slots), keys, values)


@mutant(
    "attend",
    "append: all appends of a call precede every row's attention",
    "test_append.py::test_later_row_of_a_sequence_first",
    base="template",
)
def append_row_by_row(
    original: Any, self: Any, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Any = None
) -> None:
    """Each row is appended and attended before the next one is appended."""
    if q is None or k is None or len(plan._slots) != plan._num_tokens:
        original(self, plan, layer, q, k, v, out, extra=extra)
        return
    found = self._layer(plan._pool, layer)
    for row in plan._rows:
        tokens = slice(row[0], row[1])
        self._append(found, plan._slots[tokens], k[tokens].numpy(), v[tokens].numpy())
        self._attend_row(found, row, q.numpy(), out.numpy())


@mutant(
    "attend",
    "append: append only, then attend only, equals one call, bit for bit",
    "test_append.py::test_two_calls_equal_one",
    base="template",
)
def one_call_rounds_otherwise(
    original: Any, self: Any, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Any = None
) -> None:
    """A call that appends and attends adds in another order."""
    original(self, plan, layer, q, k, v, out, extra=extra)
    if q is not None and k is not None:
        out.mul_(1 + 2.0**-20)


@mutant(
    "attend",
    "errors: a call that raises changes no slot",
    "test_errors.py::test_failed_calls_change_nothing",
    base="template",
)
def written_before_it_is_refused(
    original: Any, self: Any, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Any = None
) -> None:
    """Keys and values are appended before the rest of the arguments is looked at."""
    if k is not None and v is not None:
        self._append(self._layer(plan._pool, layer), plan._slots, k.numpy(), v.numpy())
    original(self, plan, layer, q, k, v, out, extra=extra)


# -- bind --------------------------------------------------------------------------------------------------------------


@mutant("bind", "bind: a second bind replaces the first", "test_bind.py::test_second_bind_replaces_the_first")
def second_bind_ignored(original: Any, self: Any, pool: Any, layer: int, params: Any) -> None:
    """What was bound first stays."""
    before = dict(pool._layer(layer).bound)
    original(self, pool, layer, params)
    pool._layer(layer).bound.update(before)


@mutant("bind", "bind: the array may be overwritten once bind returns", "test_bind.py::test_array_overwritten")
def bound_array_is_aliased(original: Any, self: Any, pool: Any, layer: int, params: Any) -> None:
    """The caller's array is kept and read later."""
    original(self, pool, layer, params)
    pool._layer(layer).bound.update(params)


@mutant("bind", "bind: each layer has its own values", "test_bind.py::test_values_of_each_layer")
def bound_to_every_layer(original: Any, self: Any, pool: Any, layer: int, params: Any) -> None:
    """One set of values serves all layers."""
    original(self, pool, layer, params)
    for other in pool._layers.values():
        other.bound.update(pool._layer(layer).bound)


# -- pools -------------------------------------------------------------------------------------------------------------


@mutant("alloc_pool", "null block: zero from the start", "test_pool.py::test_null_block_of_a_new_pool")
def null_block_is_not_cleared(original: Any, self: Any, spec: Any) -> Any:
    """Block 0 of a new pool holds what was in memory."""
    pool = original(self, spec)
    for layer in pool._layers.values():
        layer.values[0] = layer.values[0].dtype.type(1)
    return pool


@mutant("alloc_pool", "host pools: block 0 of a host pool is zero", "test_copy.py::test_null_block_of_a_host_pool")
def null_block_of_the_host_is_not_cleared(original: Any, self: Any, spec: Any) -> Any:
    """Block 0 of a new pool on the host holds what was in memory."""
    pool = original(self, spec)
    if spec.placement == "host":
        pool._bytes[0] = 0x3C
    return pool


@mutant(
    "alloc_pool",
    "kv_sharing: a layer with kv_of attends over the other layer's cache",
    "test_attend.py::test_layer_reads_the_cache_of_another",
)
def kv_of_is_ignored(original: Any, self: Any, spec: Any) -> Any:
    """A layer that reads another's cache has an empty one of its own."""
    pool = original(self, spec)
    for layer in pool._layers.values():
        if layer.spec.kv_of is not None:
            layer.keys, layer.values = np.zeros_like(layer.keys), np.zeros_like(layer.values)
    return pool


@mutant(
    "pool_cost", "pool_cost: a block costs no less than its keys and values", "test_pool.py::test_cost_covers_the_bytes"
)
def cost_understated(original: Any, self: Any, spec: Any) -> Any:
    """The values of a block are not counted."""
    cost = original(self, spec)
    return dataclasses.replace(cost, per_block=cost.per_block // 2)


@mutant(
    "alloc_pool",
    "pool_cost: a pool never takes more than fixed + blocks * per_block",
    "test_pool.py::test_pool_stays_within_its_cost",
    base="template",
)
def pool_has_a_shadow(original: Any, self: Any, spec: Any) -> Any:
    """A second copy of the blocks is kept that `pool_cost` does not tell of."""
    pool = original(self, spec)
    pool._shadow = np.full_like(pool._blocks, 1)
    return pool


@mutant("memory", "memory: what a pool takes is no longer free", "test_pool.py::test_memory_counts_pools")
def memory_forgets_pools(original: Any, self: Any) -> Any:
    """All of the memory is free, whatever was allocated."""
    memory = original(self)
    return dataclasses.replace(memory, free=memory.total)


@mutant(
    "memory", "memory: never more than there is", "test_pool.py::test_memory_does_not_overstate", base="cpu", threads=1
)
def memory_overstated(original: Any, self: Any) -> Any:
    """Twice the memory of the machine is free."""
    memory = original(self)
    return dataclasses.replace(memory, free=2 * memory.total, total=2 * memory.total)
