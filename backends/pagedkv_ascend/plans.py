"""Plans: a batch as the attention operator takes it.

    decoding   rows of one query token: one call for all of them, whatever their number
    prompts    rows of more: a call each

Lengths are values of the host, as the operator wants them; block tables, slots and masks go to the device in one copy.
For a windowed layer a decoding row reads the blocks that overlap its window, and a mask hides what of the first one
lies before it, as the operator takes no window where there is one query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api import Batch, GroupSpec, Plan
from pagedkv.api.extensions import GraphShape
from pagedkv.api.torch_streams import Buffers
from pagedkv_ascend.pool import AscendPool
from pagedkv_ascend.runtime import Runtime

Arrays = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int32]


@dataclass(slots=True, kw_only=True, eq=False)
class View:
    """The decoding rows' blocks for one window: table int32 [rows, W], mask int8 [rows, W * block size], 1 hides."""

    lengths: list[int]
    table: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A row of several query tokens: `first` .. `first + count` of q. `fresh`: all its keys are in this step's k and v.

    `blocks` are those of its context, on the device.
    """

    first: int
    count: int
    context: int
    fresh: bool
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """A batch in arrays of our own. singles, several: rows of one query token, and of more; columns of the table."""

    num_tokens: int
    starts: Ints
    contexts: Ints
    table: Ints
    slots: npt.NDArray[np.int64]
    singles: npt.NDArray[np.int64]
    several: npt.NDArray[np.int64]


@dataclass(eq=False)
class AscendPlan(Plan):
    """One batch on the device."""

    pool: AscendPool
    group: int
    num_tokens: int = 0
    num_slots: int = 0
    slots: torch.Tensor | None = None
    """int32 [n], those that are written; None where there are none."""
    kept: torch.Tensor | None = None
    """int64 [n], the rows of k and v that go there; None: all of them, in order."""
    singles: torch.Tensor | None = None
    """int64, the decoding rows' tokens; None: the first ones, in order."""
    num_singles: int = 0
    views: dict[int | None, View] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)
    static: bool = False
    padding: torch.Tensor | None = None
    """int8 [rows] of a static plan: 1 for rows without a sequence, whose queries may be anything."""

    @property
    def block_size(self) -> int:
        return self.pool.spec.groups[self.group].block_size


class StaticPlan(AscendPlan):
    """A plan of fixed shape, for recordings: one token a row. `refresh` gives it a batch, at the same addresses.

    A row without a sequence reads one token of the null block, and writes to a slot behind the pool's own blocks.
    """

    def __init__(self, pool: AscendPool, group: int, shape: GraphShape, runtime: Runtime) -> None:
        super().__init__(pool, group, static=True)
        self.shape = shape
        self._windows = windows(pool.spec.groups[group])
        arrays, _ = self._arrays(None)
        self.nbytes = Buffers.size(arrays)
        self._buffers = Buffers(runtime, self.nbytes)
        self.num_tokens = self.num_slots = self.num_singles = shape.rows
        self.refresh(None)

    def refresh(self, batch: Batch | None) -> None:
        """Hold this batch, padded to the shape; None: no sequence at all."""
        arrays, lengths = self._arrays(batch)
        sent = self._buffers.send(arrays)
        self.slots, self.padding = sent["slots"], sent["padding"]
        for window in self._windows:
            view = self.views.get(window)
            if view is None:
                mask = sent.get(f"mask {window}")
                self.views[window] = View(lengths=lengths[window], table=sent[f"table {window}"], mask=mask)
            else:
                view.lengths = lengths[window]

    def _arrays(self, batch: Batch | None) -> tuple[Arrays, dict[int | None, list[int]]]:
        rows, size = self.shape.rows, self.block_size
        columns = max(1, -(-self.shape.max_ctx // size))
        table, contexts = np.zeros((rows, columns), np.int32), np.ones(rows, np.int32)
        slots = self.pool.num_blocks * size + np.arange(rows, dtype=np.int64)
        if batch is not None and (count := batch.num_seqs):
            given = batch.block_table[batch.rows[:count], :columns]
            table[:count, : given.shape[1]], contexts[:count] = given, batch.ctx_len[:count]
            written = np.full(rows, -1, np.int64) if batch.slots is None else batch.slots[:rows]
            slots[: len(written)] = np.where(written >= 0, written, slots[: len(written)])
        padding = np.arange(rows) >= (0 if batch is None else batch.num_seqs)
        arrays: Arrays = {"slots": slots.astype(np.int32), "padding": padding.astype(np.int8)}
        lengths = {}
        for window in self._windows:
            most = columns if window is None else min(columns, blocks_of_window(window, size))
            seen, arrays[f"table {window}"], hidden = behind_window(table, contexts, window, size, most)
            lengths[window] = seen.tolist()
            if window is not None:
                arrays[f"mask {window}"] = hides(hidden, most * size)
        return arrays, lengths


class Ring:
    """The buffers of one group's plans, used in turn."""

    def __init__(self, pool: AscendPool, group: int, runtime: Runtime) -> None:
        size = staging_bytes(pool, group)
        self._all = [Buffers(runtime, size) for _ in range(max(1, pool.spec.limits.plans))]
        self._turn = 0

    def next(self) -> Buffers:
        """The pair that was used longest ago."""
        self._turn = (self._turn + 1) % len(self._all)
        return self._all[self._turn]


def windows(group: GroupSpec) -> tuple[int | None, ...]:
    """Every window of the group's layers, None for those without."""
    return tuple(dict.fromkeys(layer.window for layer in group.layers))


def blocks_of_window(window: int, block_size: int) -> int:
    """Blocks that a window of so many tokens overlaps at most."""
    return (window + block_size - 2) // block_size + 1


def staging_bytes(pool: AscendPool, group: int) -> int:
    """The most that one plan's arrays take."""
    spec, limits = pool.spec.groups[group], pool.spec.limits
    columns = max(1, -(-limits.context // spec.block_size))
    table = 4 * limits.rows * columns + 8
    masked = 0
    for window in windows(spec):
        if window is not None:
            most = min(columns, blocks_of_window(window, spec.block_size))
            masked += limits.rows * most * (4 + spec.block_size) + 16
    return 2 * table + masked + 12 * limits.tokens + 8 * limits.rows + 64


# -- a batch -----------------------------------------------------------------------------------------------------------


def planned(pool: AscendPool, group: int, batch: Batch, buffers: Buffers) -> AscendPlan:
    """The plan of a batch that was checked."""
    size = pool.spec.groups[group].block_size
    staged = _staged(batch, size)
    plan = AscendPlan(pool, group, num_tokens=staged.num_tokens, num_slots=len(staged.slots))
    arrays, hosts = _arrays(staged, size, windows(pool.spec.groups[group]))
    sent = buffers.send(arrays)
    plan.slots, plan.kept, plan.singles = sent.get("slots"), sent.get("kept"), sent.get("singles")
    plan.num_singles = len(staged.singles)
    for window, lengths in hosts.items():
        plan.views[window] = View(lengths=lengths, table=sent[f"table {window}"], mask=sent.get(f"mask {window}"))
    for place, row in enumerate(staged.several):
        first, end = staged.starts[row : row + 2].tolist()
        context = int(staged.contexts[row])
        blocks = sent["prompts"][place, : -(-context // size)]
        fresh = _fresh(staged, int(row), size)
        plan.prompts.append(Prompt(first=first, count=end - first, context=context, fresh=fresh, blocks=blocks))
    return plan


def _staged(batch: Batch, size: int) -> Staged:
    count = batch.num_seqs
    starts, contexts = batch.cu_q[: count + 1].astype(np.int32), batch.ctx_len[:count].astype(np.int32)
    queries = np.diff(starts)
    columns = max(1, -(-int(contexts.max(initial=0)) // size))
    return Staged(
        num_tokens=batch.num_tokens,
        starts=starts,
        contexts=contexts,
        table=batch.block_table[batch.rows[:count], :columns].astype(np.int32),
        slots=np.zeros(0, np.int64) if batch.slots is None else batch.slots.astype(np.int64),
        singles=np.flatnonzero(queries == 1),
        several=np.flatnonzero(queries > 1),
    )


def _arrays(staged: Staged, size: int, wanted: Sequence[int | None]) -> tuple[Arrays, dict[int | None, list[int]]]:
    """(what the device must know, for each window the decoding rows' lengths)."""
    arrays: Arrays = {}
    kept = np.flatnonzero(staged.slots >= 0)
    if len(kept):
        arrays["slots"] = staged.slots[kept].astype(np.int32)
    if 0 < len(kept) < len(staged.slots):
        arrays["kept"] = kept
    lengths = {}
    if len(staged.singles):
        tokens = staged.starts[staged.singles]
        if tokens[-1] != len(tokens) - 1:
            arrays["singles"] = tokens.astype(np.int64)
        table, contexts = staged.table[staged.singles], staged.contexts[staged.singles]
        for window in wanted:
            seen, narrowed, hidden = behind_window(table, contexts, window, size)
            arrays[f"table {window}"], lengths[window] = narrowed, seen.tolist()
            if hidden.any():
                arrays[f"mask {window}"] = hides(hidden, narrowed.shape[1] * size)
    if len(staged.several):
        arrays["prompts"] = staged.table[staged.several]
    return arrays, lengths


def behind_window(
    table: Ints, contexts: Ints, window: int | None, size: int, columns: int | None = None
) -> tuple[Ints, Ints, Ints]:
    """(keys that are read, their blocks [rows, columns], of those keys the first ones that lie before the window)."""
    first = np.zeros_like(contexts) if window is None else np.maximum(contexts - window, 0)
    skipped = first // size
    seen = contexts - skipped * size
    most = columns or max(1, -(-int(seen.max(initial=1)) // size))
    at = skipped[:, None] + np.arange(most, dtype=np.int32)
    inside = at < -(-contexts // size)[:, None]
    blocks = np.take_along_axis(table, np.minimum(at, table.shape[1] - 1).astype(np.int64), 1)
    return seen, np.where(inside, blocks, 0).astype(np.int32), first - skipped * size


def hides(hidden: Ints, keys: int) -> npt.NDArray[np.int8]:
    """A mask [rows, keys] whose first entries of each row hide."""
    return (np.arange(keys) < hidden[:, None]).astype(np.int8)


def _fresh(staged: Staged, row: int, size: int) -> bool:
    """Whether k and v hold every key of the row, in order, and its slots are where its block table points."""
    first, end = staged.starts[row : row + 2].tolist()
    if staged.contexts[row] != end - first or len(staged.slots) < end:
        return False
    at = np.arange(end - first)
    return bool((staged.slots[first:end] == staged.table[row, at // size].astype(np.int64) * size + at % size).all())
