"""What is NVIDIA's own in a device's memory and recordings; the rest is any device's, `pagedkv.api.torch_streams`.

`HostRuntime` stands in for a GPU in tests: the same calls on the processor, done when they return.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from pagedkv.api import OutOfDeviceMemory
from pagedkv.api import torch_streams as streams
from pagedkv.api.torch_streams import HostMemory, Recording, StreamRuntime, Words, Work, allocated
from pagedkv_cuda import devices

_log = logging.getLogger("pagedkv.backends.cuda")

_cuda: Any = torch.cuda
"""Its classes have no types of their own."""
WORDS = Words(
    failures=("CUDA error", "CUDA driver error", "device-side assert", "NCCL", "Triton Error [CUDA]"),
    no_memory=("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "cudaErrorMemoryAllocation"),
    collectives=("NCCL",),
    advice="start the process again, with CUDA_LAUNCH_BLOCKING=1 to see which call it was",
)


class HostRuntime(streams.HostRuntime):
    """The processor in a GPU's place."""

    words = WORDS


class CudaRuntime(StreamRuntime):
    """One GPU by torch's index."""

    collectives = "nccl"
    words = WORDS

    def __init__(self, index: int) -> None:
        super().__init__("cuda", index, _cuda)
        self._graph_memory: Any = None
        self._recordings: weakref.WeakSet[CudaRecording] = weakref.WeakSet()

    def host_memory(self, nbytes: int) -> HostMemory:
        return PinnedMemory(nbytes, self.torch_device)

    def why_not_pinned(self, nbytes: int, cause: str) -> str:
        return why_not_pinned(nbytes, cause, wsl=devices.is_wsl())

    def _free_and_total(self) -> tuple[int, int]:
        """A GPU in the machine's memory has what the system can give, of which the driver leaves out caches."""
        free, total = torch.cuda.mem_get_info(self._index)
        if self._unified():
            free = max(free, devices.available() or 0)
        return free, total

    def _unified(self) -> bool:
        return bool(getattr(torch.cuda.get_device_properties(self._index), "is_integrated", False))

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


class PinnedMemory(HostMemory):
    """Memory of the system, registered with the driver: exactly so many bytes, where torch's own rounds up."""

    def __init__(self, nbytes: int, device: str) -> None:
        super().__init__(allocated(nbytes))
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
    if wsl:
        return (
            f"{nbytes} bytes of host memory could not be pinned ({cause}): under WSL2 only about half of the memory "
            "that Windows grants can be pinned; lower swap_space, or raise [wsl2] memory= in .wslconfig and restart WSL"
        )
    return streams.why_not_pinned(nbytes, cause)


def is_failure(error: BaseException) -> bool:
    """Whether the device has failed, so that nothing on it can be trusted any more."""
    return WORDS.failure(error)
