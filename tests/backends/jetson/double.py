"""The Jetson backend on the processor: its budget over a board's files, the CUDA backend's double under it."""

from __future__ import annotations

from pathlib import Path

from pagedkv.api import MemoryInfo, World
from pagedkv_cuda import limits
from pagedkv_cuda.capabilities import declared
from pagedkv_cuda.opening import make_path
from pagedkv_jetson.backend import JetsonBackend
from pagedkv_jetson.board import ROOT
from pagedkv_jetson.descriptor import narrowed
from tests.backends.cuda.double import DelayingRuntime


class Holding(DelayingRuntime):
    """A runtime whose allocator has handed out `allocated` bytes, keeps `kept` of freed ones, and stops at `most`."""

    allocated, kept = 0, 0
    most: int | None = None

    def memory(self) -> MemoryInfo:
        return MemoryInfo.of(reclaimable=self.kept, allocated=self.allocated, unified=True)

    def cap(self, nbytes: int) -> None:
        self.most = nbytes


def double(
    root: Path = ROOT, runtime: Holding | None = None, *, world: World | None = None, seed: int | None = None
) -> JetsonBackend:
    """An instance as it is opened on an Orin with these files."""
    generation = limits.generation((8, 7))
    if generation is None:
        raise ValueError("8.7 is missing from the table of generations")
    used = runtime or Holding(seed)
    can = narrowed(declared(generation, "torch"))
    return JetsonBackend(can, used, make_path("torch", (8, 7), used), root=root, world=world)
