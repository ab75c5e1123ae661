"""The CUDA backend on the processor: the same pools, plans, copies and graphs over a runtime that delays copies."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from pagedkv.api import Event, World
from pagedkv_cuda import limits
from pagedkv_cuda.backend import CudaBackend
from pagedkv_cuda.capabilities import declared
from pagedkv_cuda.opening import make_path
from pagedkv_cuda.runtime import HostRuntime

POLLS = 3
"""The look at an event that finds it done at last."""


class Delayed(Event):
    """A copy that has not run yet. It runs, after what it comes after, when something must come after it."""

    def __init__(self, work: Callable[[], None], after: Event | None) -> None:
        self._work, self._after, self._polls, self._ended = work, after, 0, False

    def done(self) -> bool:
        self._polls += 1
        if self._polls >= POLLS:
            self.join()
        return self._ended

    def join(self, timeout: float | None = None) -> None:
        if not self._ended:
            if self._after is not None:
                self._after.join()
            self._ended = True
            self._work()


class DelayingRuntime(HostRuntime):
    """Compute at once, copies as late as the contract allows, or at random; `captures` counts recordings."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._pending: list[Delayed] = []
        self.captures = 0

    def copy(self, work: Callable[[], None], after: Event | None) -> Event:
        made = Delayed(work, after)
        self._pending = [one for one in self._pending if not one._ended] + [made]
        if self._random is not None and self._random.random() < 0.5:
            self._random.choice(self._pending).join()
        return made

    def synchronize(self) -> None:
        for one in self._pending:
            one.join()
        self._pending = []

    def capture(self, work: Callable[[], None]) -> Any:
        self.captures += 1
        return super().capture(work)


def double(
    kernels: str = "torch",
    *,
    capability: tuple[int, int] = (9, 0),
    runtime: HostRuntime | None = None,
    world: World | None = None,
    graphs: bool = True,
    **more: Any,
) -> CudaBackend:
    """An instance as `create` makes it for a GPU of this capability, with the processor in the GPU's place."""
    generation = limits.generation(capability)
    if generation is None:
        raise ValueError(f"no generation of {capability}")
    used = runtime or DelayingRuntime()
    can = declared(generation, kernels, graphs=graphs)
    return CudaBackend(can, used, make_path(kernels, capability, used), world=world, **more)
