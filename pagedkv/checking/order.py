"""Which work comes before which, from what was called alone: the laws "wait" and "after".

    compute   1 ---- 2 ---- 3 ---- wait(e) ---- 5 ---->     one queue, in the order of the calls
                     |               ^
    transfer         '--> copy, e ---'                      starts after compute 2, or after another event

A transfer that no `wait` names is *pending*: compute may run before, during and after it. The host knows that work has
ended from `done()`, `join()` without a limit, and `synchronize()`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.checking.batch import Ints
from pagedkv.checking.guard import Guard

_MOST = 1024
"""Transfers remembered at once; beyond, the oldest is forgotten."""


class Blocks:
    """When each block of one pool was last read and written by compute, [num_blocks] each."""

    def __init__(self, num_blocks: int) -> None:
        self.read: Ints = np.zeros(num_blocks, np.int64)
        self.written: Ints = np.zeros(num_blocks, np.int64)


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """Blocks on their way: ids read of one pool, ids written of another; None is no pool of ours."""

    source: Blocks | None
    reads: Ints
    target: Blocks | None
    writes: Ints
    name: str
    waited: int | None = None

    def overlap(self, blocks: Blocks, reads: Ints, writes: Ints) -> int | None:
        """A block that one side writes and the other one uses; None when there is none."""
        pairs = []
        if self.target is blocks:
            pairs += [(self.writes, reads), (self.writes, writes)]
        if self.source is blocks:
            pairs += [(self.reads, writes)]
        for mine, others in pairs:
            both = np.intersect1d(mine, others)
            if both.size:
                return int(both[0])
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """What an event comes after: compute up to a number, and transfers."""

    compute: int
    transfers: frozenset[Transfer] = field(default_factory=frozenset)

    def covers(self, transfer: Transfer) -> bool:
        """Whether the transfer has ended at this moment."""
        return transfer in self.transfers or (transfer.waited is not None and transfer.waited <= self.compute)


class Order:
    """The calls of one instance in their order. Events may be asked from any thread, hence the lock."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._lock = threading.Lock()
        self._now = 0
        self._ended = 0
        self._transfers: list[Transfer] = []

    def now(self) -> Moment:
        """The moment after all compute enqueued so far."""
        return Moment(self._now)

    def compute(self, blocks: Blocks, reads: Ints, writes: Ints, call: str) -> None:
        """Compute reads and writes blocks of one pool: no pending transfer may use them."""
        with self._lock:
            for transfer in self._transfers:
                if transfer.waited is None:
                    self._refuse(transfer, blocks, reads, writes, call, "call wait(event) before")
            self._now += 1
            blocks.read[reads] = self._now
            blocks.written[writes] = self._now

    def check(self, transfer: Transfer, after: Moment | None) -> None:
        """A transfer that begins once `after` (None: all compute so far) has come must not meet other work."""
        with self._lock:
            before = Moment(self._now) if after is None else after
            for other in self._transfers:
                if not before.covers(other):
                    self._refuse_behind(transfer, other)
            self._check_compute(transfer, max(before.compute, self._ended))

    def start(self, transfer: Transfer, after: Moment | None) -> Moment:
        """The transfer is on its way. Returns the moment of its end."""
        with self._lock:
            before = Moment(self._now) if after is None else after
            self._transfers = [*self._transfers[-_MOST + 1 :], transfer]
            known = before.transfers.intersection(self._transfers)
            return Moment(before.compute, known | {transfer})

    def wait(self, moment: Moment) -> None:
        """Compute from here on comes after `moment`."""
        with self._lock:
            self._now += 1
            for transfer in moment.transfers:
                if transfer.waited is None:
                    transfer.waited = self._now

    def end(self, moment: Moment) -> None:
        """The host knows that everything up to `moment` has ended."""
        with self._lock:
            self._ended = max(self._ended, moment.compute)
            self._transfers = [transfer for transfer in self._transfers if not moment.covers(transfer)]

    def end_all(self) -> None:
        """The host has waited for everything."""
        with self._lock:
            self._ended = self._now
            self._transfers = []

    def _refuse(self, pending: Transfer, blocks: Blocks, reads: Ints, writes: Ints, call: str, advice: str) -> None:
        both = pending.overlap(blocks, reads, writes)
        if both is not None:
            raise self._guard.core("wait", f"{call} uses block {both}, which a pending {pending.name} uses; {advice}")

    def _refuse_behind(self, transfer: Transfer, other: Transfer) -> None:
        advice, none = "pass its event as after, or call wait(event)", np.zeros(0, np.int64)
        if transfer.source is not None:
            self._refuse(other, transfer.source, transfer.reads, none, transfer.name, advice)
        if transfer.target is not None:
            self._refuse(other, transfer.target, none, transfer.writes, transfer.name, advice)

    def _check_compute(self, transfer: Transfer, known: int) -> None:
        checks: list[tuple[Ints, Ints, str]] = []
        if transfer.source is not None:
            checks.append((transfer.source.written, transfer.reads, "written"))
        if transfer.target is not None:
            checks.append((transfer.target.written, transfer.writes, "written"))
            checks.append((transfer.target.read, transfer.writes, "read"))
        for times, ids, verb in checks:
            late = ids[times[ids] > known]
            if late.size:
                what = f"{transfer.name} uses block {late[0]}, {verb} by compute that was enqueued later than its after"
                raise self._guard.core("after", what)


def ids(values: npt.NDArray[Any]) -> Ints:
    """Block ids as a sorted array without repeats and without block 0, which nobody writes."""
    found: Ints = np.unique(values.astype(np.int64))
    return found[found > 0]
