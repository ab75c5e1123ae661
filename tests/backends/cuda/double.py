"""The CUDA backend on the processor: pools, plans, copies and graphs over a runtime that is legal and unkind."""

from __future__ import annotations

from pagedkv.api import World
from pagedkv_cuda import limits
from pagedkv_cuda.backend import CudaBackend
from pagedkv_cuda.capabilities import declared
from pagedkv_cuda.opening import make_path
from pagedkv_cuda.runtime import WORDS, HostRuntime
from tests.helpers.delaying import Delaying


class DelayingRuntime(Delaying):
    """The processor in a GPU's place."""

    words = WORDS


def double(
    kernels: str = "torch",
    *,
    capability: tuple[int, int] = (9, 0),
    runtime: HostRuntime | Delaying | None = None,
    world: World | None = None,
    seed: int | None = None,
) -> CudaBackend:
    """An instance as `create` makes it for a GPU of this capability, with the processor in the GPU's place."""
    generation = limits.generation(capability)
    if generation is None:
        raise ValueError(f"no generation of {capability}")
    used = runtime or DelayingRuntime(seed, frozen=kernels == "torch")
    can = declared(generation, kernels)
    return CudaBackend(can, used, make_path(kernels, capability, used), world=world)
