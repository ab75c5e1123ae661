"""Two queues whose work runs as late, as early or as wildly as the contract's order allows, and never more orderly.

    compute   each work comes after the one before it, and after the events waited for in between
    copy      each work comes after its `after`; copies have no order among themselves

Nothing runs by itself: work runs when something that must come after it is to run, when its event is joined, when it
has been polled often enough, in `synchronize`, and, where the order says so, at the first legal moment or at random.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from pagedkv.api import ContractViolation, DeviceError, Event

POLLS = 3
"""The call of `Event.done()` that finds the work done at last, so that loops which poll come to an end."""


def _nothing() -> None:
    return


class Work(Event):
    """One piece of enqueued work, and the event of its end."""

    def __init__(self, queues: Queues, action: Callable[[], None], after: tuple[Work, ...]) -> None:
        self.queues = queues
        self.action, self.after = action, after
        self.ended, self.polls = False, 0

    def done(self) -> bool:
        return self.queues.poll(self)

    def join(self, timeout: float | None = None) -> None:
        self.queues.join(self)


class Queues:
    """The device's two queues. Every method may be called from any thread."""

    def __init__(self, order: str, seed: int = 0) -> None:
        self.failure: DeviceError | None = None
        self.recording = False
        self._order, self._random = order, random.Random(seed)
        self._lock = threading.RLock()
        self._pending: dict[Work, None] = {}
        self._last = Work(self, _nothing, ())
        self._last.ended = True

    # -- enqueue -------------------------------------------------------------------------------------------------------

    def compute(self, action: Callable[[], None]) -> Work:
        """Enqueue on the compute queue."""
        with self._lock:
            self._last = self._add(action, (self._last,))
            self._stir()
            return self._last

    def copy(self, action: Callable[[], None], after: Event | None = None) -> Work:
        """Enqueue on the copy queue, after `after`, or after all compute enqueued so far."""
        with self._lock:
            work = self._add(action, (self._last if after is None else self._own(after),))
            if self._order == "early":
                self.finish(work)
            self._stir()
            return work

    def wait(self, event: Event) -> None:
        """Let later compute come after `event`, and with it what comes after all compute enqueued so far."""
        with self._lock:
            self._last = self._add(_nothing, (self._last, self._own(event)))

    def record(self) -> Work:
        """The newest compute work."""
        return self._last

    # -- run -----------------------------------------------------------------------------------------------------------

    def finish(self, work: Work) -> None:
        """Run `work` and whatever it must come after, nothing else. Raises the device's error."""
        with self._lock:
            path = [work]
            while path:
                waiting = [earlier for earlier in path[-1].after if not earlier.ended]
                if waiting:
                    path += waiting
                else:
                    self._run(path.pop())

    def join(self, work: Work) -> None:
        """`finish` on behalf of the host."""
        if self.recording:
            raise ContractViolation("a recorded function waits for nothing; join before or after", law="graph")
        self.finish(work)

    def poll(self, work: Work) -> bool:
        """Whether `work` has ended; the poll number `POLLS` finds it so."""
        with self._lock:
            work.polls += 1
            if work.polls >= POLLS:
                self.finish(work)
            self._stir()
            if not work.ended:
                self.check()
            return work.ended

    def synchronize(self) -> None:
        """Run everything: compute first, then copies, the newest first, so that each sees the latest bytes it may."""
        with self._lock:
            self.finish(self._last)
            while self._pending:
                self.finish(next(reversed(self._pending)))

    # -- failure -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the device's error, if it failed."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: DeviceError) -> None:
        """From now on nothing runs: whatever is pending never ends."""
        with self._lock:
            self.failure = error
            self._pending.clear()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _own(self, event: Event) -> Work:
        """The event as work of these queues; another one's is joined when its turn comes."""
        mine = isinstance(event, Work) and event.queues is self
        return event if mine else Work(self, event.join, ())  # type: ignore[return-value]

    def _add(self, action: Callable[[], None], after: tuple[Work, ...]) -> Work:
        work = Work(self, action, tuple(earlier for earlier in after if not earlier.ended))
        self._pending[work] = None
        return work

    def _run(self, work: Work) -> None:
        if work.ended:
            return
        self.check()
        work.action()
        work.ended, work.action, work.after = True, _nothing, ()
        self._pending.pop(work, None)

    def _stir(self) -> None:
        """In random order: run some of what is pending, each with what it must come after."""
        if self._order != "random" or self.failure is not None:
            return
        while self._pending and self._random.random() < 0.5:
            self.finish(self._random.choice(list(self._pending)))
