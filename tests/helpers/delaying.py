"""A device's runtime on the processor that is legal and unkind, for doubles of backends on torch devices.

    compute   at once, in the order of the calls
    copies    at any later moment that the contract allows; two that no `after` orders, in either order
    events    say no for a while, also when the work has ended
    graphs    hold operators on tensors: what the host computed while recording is frozen, as on a device

A moment is any call of the backend. What stays untested so: a copy that runs before compute of an earlier call, as with
an `after` that is older than it; the loopback backend delays compute as well.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedkv.api import Event
from pagedkv.api.torch_streams import HostMemory, HostRuntime, Recording

POLLS = 3
"""The look at an event that finds it done at last."""
GARBAGE = 0xFF
"""What new host memory is filled with: NaN in every floating-point type, ids that no pool has."""


class Ended(Event):
    """Work that has ended, which takes some looks to be seen."""

    def __init__(self, polls: int = POLLS) -> None:
        self._polls = polls

    def done(self) -> bool:
        self._polls -= 1
        return self._polls <= 0

    def join(self, timeout: float | None = None) -> None:
        self._polls = 0


class Delayed(Ended):
    """A copy that has not run yet. It runs, after what it comes after, when something must come after it."""

    def __init__(self, work: Callable[[], None], after: Event | None, polls: int = POLLS) -> None:
        super().__init__(polls)
        self._work, self._after, self.ended = work, after, False

    def done(self) -> bool:
        if not self.ended and super().done():
            self.join()
        return self.ended

    def join(self, timeout: float | None = None) -> None:
        if not self.ended:
            if self._after is not None:
                self._after.join()
            self.ended = True
            self._work()


class Delaying(HostRuntime):
    """Copies run as late as they may; with a seed, at moments and in an order that it draws.

    `ran` lists copies by number as they ran, `captures` counts recordings. `frozen`: recordings hold operators;
    without, they call the function again, as for kernels under an interpreter, which are no operators of torch.
    """

    def __init__(self, seed: int | None = None, *, frozen: bool = True) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._pending: list[Delayed] = []
        self._recorded: weakref.WeakSet[Ended] = weakref.WeakSet()
        self._frozen = frozen
        self._copies = 0
        self.ran: list[int] = []
        self.captures = 0
        self.operators: Operators | None = None

    def here(self) -> AbstractContextManager[Any]:
        self._moment()
        return super().here()

    def _moment(self) -> None:
        """Some copies run now, or none."""
        self._pending = [one for one in self._pending if not one.ended]
        while self._random is not None and self._pending and self._random.random() < 0.4:
            self._pending.pop(self._random.randrange(len(self._pending))).join()

    def record(self) -> Event:
        made = Ended(self._polls())
        self._recorded.add(made)
        return made

    def _polls(self) -> int:
        return POLLS if self._random is None else self._random.randint(1, 5)

    def copy(self, work: Callable[[], None], after: Event | None) -> Event:
        number, self._copies = self._copies, self._copies + 1

        def noted() -> None:
            self.ran.append(number)
            work()

        made = Delayed(noted, after, self._polls())
        self._pending.append(made)
        return made

    def synchronize(self) -> None:
        for one in (*self._pending, *self._recorded):
            one.join()
        self._pending = []

    def staging(self, nbytes: int) -> torch.Tensor:
        return super().staging(nbytes).fill_(GARBAGE)

    def host_memory(self, nbytes: int) -> HostMemory:
        memory = super().host_memory(nbytes)
        memory.tensor.fill_(GARBAGE)
        return memory

    def capture(self, work: Callable[[], None]) -> Recording:
        self.captures += 1
        return Operators(work, self) if self._frozen else super().capture(work)


# -- recordings --------------------------------------------------------------------------------------------------------

ASKING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}
"""Operators that wait for a value of the device, which a recording refuses."""


class Operators(Recording):
    """What a device holds of a recorded function: its operators and the tensors they read and write, nothing else.

    But for `issue`d calls, which are made again at each replay, with what the host knows by then.
    """

    def __init__(self, work: Callable[[], None], runtime: Delaying) -> None:
        self._calls: list[Callable[[], None]] = []
        self._listening = Listening(self._calls)
        runtime.operators = self
        try:
            with self._listening:
                work()
        finally:
            runtime.operators = None

    def issue(self, call: Callable[[], None]) -> None:
        """A call whose operators are not held."""
        self._listening.paused = True
        try:
            call()
        finally:
            self._listening.paused = False
        self._calls.append(call)

    def replay(self) -> None:
        with torch.inference_mode():
            for call in self._calls:
                call()

    def close(self) -> None:
        self._calls = []


class Listening(TorchDispatchMode):
    """Notes each operator that computes; views need no noting, as their tensors stay where they are.

    `to`, `reshape` and their like are views only where they need no copy.
    """

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        super().__init__()
        self.calls, self.paused = calls, False

    def __torch_dispatch__(self, operator: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if operator._schema.name.partition("::")[2] in ASKING:
            raise RuntimeError(f"operation not permitted when stream is capturing ({operator})")
        results = operator(*given, **(named or {}))
        if not self.paused and not (operator.is_view and all(map(_same_memory(given[0]), tree_leaves(results)))):
            self.calls.append(partial(_again, operator, given, named or {}, results))
        return results


def _again(operator: Any, given: Any, named: Any, results: Any) -> None:
    """The operator once more, its results where the first ones lie."""
    for kept, new in zip(tree_leaves(results), tree_leaves(operator(*given, **named)), strict=True):
        if isinstance(kept, torch.Tensor):
            kept.copy_(new)


def _same_memory(tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Whether another tensor lies in this one's memory."""
    return lambda other: other.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
