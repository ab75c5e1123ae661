"""What the kit loads to test the CUDA backend without a GPU: two backends by name only, as light as the real one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedkv.api import AttentionBackend, Capabilities, Descriptor, DeviceInfo, Option, World

SEED = Option.of(name="seed", type=int, default=0, help="0: copies run as late as they may; else when this seed says")


class DoubleDescriptor(Descriptor):
    """The backend with torch's operators, the processor in a GPU's place; the real descriptor is imported later."""

    name = "cuda-double"
    kernels = "torch"

    @property
    def _real(self) -> Descriptor:
        from pagedkv_cuda.descriptor import CudaDescriptor

        return CudaDescriptor()

    @property
    def api(self) -> tuple[int, int]:  # type: ignore[override]
        return self._real.api

    @property
    def options(self) -> tuple[Option, ...]:  # type: ignore[override]
        return (*self._real.options, SEED)

    def probe(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo.of(index=0, kind="no GPU, the processor in its place, compute capability 9.0"),)

    def describe(self, device: DeviceInfo) -> Capabilities:
        return self._real.describe(device)

    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        from tests.backends.cuda.double import double

        seed = int(options.get("seed") or 0) or None
        return double(self.kernels, world=world, seed=seed)


class InterpretedDescriptor(DoubleDescriptor):
    """The same with Triton's kernels, for a process with TRITON_INTERPRET=1."""

    name = "cuda-interpreted"
    kernels = "triton"


DOUBLE, INTERPRETED = DoubleDescriptor(), InterpretedDescriptor()
"""Instances, as what they take from the real descriptor is asked of one."""
