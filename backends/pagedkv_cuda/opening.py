"""Opens a GPU: the first module of this backend that loads torch."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from pagedkv.api import BackendUnavailable, Capabilities, World
from pagedkv.api.torch_streams import Runtime
from pagedkv_cuda import devices, limits
from pagedkv_cuda.backend import CudaBackend
from pagedkv_cuda.limits import Capability, spell
from pagedkv_cuda.path import Path
from pagedkv_cuda.runtime import CudaRuntime

_log = logging.getLogger("pagedkv.backends.cuda")


def open_backend(
    uuid: str,
    device: int,
    capability: Capability,
    capabilities: Capabilities,
    *,
    kernels: str,
    world: World,
    runtime: Callable[[int], CudaRuntime] = CudaRuntime,
    make: Callable[..., CudaBackend] = CudaBackend,
) -> CudaBackend:
    """An instance on the GPU with this UUID, which NVML lists at `device`. Raises `BackendUnavailable`.

    `runtime` opens the device, `make` is the class of the instance: a backend that extends this one has its own.
    """
    index = torch_index(uuid, device)
    if reason := why_no_code(capability, torch.cuda.get_arch_list(), tegra=devices.is_tegra()):
        raise BackendUnavailable(reason)
    try:
        opened = runtime(index)
    except RuntimeError as error:
        raise BackendUnavailable(f"CUDA device {device} does not open ({error}): look at nvidia-smi") from error
    _log.info("%s, compute capability %s, kernels %s", torch.cuda.get_device_name(index), spell(capability), kernels)
    _log.warning("not yet run on hardware: certify this backend here (`pagedkv certify`) before you rely on it")
    path = make_path(kernels, capability, opened)
    return make(capabilities, opened, path, world=world)


def make_path(kernels: str, capability: Capability, runtime: Runtime) -> Path:
    """The path of this name; Triton is loaded for its own only."""
    if kernels == "torch":
        from pagedkv_cuda.torch_path import TorchPath

        return TorchPath()
    from pagedkv_cuda.triton_path import TritonPath

    return TritonPath(10 * capability[0] + capability[1], runtime)


def torch_index(uuid: str, device: int) -> int:
    """torch's index of the GPU, which may order GPUs by speed where NVML orders them by address."""
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            f"torch {torch.__version__} sees no GPU although the driver lists some: see `pagedkv doctor` for the "
            "versions of driver and CUDA"
        )
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]
    if not uuid or (device < len(uuids) and uuids[device] == uuid):
        return device
    if uuid in uuids:
        _log.info("GPU %d is number %d for torch, which orders them by speed", device, uuids.index(uuid))
        return uuids.index(uuid)
    raise BackendUnavailable(
        f"GPU {device} ({uuid}) is not among those that torch sees ({', '.join(uuids)}): set "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID before the process starts"
    )


def why_no_code(capability: Capability, built: list[str], *, tegra: bool) -> str | None:
    """One line when this torch has no code for the GPU."""
    if limits.runs_on(capability, built, tegra=tegra):
        return None
    names = ", ".join(built) or "no GPU at all"
    return (
        f"torch {torch.__version__} is built for {names}, and none of that runs on compute capability "
        f"{spell(capability)}: install a torch that is built for sm_{capability[0]}{capability[1]}, build one with "
        f"TORCH_CUDA_ARCH_LIST={spell(capability)}, or choose backend cpu"
    )
