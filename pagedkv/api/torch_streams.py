"""Streams, events and host memory of one torch device, behind the few calls a backend makes. Loads torch; optional.

    compute   torch's current stream of the device in the calling thread
    copy      one stream of our own, for blocks only

`StreamRuntime` is any device whose module in torch has streams and events; `HostRuntime` stands in for it in tests: the
same calls on the processor, done when they return.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api.backend import Event
from pagedkv.api.errors import ContractViolation, DeviceError, OutOfDeviceMemory
from pagedkv.api.records import MemoryInfo

Work = Callable[[], None]
_POLL = 50e-6
"""Seconds between two looks at an event that is joined with a timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What the messages of torch and of a vendor's libraries say.

    `failures`: the device itself has failed; `no_memory`: an allocation was refused, which harms nothing that is there,
    except within a collective, named by `collectives`; `advice`: what to do after a failure.
    """

    failures: tuple[str, ...] = ()
    no_memory: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    advice: str = "start the process again"

    def failure(self, error: BaseException) -> bool:
        """Whether nothing on the device can be trusted any more. A refused capture is no failure."""
        said = str(error)
        in_collective = any(word in said for word in self.collectives)
        harmless = "captur" in said or (self.shortage(error) and not in_collective)
        return isinstance(error, RuntimeError) and any(word in said for word in self.failures) and not harmless

    def shortage(self, error: BaseException) -> bool:
        """Whether an allocation was refused, by torch's allocator or by a library."""
        return isinstance(error, RuntimeError) and any(word in str(error) for word in self.no_memory)


class Recording(ABC):
    """Recorded work; `nbytes` of device memory are its own."""

    nbytes: int = 0

    @abstractmethod
    def replay(self) -> None:
        """Enqueue the recorded work on the compute stream."""

    @abstractmethod
    def close(self) -> None:
        """Give its memory back."""


class HostMemory:
    """Bytes in host memory that the device can reach."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def close(self) -> None:
        """Give them back."""
        self.tensor = torch.empty(0, dtype=torch.uint8)


class Runtime(ABC):
    """What a backend asks of a device."""

    torch_device: str
    collectives: str
    """The torch.distributed backend of its collectives."""
    words: Words
    failure: DeviceError | None = None

    @abstractmethod
    def device(self) -> AbstractContextManager[Any]:
        """Make the device the current one."""

    def here(self) -> AbstractContextManager[Any]:
        """Make the device the current one, and turn its errors into the contract's."""
        return _Here(self, self.device())

    @abstractmethod
    def record(self) -> Event:
        """An event of all compute enqueued so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let later compute start after the event."""

    @abstractmethod
    def copy(self, work: Work, after: Event | None) -> Event:
        """Enqueue `work` on the copy stream, after `after` (None: all compute so far)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all streams are empty."""

    @abstractmethod
    def staging(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8, that is copied from without blocking."""

    @abstractmethod
    def host_memory(self, nbytes: int) -> HostMemory:
        """Host memory for blocks. Raises `OutOfDeviceMemory`."""

    @abstractmethod
    def memory(self) -> MemoryInfo:
        """Memory of the device now."""

    def reset_peak(self) -> None:
        """Let the peak in `memory` begin again."""
        return

    def holders(self) -> str:
        """Which other processes hold memory of the device, and how much, in words; "" where nobody can tell."""
        return ""

    @abstractmethod
    def capture(self, work: Work) -> Recording:
        """Run `work` once and record it."""

    def check(self) -> None:
        """Raise the `DeviceError` that ended this device's use, if one did."""
        if self.failure is not None:
            raise DeviceError(str(self.failure))


class StreamRuntime(Runtime):
    """One device by torch's index. `module`: what torch has for this kind of device, with its streams and memory."""

    def __init__(self, name: str, index: int, module: Any) -> None:
        self.torch_device = f"{name}:{index}"
        self._index, self._module = index, module
        self._copies = module.Stream(index)

    def device(self) -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = self._module.device(self._index)
        return made

    def record(self) -> Event:
        return StreamEvent(self, self._module, self._module.current_stream(self._index))

    def wait(self, event: Event) -> None:
        if isinstance(event, StreamEvent):
            self._module.current_stream(self._index).wait_event(event.event)
        else:
            event.join()

    def copy(self, work: Work, after: Event | None) -> Event:
        start = self.record() if after is None else after
        if isinstance(start, StreamEvent):
            self._copies.wait_event(start.event)
        else:
            start.join()
        with self._module.stream(self._copies):
            work()
        return StreamEvent(self, self._module, self._copies)

    def synchronize(self) -> None:
        self._module.synchronize(self._index)

    def staging(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            if self.words.failure(error):
                raise
            raise OutOfDeviceMemory(self.why_not_pinned(nbytes, str(error)), requested=nbytes) from error

    def host_memory(self, nbytes: int) -> HostMemory:
        return HostMemory(self.staging(nbytes))

    def why_not_pinned(self, nbytes: int, cause: str) -> str:
        """One line for memory that could not be pinned, with the way out."""
        return why_not_pinned(nbytes, cause)

    def memory(self) -> MemoryInfo:
        """Free as the driver says; reclaimable is what torch keeps of freed tensors, recordings' memory aside.

        Others count once, as not free; nothing is below zero, whatever a driver answers.
        """
        free, total = self._free_and_total()
        allocated = self._module.memory_allocated(self._index)
        kept = max(0, self._module.memory_reserved(self._index) - allocated - self._recorded())
        known = total > 0
        free = min(max(0, free), total)
        return MemoryInfo.of(
            free=free if known else None,
            total=total if known else None,
            reclaimable=min(kept, total - free) if known else kept,
            unified=self._unified(),
            allocated=allocated,
            peak=self._module.max_memory_allocated(self._index),
        )

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self._index)

    def _free_and_total(self) -> tuple[int, int]:
        """Bytes; a total of 0 where the driver does not tell."""
        free, total = self._module.mem_get_info(self._index)
        return int(free), int(total)

    def _unified(self) -> bool:
        """Whether the device computes in the machine's own memory."""
        return False

    def _recorded(self) -> int:
        """Bytes that open recordings hold."""
        return 0


class StreamEvent(Event):
    """The end of what a stream holds now."""

    def __init__(self, runtime: Runtime, module: Any, stream: Any) -> None:
        self.event = module.Event()
        self.event.record(stream)
        self._runtime = runtime

    def done(self) -> bool:
        with self._runtime.here():
            return bool(self.event.query())

    def join(self, timeout: float | None = None) -> None:
        if timeout is None:
            with self._runtime.here():
                self.event.synchronize()
            return
        end = time.monotonic() + timeout
        while not self.done() and time.monotonic() < end:
            time.sleep(_POLL)


class _Here:
    """The device made current, and errors of torch and the vendor turned into the contract's."""

    def __init__(self, runtime: Runtime, device: AbstractContextManager[Any]) -> None:
        self._runtime, self._device = runtime, device

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._device.__exit__(kind, error, None)
        words = self._runtime.words
        if error is not None and words.failure(error):
            self._runtime.failure = DeviceError(f"{self._runtime.torch_device} failed ({error}): {words.advice}")
            raise self._runtime.failure from error
        if error is not None and words.shortage(error):
            held = self._runtime.holders()
            raise OutOfDeviceMemory(
                f"{error}: give fewer blocks, a smaller context or a lower memory fraction"
                + (f", or end what else holds memory there: {held}" if held else "")
            ) from error


# -- from the host to the device ---------------------------------------------------------------------------------------

_ITEM = {np.dtype(np.int8): torch.int8, np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class Buffers:
    """A pinned buffer and one on the device: a batch's arrays go over in one copy on the compute stream.

    The device's buffer is overwritten on that stream, and so after all that was enqueued before; the pinned one once
    its last copy has ended, which the host waits for.
    """

    def __init__(self, runtime: Runtime, nbytes: int) -> None:
        self._runtime = runtime
        self._pinned = runtime.staging(nbytes)
        self._host = self._pinned.numpy()
        self._device = torch.empty(nbytes, dtype=torch.uint8, device=runtime.torch_device)
        self._sent = Event()

    @staticmethod
    def size(arrays: Mapping[str, npt.NDArray[Any]]) -> int:
        """Bytes that these arrays need."""
        return sum(_even(array.nbytes) for array in arrays.values())

    def send(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        """The arrays, int8, int32 or int64, on the device, by name; equal shapes give equal addresses."""
        self._sent.join()
        if (needed := self.size(arrays)) > len(self._host):
            raise ContractViolation(
                f"a batch needs {needed} bytes of arrays, the pool's limits allow {len(self._host)}", law="limits"
            )
        views, end = {}, 0
        for name, array in arrays.items():
            start, end = end, end + array.nbytes
            self._host[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            views[name] = self._device[start:end].view(_ITEM[array.dtype]).view(array.shape)
            end = _even(end)
        self._device[:end].copy_(self._pinned[:end], non_blocking=True)
        self._sent = self._runtime.record()
        return views


def _even(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def copy_rows(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, scratch: int = 2 << 20) -> None:
    """Copy rows source[pairs[:, 0]] to target[pairs[:, 1]], both [rows, words] of one dtype; pairs int64 of the host.

    Within one memory by gathering and scattering, `scratch` bytes at a time; over the bus run by run.
    """
    if source.device == target.device:
        there = pairs.to(source.device, non_blocking=True)
        for part in torch.split(there, max(1, scratch // (source.shape[1] * source.element_size()))):
            target.index_copy_(0, part[:, 1], source.index_select(0, part[:, 0]))
        return
    for first, second, count in _runs(pairs.numpy()):
        target[second : second + count].copy_(source[first : first + count], non_blocking=True)


def _runs(pairs: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, rows) of stretches that follow one another on both sides."""
    breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(1)) + 1
    for part in np.split(pairs, breaks):
        if len(part):
            yield int(part[0, 0]), int(part[0, 1]), len(part)


# -- the processor in its place ----------------------------------------------------------------------------------------


class HostRuntime(Runtime):
    """The processor in a device's place: for tests of everything that needs no device."""

    torch_device = "cpu"
    collectives = "gloo"
    words = Words()

    def device(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self) -> Event:
        return Event()

    def wait(self, event: Event) -> None:
        event.join()

    def copy(self, work: Work, after: Event | None) -> Event:
        if after is not None:
            after.join()
        work()
        return Event()

    def synchronize(self) -> None:
        return

    def staging(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def host_memory(self, nbytes: int) -> HostMemory:
        return HostMemory(allocated(nbytes))

    def memory(self) -> MemoryInfo:
        return MemoryInfo()

    def capture(self, work: Work) -> Recording:
        work()
        return _Repeated(work)


class _Repeated(Recording):
    """Work that is done again at each replay."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()

    def close(self) -> None:
        self._work = _nothing


def _nothing() -> None:
    return


def why_not_pinned(nbytes: int, cause: str) -> str:
    """One line for memory that could not be pinned, with the way out."""
    return (
        f"{nbytes} bytes of host memory could not be pinned ({cause}): lower swap_space, or raise the limit on locked "
        "memory (ulimit -l, or the container's)"
    )


def allocated(nbytes: int) -> torch.Tensor:
    """Host memory, uint8, of ours alone. Raises `OutOfDeviceMemory`."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except (RuntimeError, MemoryError, TypeError) as error:
        raise OutOfDeviceMemory(
            f"{nbytes} bytes of host memory are not to be had ({error}): lower swap_space", requested=nbytes
        ) from error


def check_not_recording(recording: bool, what: str) -> None:
    """`ContractViolation` for a call that a recorded function may not make."""
    if recording:
        raise ContractViolation(f"a recorded function {what}; do it before or after", law="graph")
