"""The laws of a batch, and what a batch that keeps them reads and writes."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.api import Batch, LayerSpec, PoolSpec
from pagedkv.checking.guard import Guard

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_GARBAGE = 0x6B6B6B6B
"""What a host array holds once the call that got it has returned: no block, slot, row or length."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Reach:
    """What a planned batch touches. Per real row: query tokens, context, and its blocks [n, columns].

    written: the blocks that its slots lie in; num_slots None: it has none, so no k and v.
    """

    num_tokens: int
    num_slots: int | None
    queries: Ints
    context: Ints
    blocks: Ints
    written: Ints
    block_size: int

    def needed(self, window: int | None) -> Bools:
        """Which entries [n, columns] hold a key that a query sees through `window`.

        |----|----|----|----|        blocks of a row
                ^first   ^context    the first query stands at context - queries
        """
        start = np.arange(self.blocks.shape[1]) * self.block_size
        first = np.zeros_like(self.context)
        if window is not None:
            first = self.context - self.queries - window + 1
        seen = (start < self.context[:, None]) & (start + self.block_size > first[:, None])
        found: Bools = seen & (self.queries > 0)[:, None]
        return found

    def reads(self, layer: LayerSpec) -> Ints:
        """The blocks, other than 0, that attention of one layer reads."""
        found: Ints = np.unique(self.blocks[self.needed(layer.window)])
        return found[found > 0]


class BatchLaws:
    """One batch against the laws, for one group of a pool."""

    def __init__(self, guard: Guard, spec: PoolSpec, group: int, batch: Batch) -> None:
        self._guard, self._spec, self._batch = guard, spec, batch
        self._layers = spec.groups[group].layers
        self._size = spec.groups[group].block_size

    def check(self) -> Reach:
        """Raises `ContractViolation` for the first law that is broken."""
        self._arrays()
        self._cu_q()
        self._padding()
        self._limits()
        self._table()
        self._context()
        self._bounds()
        self._decode()
        self._slots()
        reach = self._reach()
        if reach.blocks.any() or len(reach.written):  # else: profiling, warm-up, an idle rank
            self._visible(reach)
            self._places(reach)
        return reach

    def _need(self, law: str, kept: object, what: str) -> None:
        if not kept:
            raise self._guard.core(law, what)

    @property
    def _counts(self) -> Ints:
        ends: Ints = self._batch.cu_q.astype(np.int64)
        return ends[1:] - ends[:-1]

    def _arrays(self) -> None:
        batch = self._batch
        for name in ("num_seqs", "num_tokens", "max_q", "max_ctx", "num_decode", "decode_q"):
            value = getattr(batch, name)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 0
            self._need("batch arrays", whole, f"{name} is {value!r}, must be a whole number from 0 on")
        for name, dtype, ndim in (("cu_q", "int32", 1), ("ctx_len", "int32", 1), ("rows", "int32", 1)):
            self._array(name, dtype, ndim)
        self._array("block_table", "int32", 2)
        if batch.slots is not None:
            self._array("slots", "int64", 1)
        lengths = len(batch.cu_q) - 1, len(batch.ctx_len), len(batch.rows)
        agree = lengths[0] == lengths[1] == lengths[2] >= batch.num_seqs
        what = f"cu_q, ctx_len and rows are for {lengths} rows, must be for one S >= num_seqs={batch.num_seqs}"
        self._need("batch arrays", agree, what)

    def _array(self, name: str, dtype: str, ndim: int) -> None:
        value = getattr(self._batch, name)
        fine = isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == ndim
        self._need(
            "batch arrays", fine, f"{name} is {_form(value)}, must be a numpy {dtype} array of {ndim} dimensions"
        )

    def _cu_q(self) -> None:
        cu_q = self._batch.cu_q
        self._need("cu_q", cu_q[0] == 0, f"it starts at {cu_q[0]}, must start at 0")
        falls = np.flatnonzero(self._counts < 0)
        self._need("cu_q", not len(falls), f"it falls after entry {_first(falls)}: {cu_q[:8].tolist()}...")
        total = self._batch.num_tokens
        self._need("cu_q", cu_q[-1] == total, f"it ends at {cu_q[-1]}, must end at num_tokens={total}")

    def _padding(self) -> None:
        count = self._batch.num_seqs
        context, queries = self._batch.ctx_len[count:], self._counts[count:]
        wrong = np.flatnonzero((context != 0) | (queries != 0)) + count
        what = f"row {_first(wrong)} of a batch with num_seqs={count} has a query or a context"
        self._need("padding rows", not len(wrong), what)

    def _limits(self) -> None:
        batch, limits = self._batch, self._spec.limits
        slots = 0 if batch.slots is None else len(batch.slots)
        for name, value, limit in (
            ("rows", len(batch.rows), limits.rows),
            ("query tokens", batch.num_tokens, limits.tokens),
            ("slots", slots, limits.tokens),
            ("tokens of context", int(batch.ctx_len.max(initial=0)), limits.context),
        ):
            self._need("limits", value <= limit, f"the batch has {value} {name}, the pool's limit is {limit}")

    def _table(self) -> None:
        table, rows = self._batch.block_table, self._batch.rows
        wrong = rows[(rows < 0) | (rows >= len(table))]
        self._need("rows", not len(wrong), f"rows names row {_first(wrong)} of a table with rows 0..{len(table) - 1}")
        self._need("row 0", len(table) and not table[0].any(), f"it holds {table[:1].ravel()[:8].tolist()}")
        used = table[rows]
        wrong = used[(used < 0) | (used >= self._spec.num_blocks)]
        what = f"a row of the batch names block {_first(wrong)}, must be 0..{self._spec.num_blocks - 1}"
        self._need("block table", not len(wrong), what)

    def _context(self) -> None:
        context = self._batch.ctx_len.astype(np.int64)
        room = self._batch.block_table.shape[1] * self._size
        short = (context < self._counts) & any(layer.causal for layer in self._layers)
        wrong = np.flatnonzero((context < 0) | short | (context > room))
        if len(wrong):
            at = int(wrong[0])
            what = f"row {at} has context {context[at]} and {self._counts[at]} query tokens, its table holds {room}"
            raise self._guard.core("context", what)

    def _bounds(self) -> None:
        batch = self._batch
        most_q, most_ctx = int(self._counts.max(initial=0)), int(batch.ctx_len.max(initial=0))
        self._need("bounds", batch.max_q >= most_q, f"max_q is {batch.max_q}, a row has {most_q} query tokens")
        self._need("bounds", batch.max_ctx >= most_ctx, f"max_ctx is {batch.max_ctx}, a row has context {most_ctx}")

    def _decode(self) -> None:
        batch = self._batch
        what = f"it is {batch.num_decode} in a batch of {batch.num_seqs} rows"
        self._need("num_decode", batch.num_decode <= batch.num_seqs, what)
        counts = self._counts[: batch.num_decode]
        wrong = counts[(counts < 1) | (counts > batch.decode_q)]
        what = f"one of the first {batch.num_decode} rows has {_first(wrong)} query tokens, decode_q={batch.decode_q}"
        self._need("num_decode", not len(wrong), what)

    def _slots(self) -> None:
        if self._batch.slots is None:
            return
        slots, last = self._batch.slots, self._spec.num_blocks * self._size - 1
        wrong = slots[(slots != -1) & ((slots < self._size) | (slots > last))]
        self._need("slots", not len(wrong), f"slot {_first(wrong)} is neither -1 nor in {self._size}..{last}")
        values, times = np.unique(slots[slots >= 0], return_counts=True)
        self._need("slots", (times < 2).all(), f"slot {_first(values[times > 1])} stands more than once")

    def _reach(self) -> Reach:
        batch, count = self._batch, self._batch.num_seqs
        slots = np.zeros(0, np.int64) if batch.slots is None else batch.slots
        columns = -(-int(batch.ctx_len.max(initial=0)) // self._size)
        return Reach(
            num_tokens=int(batch.num_tokens),
            num_slots=None if batch.slots is None else len(slots),
            queries=self._counts[:count],
            context=batch.ctx_len[:count].astype(np.int64),
            blocks=batch.block_table[batch.rows[:count], :columns].astype(np.int64),
            written=np.unique(slots[slots >= 0] // self._size),
            block_size=self._size,
        )

    def _visible(self, reach: Reach) -> None:
        missing = reach.needed(_widest(self._layers)) & (reach.blocks == 0)
        if missing.any():
            row, column = np.argwhere(missing)[0].tolist()
            what = f"entry {column} of row {row} is 0, though its context of {reach.context[row]} is visible there"
            raise self._guard.core("visible blocks", what)

    def _places(self, reach: Reach) -> None:
        slots = self._batch.slots
        # Only with a slot for each query token can it be told: others may be of a sequence without a query.
        if slots is None or len(slots) != reach.num_tokens:
            return
        start = np.arange(reach.blocks.shape[1]) * self._size
        filled = np.clip(reach.context[:, None] - start, 0, self._size)  # tokens of each row in each of its blocks
        most = np.zeros(self._spec.num_blocks, np.int64)
        np.maximum.at(most, reach.blocks.ravel(), filled.ravel())
        used = slots[slots >= 0]
        wrong = used[used % self._size >= most[used // self._size]]
        self._need("slot places", not len(wrong), f"slot {_first(wrong)} is in no row's context")


def _widest(layers: Sequence[LayerSpec]) -> int | None:
    windows = [layer.window for layer in layers]
    return None if None in windows else max(window for window in windows if window is not None)


def private(batch: Batch) -> tuple[Batch, list[npt.NDArray[Any]]]:
    """The batch on arrays of its own, the table with its row stride, and these arrays."""
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    copies: dict[str, Any] = {name: _copy(value) for name, value in fields.items() if isinstance(value, np.ndarray)}
    return dataclasses.replace(batch, **copies), list(copies.values())


def _copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.ndim != 2 or not len(array):
        return array.copy()
    width = max(array.shape[1], array.strides[0] // array.itemsize)
    wide = np.full((len(array), width), _GARBAGE, array.dtype)[:, : array.shape[1]]
    wide[:] = array
    return wide


def spoil(arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Overwrite host arrays as the core may: whoever still reads them fails at once."""
    for array in arrays:
        array[...] = _GARBAGE


def owners(arrays: Sequence[npt.NDArray[Any]]) -> list[weakref.ref[Any]]:
    """References to the arrays' memory, which is gone when nobody holds it any more."""
    return [weakref.ref(array if array.base is None else array.base) for array in arrays]


def _first(values: npt.NDArray[Any]) -> Any:
    return values.ravel()[0] if values.size else None


def _form(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
