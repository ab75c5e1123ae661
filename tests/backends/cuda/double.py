"""The CUDA backend on the processor: the same pools, plans, copies and graphs over a runtime that is legal and unkind.

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
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedkv.api import Event, World
from pagedkv_cuda import limits
from pagedkv_cuda.backend import CudaBackend
from pagedkv_cuda.capabilities import declared
from pagedkv_cuda.opening import make_path
from pagedkv_cuda.runtime import HostMemory, HostRuntime, Recording

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


class DelayingRuntime(HostRuntime):
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
        return Operators(work) if self._frozen else super().capture(work)


# -- recordings --------------------------------------------------------------------------------------------------------

ASKING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}
"""Operators that wait for a value of the device, which a recording refuses."""


class Operators(Recording):
    """What a device holds of a recorded function: its operators and the tensors they read and write, nothing else."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        with _Listening(self._calls):
            work()

    def replay(self) -> None:
        with torch.inference_mode():
            for operator, given, named, results in self._calls:
                for kept, new in zip(tree_leaves(results), tree_leaves(operator(*given, **named)), strict=True):
                    if isinstance(kept, torch.Tensor):
                        kept.copy_(new)

    def close(self) -> None:
        self._calls = []


class _Listening(TorchDispatchMode):
    """Notes each operator that computes; views need no noting, as their tensors stay where they are.

    `to`, `reshape` and their like are views only where they need no copy.
    """

    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, operator: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if operator._schema.name.partition("::")[2] in ASKING:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({operator})")
        results = operator(*given, **(named or {}))
        if not (operator.is_view and all(map(_same_memory(given[0]), tree_leaves(results)))):
            self._calls.append((operator, given, named or {}, results))
        return results


def _same_memory(tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Whether another tensor lies in this one's memory."""
    return lambda other: other.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def double(
    kernels: str = "torch",
    *,
    capability: tuple[int, int] = (9, 0),
    runtime: HostRuntime | None = None,
    world: World | None = None,
    seed: int | None = None,
) -> CudaBackend:
    """An instance as `create` makes it for a GPU of this capability, with the processor in the GPU's place."""
    generation = limits.generation(capability)
    if generation is None:
        raise ValueError(f"no generation of {capability}")
    used = runtime or DelayingRuntime(seed, frozen=kernels == "torch")
    can = declared(generation, kernels)
    return CudaBackend(can, used, make_path(kernels, capability, used), world=world)
