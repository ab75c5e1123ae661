"""Opens a Jetson's GPU, and counts its memory as the system does: the first module of this backend that loads torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from pagedkv.api import (
    AttentionBackend,
    BackendUnavailable,
    MemoryInfo,
    OutOfDeviceMemory,
    Pool,
    PoolSpec,
    UnsupportedError,
)
from pagedkv_cuda import opening
from pagedkv_cuda.backend import CudaBackend
from pagedkv_cuda.runtime import CudaRuntime
from pagedkv_jetson.board import ROOT, meminfo

FRACTION = 0.85
"""The share of what is available that an engine may fill when the user does not say."""
RESERVE, RESERVE_PART = 512 << 20, 16
"""Never touched, left to the system: 512 MiB, or a sixteenth of all memory if that is more."""
NO_NVML = "NVML_SUCCESS == r"
"""In what torch's allocator raises where memory is short: it asks NVML for its report, which these boards lack."""


class NotShared(BackendUnavailable):
    """A GPU that has memory of its own."""


class JetsonRuntime(CudaRuntime):
    """The GPU in the processor, without the driver's figures of memory, which leave out what the system could free."""

    def __init__(self, index: int) -> None:
        if not torch.cuda.get_device_properties(index).is_integrated:
            raise NotShared(
                f"{torch.cuda.get_device_name(index)} has memory of its own, this backend is for a GPU that shares the "
                "board's: choose backend cpu, no other one serves such a card on a Jetson yet"
            )
        super().__init__(index)

    def memory(self) -> MemoryInfo:
        """What torch holds, by its own count."""
        held, peak = torch.cuda.memory_allocated(self._index), torch.cuda.max_memory_allocated(self._index)
        kept = max(0, torch.cuda.memory_reserved(self._index) - held - self._recorded())
        return MemoryInfo.of(reclaimable=kept, allocated=held, peak=peak, unified=True)

    def cap(self, nbytes: int) -> None:
        """Have torch refuse what would make this process hold more, whatever asks for it: no step hangs the board."""
        total = torch.cuda.get_device_properties(self._index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, nbytes) / total), self._index)


class JetsonBackend(CudaBackend):
    """The CUDA backend in a memory that weights, cache and the system share, of which a part is never touched."""

    _runtime: JetsonRuntime

    def __init__(self, *given: Any, root: Path = ROOT, **more: Any) -> None:
        super().__init__(*given, **more)
        self._root = root

    def memory(self) -> MemoryInfo:
        """Free is MemAvailable of /proc/meminfo: the page cache in it is given up when memory is asked for."""
        told = meminfo(self._root)
        held = super().memory()
        return dataclasses.replace(held, free=told.get("MemAvailable"), total=told.get("MemTotal"), unified=True)

    def kv_budget(self, fraction: float | None, reserved: int) -> int | None:
        """fraction x (available + allocated) - reserve - allocated - reserved, at least 0: `allocated` by this process.

        It is the same whether weights are among `reserved` or allocated. No fraction reaches into the host's reserve.
        """
        memory = self.memory()
        if memory.total is None or memory.free is None:
            return None
        held, share = memory.allocated or 0, FRACTION if fraction is None else fraction
        reach = min(memory.total, _available(memory) + held)
        self._runtime.cap(reach - _reserve(memory))
        return max(0, int(share * reach) - _reserve(memory) - held - reserved)

    def alloc_pool(self, spec: PoolSpec) -> Pool:
        """Raises `OutOfDeviceMemory` before the system is left with less than its reserve, whoever took the rest."""
        memory, cost = self.memory(), self.pool_cost(spec)
        asked = cost.fixed + spec.num_blocks * cost.per_block
        if memory.total is not None and memory.free is not None:
            if asked > _left(memory):
                raise _shortage(asked, memory)
            self._runtime.cap(_left(memory) + (memory.allocated or 0))
        try:
            return super().alloc_pool(spec)
        except RuntimeError as error:
            if NO_NVML in str(error):
                raise _shortage(asked, self.memory()) from error
            raise

    def communicator(self, group: Sequence[int]) -> NoReturn:
        raise UnsupportedError("a Jetson has one GPU: leave tensor_parallel_size at 1")


def _available(memory: MemoryInfo) -> int:
    return (memory.free or 0) + (memory.reclaimable or 0)


def _reserve(memory: MemoryInfo) -> int:
    return max(RESERVE, (memory.total or 0) // RESERVE_PART)


def _left(memory: MemoryInfo) -> int:
    return max(0, _available(memory) - _reserve(memory))


def _shortage(asked: int, memory: MemoryInfo) -> OutOfDeviceMemory:
    left, reserve, free, total = _left(memory), _reserve(memory), memory.free or 0, memory.total or 0
    return OutOfDeviceMemory(
        f"{asked >> 20} MiB of cache, {left >> 20} can be had: {free >> 20} of {total >> 20} MiB are available, and "
        f"{reserve >> 20} stay free for the system. Give fewer blocks (num_blocks, kv_cache_memory), or end what else "
        "uses memory (another runtime, the desktop)",
        requested=asked,
        free=left,
    )


def open_backend(*given: Any, root: Path, wheels: str, **more: Any) -> AttentionBackend:
    """What the CUDA backend's function of this name does, for the board. `wheels`: where a torch for it comes from."""
    try:
        return opening.open_backend(*given, runtime=JetsonRuntime, make=partial(JetsonBackend, root=root), **more)
    except NotShared:
        raise
    except BackendUnavailable as error:
        raise BackendUnavailable(f"{error}; {wheels}") from error
