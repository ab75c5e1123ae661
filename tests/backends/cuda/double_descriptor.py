"""What the kit loads to test the CUDA backend without a GPU: two backends by name only, as light as the real one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedkv.api import AttentionBackend, DeviceInfo, World
from pagedkv_cuda.descriptor import CudaDescriptor


class DoubleDescriptor(CudaDescriptor):
    """The backend with torch's operators, the processor in a GPU's place."""

    name = "cuda-double"
    kernels = "torch"

    def probe(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo.of(index=0, kind="no GPU, the processor in its place, compute capability 9.0"),)

    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        from tests.backends.cuda.double import double

        return double(self.kernels, world=world)

    def diagnose(self) -> Mapping[str, str]:
        return {}


class InterpretedDescriptor(DoubleDescriptor):
    """The same with Triton's kernels, for a process with TRITON_INTERPRET=1."""

    name = "cuda-interpreted"
    kernels = "triton"
