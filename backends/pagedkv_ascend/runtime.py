"""What is Ascend's own in a device's memory and recordings; the rest is any device's, `pagedkv.api.torch_streams`."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pagedkv.api import OutOfDeviceMemory
from pagedkv.api import torch_streams as streams
from pagedkv.api.torch_streams import Recording, StreamRuntime, Words, Work

WORDS = Words(
    failures=(
        "NPU function error",
        "OPS function error",
        "NPU error",
        "HCCL",
        "aicore exception",
        "The Inner error is reported as above",
        "FORCE STOP",
        "ECC ERROR",
        "UCE ERROR",
        "SUSPECT MEM ERROR",
        "SUSPECT REMOTE ERROR",
        "LINK ERROR",
    ),
    no_memory=("out of memory", "error code is 207001"),
    collectives=("HCCL", "Hccl"),
    advice=(
        "start the process again, with ASCEND_LAUNCH_BLOCKING=1 to see which call it was; the plog files under "
        "~/ascend/log say more"
    ),
)
"""Source: the texts in libtorch_npu.so of torch-npu 2.13.0, and logs in public reports.

207001 is CANN's code for an allocation that it refuses, of the device as of pinned memory of the host.
"""
Task = Callable[[], None]
"""A call with values of the host in it, as lengths of sequences: recorded, it is issued again before each replay."""


def why_no_recordings() -> str | None:
    """One line where the environment rules recordings out."""
    if os.environ.get("TASK_QUEUE_ENABLE") != "2":
        return None
    return "torch-npu records nothing with TASK_QUEUE_ENABLE=2: set it to 1 before the process starts, or leave it out"


class CacheMemory(ABC):
    """Where the tensors of one cache lie."""

    @abstractmethod
    def take(self, nbytes: int, wanted: int) -> torch.Tensor:
        """uint8 [nbytes]; the cache needs `wanted` in all. Raises `OutOfDeviceMemory`."""

    def close(self) -> None:
        """Give back what the tensors, which are gone by now, lay in."""
        return


class Runtime(streams.Runtime):
    """What this backend asks of a device, beyond any other."""

    words = WORDS

    @abstractmethod
    def cache_memory(self) -> CacheMemory:
        """Memory of the device for one cache."""

    @abstractmethod
    def task(self, issue: Task) -> None:
        """Issue a call now; within a recording, again before each replay."""

    @property
    @abstractmethod
    def recording(self) -> bool:
        """Whether a recording is being made."""


class NpuRuntime(StreamRuntime, Runtime):
    """One NPU by torch's index. `pooled`: each cache lies in a memory pool of its own."""

    collectives = "hccl"

    def __init__(self, index: int, *, pooled: bool) -> None:
        super().__init__("npu", index, torch.npu)  # type: ignore[attr-defined]
        self._pooled = pooled
        self._side: Any = None
        self._graph_memory: Any = None
        self._tasks: NpuRecording | None = None
        self._recordings: weakref.WeakSet[NpuRecording] = weakref.WeakSet()

    def cache_memory(self) -> CacheMemory:
        return NpuCacheMemory(self, self._module, self._pooled)

    def free_memory(self) -> tuple[int, int]:
        """(free, total) bytes as the driver says, none below 0."""
        free, total = self._free_and_total()
        return max(0, free), max(0, total)

    # -- recordings ----------------------------------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        return self._tasks is not None

    def task(self, issue: Task) -> None:
        if self._tasks is None:
            issue()
        else:
            self._tasks.take(issue)

    def capture(self, work: Work) -> Recording:
        if self._side is None:  # one for all recordings, as a device has few streams
            self._side = self._module.Stream(self._index)
        with self.here():
            self._warm_up(work)
        if not any(one.open for one in self._recordings):
            self._graph_memory = self._module.graph_pool_handle()  # what the closed ones shared is gone with them
        self._module.empty_cache()
        before = self._module.memory_reserved(self._index)
        made = NpuRecording(self._module, self._side)
        self._record(made, work)
        made.nbytes = max(0, self._module.memory_reserved(self._index) - before)
        self._recordings.add(made)
        return made

    def _record(self, made: NpuRecording, work: Work) -> None:
        """Not `here`: a capture that is refused is no failure of the device."""
        module = self._module
        self._tasks = made
        try:
            with (
                self.device(),
                module.stream(module.current_stream(self._index)),  # the way back: a failed capture leaves its own
                module.graph(made.graph, pool=self._graph_memory),
            ):
                work()
        finally:
            self._tasks = None

    def _recorded(self) -> int:
        return sum(one.nbytes for one in self._recordings if one.open)

    def _warm_up(self, work: Work) -> None:
        """Run it outside of a recording, on another stream, so that operators are loaded before."""
        current = self._module.current_stream(self._index)
        self._side.wait_stream(current)
        with self._module.stream(self._side):
            work()
        current.wait_stream(self._side)


class NpuCacheMemory(CacheMemory):
    """A pool on torch-npu's interface, whose memory goes back to the driver with it; or torch-npu's common memory."""

    def __init__(self, runtime: NpuRuntime, module: Any, pooled: bool) -> None:
        self._runtime, self._module, self._pooled = runtime, module, pooled
        self._pool: Any = None
        self._taken = 0

    def take(self, nbytes: int, wanted: int) -> torch.Tensor:
        runtime = self._runtime
        with self._inside():
            try:
                made = torch.empty(nbytes, dtype=torch.uint8, device=runtime.torch_device)
            except RuntimeError as error:
                if not runtime.words.shortage(error):
                    raise
                free, total = runtime.free_memory()
                free += self._taken  # the cache's own share is no other's
                raise OutOfDeviceMemory(
                    f"the cache needs {wanted} bytes and {free} of {total} are free on {runtime.torch_device}: give "
                    "fewer blocks (num_blocks), a smaller context (max_model_len), or end what else uses the device "
                    "(npu-smi info lists it)",
                    requested=wanted,
                    free=free,
                ) from error
        self._taken += nbytes
        return made

    def close(self) -> None:
        self._pool = None

    def _inside(self) -> AbstractContextManager[Any]:
        if not self._pooled:
            return nullcontext()
        if self._pool is None:
            self._pool = self._module.MemPool()
        made: AbstractContextManager[Any] = self._module.use_mem_pool(self._pool)
        return made


class NpuRecording(Recording):
    """An NPU graph. Calls with host values are groups of tasks in it, each behind an event that its update records.

    `updates`: the stream on which they are issued again.

    Source: the pages of graph_task_group_begin and graph_task_update_begin in the documents of Ascend/op-plugin.
    """

    def __init__(self, module: Any, updates: Any) -> None:
        self._module, self._updates = module, updates
        self.graph = module.NPUGraph()
        self._tasks: list[tuple[Any, Any, Task]] = []
        self.open = True

    def take(self, issue: Task) -> None:
        """Record a call that is issued again before each replay."""
        stream, event = self._module.current_stream(), self._module.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        self._module.graph_task_group_begin(stream)
        issue()
        self._tasks.append((self._module.graph_task_group_end(stream), event, issue))

    def replay(self) -> None:
        self._updates.wait_stream(self._module.current_stream())  # the last replay may not have read its lengths yet
        with self._module.stream(self._updates):
            for handle, event, issue in self._tasks:
                self._module.graph_task_update_begin(self._updates, handle)
                issue()
                self._module.graph_task_update_end(self._updates)
                event.record(self._updates)
        self.graph.replay()

    def close(self) -> None:
        self.open, self._tasks = False, []
        self.graph.reset()


# -- the processor in its place ----------------------------------------------------------------------------------------


class HostRuntime(streams.HostRuntime, Runtime):
    """The processor in an NPU's place: for tests of everything that needs no NPU."""

    words = WORDS

    def __init__(self) -> None:
        self._recording = False

    def cache_memory(self) -> CacheMemory:
        return HostCacheMemory()

    @property
    def recording(self) -> bool:
        return self._recording

    def task(self, issue: Task) -> None:
        issue()

    def capture(self, work: Work) -> Recording:
        self._recording = True
        try:
            return super().capture(work)
        finally:
            self._recording = False


class HostCacheMemory(CacheMemory):
    """The host's own."""

    def take(self, nbytes: int, wanted: int) -> torch.Tensor:
        try:
            return streams.allocated(nbytes)
        except OutOfDeviceMemory as error:
            raise OutOfDeviceMemory(f"the cache needs {wanted} bytes: {error}", requested=wanted) from error
