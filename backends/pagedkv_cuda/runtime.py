"""Streams, events, pinned memory and recordings of one device, behind the few calls that the backend makes.

    compute   torch's current stream of the device in the calling thread
    copy      one stream of our own, for blocks only

`HostRuntime` stands in for a device in tests: the same calls on the processor, done when they return.
"""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

from pagedkv.api import ContractViolation, DeviceError, Event, MemoryInfo, OutOfDeviceMemory
from pagedkv_cuda import devices

_log = logging.getLogger("pagedkv.backends.cuda")

_cuda: Any = torch.cuda
"""Its classes have no types of their own."""
Work = Callable[[], None]
_POLL = 50e-6
"""Seconds between two looks at an event that is joined with a timeout."""
NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation")
"""What they say when an allocation was refused, which harms nothing that is there."""
FAILURES = ("CUDA error", "CUDA driver error", "device-side assert", "NCCL", "Triton Error [CUDA]")
"""What the messages of torch and Triton say when the device itself has failed."""


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
    """What the backend asks of a device."""

    torch_device: str
    collectives: str
    """The torch.distributed backend of its collectives."""
    failure: DeviceError | None = None

    @abstractmethod
    def here(self) -> AbstractContextManager[Any]:
        """Make the device the current one, and turn its errors into the contract's."""

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


# -- a device ----------------------------------------------------------------------------------------------------------


class CudaRuntime(Runtime):
    """One GPU by torch's index."""

    collectives = "nccl"

    def __init__(self, index: int) -> None:
        self.torch_device = f"cuda:{index}"
        self._index = index
        self._copies = _cuda.Stream(index)
        self._graph_memory: Any = None
        self._recordings: weakref.WeakSet[CudaRecording] = weakref.WeakSet()

    def here(self) -> AbstractContextManager[Any]:
        return _Here(self, self._index)

    def record(self) -> Event:
        return CudaEvent(self, torch.cuda.current_stream(self._index))

    def wait(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            torch.cuda.current_stream(self._index).wait_event(event.event)
        else:
            event.join()

    def copy(self, work: Work, after: Event | None) -> Event:
        start = self.record() if after is None else after
        if isinstance(start, CudaEvent):
            self._copies.wait_event(start.event)
        else:
            start.join()
        with torch.cuda.stream(self._copies):
            work()
        return CudaEvent(self, self._copies)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)

    def staging(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            if is_failure(error):
                raise
            raise OutOfDeviceMemory(
                why_not_pinned(nbytes, str(error), wsl=devices.is_wsl()), requested=nbytes
            ) from error

    def host_memory(self, nbytes: int) -> HostMemory:
        return PinnedMemory(nbytes, self.torch_device)

    def memory(self) -> MemoryInfo:
        """Free as the driver says; reclaimable is what torch keeps of freed tensors, recordings' memory aside.

        Others count once, as not free. A GPU that shares the machine's memory has what the system can give, of which
        the driver leaves out its caches.
        """
        free, total = torch.cuda.mem_get_info(self._index)
        known = total > 0
        unified = bool(getattr(torch.cuda.get_device_properties(self._index), "is_integrated", False))
        if unified:
            free = min(total, max(free, devices.available() or 0))
        allocated = torch.cuda.memory_allocated(self._index)
        kept = max(0, torch.cuda.memory_reserved(self._index) - allocated - self._recorded())
        return MemoryInfo.of(
            free=free if known else None,
            total=total if known else None,
            reclaimable=min(kept, total - free) if known else kept,
            unified=unified,
            allocated=allocated,
            peak=torch.cuda.max_memory_allocated(self._index),
        )

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)

    def holders(self) -> str:
        return devices.holders_of(f"GPU-{torch.cuda.get_device_properties(self._index).uuid}")

    def capture(self, work: Work) -> Recording:
        with self.here():
            self._warm_up(work)
        if not any(one.open for one in self._recordings):
            self._graph_memory = torch.cuda.graph_pool_handle()  # what the closed ones shared is gone with them
        torch.cuda.empty_cache()  # as a capture begins with it, which would hide what it takes
        before = torch.cuda.memory_reserved(self._index)
        graph = torch.cuda.CUDAGraph()
        with (
            _cuda.device(self._index),  # not `here`: a capture that is refused is no failure of the device
            torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"),
        ):
            work()
        made = CudaRecording(graph, max(0, torch.cuda.memory_reserved(self._index) - before))
        self._recordings.add(made)
        return made

    def _recorded(self) -> int:
        """Bytes that open recordings hold."""
        return sum(one.nbytes for one in self._recordings if one.open)

    def _warm_up(self, work: Work) -> None:
        """Run it outside of a recording, on a stream of its own, so that kernels are built and libraries loaded."""
        current, side = torch.cuda.current_stream(self._index), _cuda.Stream(self._index)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()
        current.wait_stream(side)


class CudaRecording(Recording):
    """A CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, nbytes: int) -> None:
        self._graph, self.nbytes = graph, nbytes
        self.open = True

    def replay(self) -> None:
        self._graph.replay()

    def close(self) -> None:
        self.open = False
        self._graph.reset()


class CudaEvent(Event):
    """The end of what a stream holds now."""

    def __init__(self, runtime: Runtime, stream: torch.cuda.Stream) -> None:
        self.event = _cuda.Event()
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


class PinnedMemory(HostMemory):
    """Memory of the system, registered with the driver: exactly so many bytes, where torch's own rounds up."""

    def __init__(self, nbytes: int, device: str) -> None:
        super().__init__(_allocated(nbytes))
        self._device = device
        code = _cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), nbytes, 0)
        if int(code) != 0:
            super().close()
            self._forget_error()
            raise OutOfDeviceMemory(why_not_pinned(nbytes, str(code), wsl=devices.is_wsl()), requested=nbytes)

    def close(self) -> None:
        if self.tensor.numel():
            code = _cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            if int(code) != 0:
                _log.warning("%d bytes of host memory could not be unpinned (%s)", self.tensor.nbytes, code)
                self._forget_error()
        super().close()

    def _forget_error(self) -> None:
        """Let a small kernel take up the error that a refused call leaves behind, or the next launch would raise it."""
        try:
            torch.zeros(1, device=self._device).add_(1)
        except RuntimeError as error:
            _log.debug("taken up after a refused call: %s", error)


def why_not_pinned(nbytes: int, cause: str, *, wsl: bool) -> str:
    """One line for memory that could not be pinned, with the way out."""
    wide = f"{nbytes} bytes of host memory could not be pinned ({cause})"
    if wsl:
        return (
            f"{wide}: under WSL2 only about half of the memory that Windows grants can be pinned; lower swap_space, or "
            "raise [wsl2] memory= in .wslconfig and restart WSL"
        )
    return f"{wide}: lower swap_space, or raise the limit on locked memory (ulimit -l, or the container's)"


def _allocated(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except (RuntimeError, MemoryError, TypeError) as error:
        raise OutOfDeviceMemory(
            f"{nbytes} bytes of host memory are not to be had ({error}): lower swap_space", requested=nbytes
        ) from error


def is_failure(error: BaseException) -> bool:
    """Whether the device has failed, so that nothing on it can be trusted any more.

    A refused capture is no failure, and a refused allocation is none, except within a collective.
    """
    said = str(error)
    harmless = "captur" in said or (is_out_of_memory(error) and "NCCL" not in said)
    return isinstance(error, RuntimeError) and any(words in said for words in FAILURES) and not harmless


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation was refused, by torch's allocator or by a library."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


class _Here:
    """The device made current, and errors of torch and Triton turned into the contract's."""

    def __init__(self, runtime: Runtime, index: int | None) -> None:
        self._runtime = runtime
        self._device = None if index is None else _cuda.device(index)

    def __enter__(self) -> None:
        if self._device is not None:
            self._device.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._device is not None:
            self._device.__exit__(kind, error, None)
        if error is not None and is_failure(error):
            self._runtime.failure = DeviceError(
                f"{self._runtime.torch_device} failed ({error}): start the process again, with CUDA_LAUNCH_BLOCKING=1 "
                "to see which call it was"
            )
            raise self._runtime.failure from error
        if error is not None and is_out_of_memory(error):
            held = self._runtime.holders()
            raise OutOfDeviceMemory(
                f"{error}: give fewer blocks, a smaller context or a lower memory fraction"
                + (f", or end what else holds memory there: {held}" if held else "")
            ) from error


# -- the processor in its place ----------------------------------------------------------------------------------------


class HostRuntime(Runtime):
    """The processor in a device's place: for tests of everything that needs no GPU."""

    torch_device = "cpu"
    collectives = "gloo"

    def here(self) -> AbstractContextManager[Any]:
        return _Here(self, None)

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
        return HostMemory(_allocated(nbytes))

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


def check_not_recording(recording: bool, what: str) -> None:
    """`ContractViolation` for a call that a recorded function may not make."""
    if recording:
        raise ContractViolation(f"a recorded function {what}; do it before or after", law="graph")
