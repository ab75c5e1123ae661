"""What is Ascend's own in a device's memory and recordings; the rest is any device's, `pagedkv.api.torch_streams`."""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pagedkv.api import OutOfDeviceMemory
from pagedkv.api import torch_streams as streams
from pagedkv.api.torch_streams import Recording, StreamRuntime, Words, Work

_log = logging.getLogger("pagedkv.backends.ascend")

WORDS = Words(
    failures=("NPU function error", "NPU error", "ERR00", "HCCL", "EZ9999", "aclrtSynchronize", "aicore exception"),
    no_memory=("NPU out of memory", "out of memory", "error code is 207001", "aclrtMalloc"),
    collectives=("HCCL",),
    advice=(
        "start the process again, with ASCEND_LAUNCH_BLOCKING=1 to see which call it was; the plog files under "
        "~/ascend/log say more"
    ),
)
Task = Callable[[], None]
"""A call with values of the host in it, as lengths of sequences: recorded, it is issued again before each replay."""


class Runtime(streams.Runtime):
    """What this backend asks of a device, beyond any other."""

    words = WORDS

    @abstractmethod
    def device_memory(self, nbytes: int, wanted: int) -> torch.Tensor:
        """uint8 [nbytes] of the device for the cache, which needs `wanted` in all. Raises `OutOfDeviceMemory`."""

    def release(self) -> None:
        """Give back what closed pools held."""
        return

    @abstractmethod
    def task(self, issue: Task) -> None:
        """Issue a call now; within a recording, again before each replay."""

    @property
    @abstractmethod
    def recording(self) -> bool:
        """Whether a recording is being made."""


class NpuRuntime(StreamRuntime, Runtime):
    """One NPU by torch's index. `pooled`: the cache lies in a memory pool of its own."""

    collectives = "hccl"

    def __init__(self, index: int, *, pooled: bool) -> None:
        super().__init__("npu", index, torch.npu)  # type: ignore[attr-defined]
        self._pooled, self._pool = pooled, None
        self._tasks: NpuRecording | None = None
        self._recordings: weakref.WeakSet[NpuRecording] = weakref.WeakSet()

    def device_memory(self, nbytes: int, wanted: int) -> torch.Tensor:
        with self._in_pool():
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
            except RuntimeError as error:
                if not self.words.shortage(error):
                    raise
                free, total = self._free_and_total()
                raise OutOfDeviceMemory(
                    f"the cache needs {wanted} bytes and {max(0, free)} of {total} are free on {self.torch_device}: "
                    "give fewer blocks (num_blocks), a smaller context (max_model_len), or end what else uses the "
                    "device (npu-smi info lists it)",
                    requested=wanted,
                    free=max(0, free),
                ) from error

    def release(self) -> None:
        """The pool ends with its last tensor; torch keeps nothing of it for others."""
        self._pool = None

    def _in_pool(self) -> AbstractContextManager[Any]:
        if not self._pooled:
            return nullcontext()
        if self._pool is None:
            self._pool = self._module.MemPool()
        made: AbstractContextManager[Any] = self._module.use_mem_pool(self._pool)
        return made

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
        with self.here():
            self._warm_up(work)
        self._module.empty_cache()
        before = self._module.memory_reserved(self._index)
        made = self._tasks = NpuRecording(self._module)
        try:
            with self.device(), self._module.graph(made.graph):  # a capture that is refused is no failure of the device
                work()
        finally:
            self._tasks = None
        made.nbytes = max(0, self._module.memory_reserved(self._index) - before)
        self._recordings.add(made)
        return made

    def _recorded(self) -> int:
        return sum(one.nbytes for one in self._recordings if one.open)

    def _warm_up(self, work: Work) -> None:
        """Run it outside of a recording, on a stream of its own, so that operators are compiled before."""
        current, side = self._module.current_stream(self._index), self._module.Stream(self._index)
        side.wait_stream(current)
        with self._module.stream(side):
            work()
        current.wait_stream(side)


class NpuRecording(Recording):
    """An NPU graph. Calls with host values are groups of tasks in it, each behind an event that its update records.

    Source: the pages of graph_task_group_begin and graph_task_update_begin in the documents of Ascend/op-plugin.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.graph = module.NPUGraph()
        self._updates = module.Stream()
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

    def device_memory(self, nbytes: int, wanted: int) -> torch.Tensor:
        return streams.allocated(nbytes)

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
