"""The GPUs of this machine as the driver's management library (NVML) lists them: no context, no framework.

NVML's list, by PCI address ── CUDA_VISIBLE_DEVICES ──> what CUDA numbers 0, 1, ...
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv_cuda.limits import Capability

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, or one slice of a GPU in MIG mode. `total` and `free` in bytes; None is unknown.

    `number`: its place in NVML's list, that of the whole GPU for a slice.
    """

    number: int
    name: str
    uuid: str
    capability: Capability | None
    total: int | None
    free: int | None
    mig: bool = False
    mig_parent: bool = False
    bus: str = ""


class DriverMissing(Exception):
    """NVML cannot be asked; the text says why and what to do."""


def binding() -> Any:
    """The module pynvml of nvidia-ml-py, imported on request."""
    if importlib.util.find_spec("pynvml") is None:
        raise DriverMissing("nvidia-ml-py is not installed: pip install 'pagedkv[cuda]'")
    import pynvml

    return pynvml


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """NVML, initialised; every device file is closed again at the end. Raises `DriverMissing`."""
    module = binding()
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        raise DriverMissing(
            f"NVIDIA's driver does not answer ({error}): install it, or start the container with the GPUs in it "
            "(docker run --gpus all)"
        ) from error
    try:
        yield module
    finally:
        module.nvmlShutdown()


def ask(module: Any, function: str, *arguments: Any) -> Any:
    """What NVML answers; None where this driver or device does not know, an old driver's missing function included."""
    with contextlib.suppress(module.NVMLError):
        return getattr(module, function)(*arguments)
    return None


def text(answer: Any) -> str:
    """A string of NVML, which older bindings give as bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer or "")


# -- the list ----------------------------------------------------------------------------------------------------------


def installed(module: Any) -> list[Gpu]:
    """Every GPU, by PCI address; a GPU in MIG mode is followed by its slices."""
    found: list[Gpu] = []
    for number in range(ask(module, "nvmlDeviceGetCount") or 0):
        if (handle := ask(module, "nvmlDeviceGetHandleByIndex", number)) is not None:
            found += _with_slices(module, handle, number)
    return found


def _with_slices(module: Any, handle: Any, number: int) -> Iterator[Gpu]:
    mode = ask(module, "nvmlDeviceGetMigMode", handle)
    sliced = mode is not None and mode[0] == 1
    whole = _gpu(module, handle, number, mig_parent=sliced)
    yield whole
    if sliced:
        for place in range(ask(module, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            if (part := ask(module, "nvmlDeviceGetMigDeviceHandleByIndex", handle, place)) is not None:
                yield _gpu(module, part, number, mig=True, capability=whole.capability)


def _gpu(
    module: Any,
    handle: Any,
    number: int,
    *,
    mig: bool = False,
    mig_parent: bool = False,
    capability: Capability | None = None,
) -> Gpu:
    memory, pci = ask(module, "nvmlDeviceGetMemoryInfo", handle), ask(module, "nvmlDeviceGetPciInfo", handle)
    found = capability or ask(module, "nvmlDeviceGetCudaComputeCapability", handle)
    return Gpu(
        number=number,
        name=text(ask(module, "nvmlDeviceGetName", handle)) or "unnamed GPU",
        uuid=text(ask(module, "nvmlDeviceGetUUID", handle)),
        capability=None if found is None else (int(found[0]), int(found[1])),
        total=None if memory is None else int(memory.total),
        free=None if memory is None else int(memory.free),
        mig=mig,
        mig_parent=mig_parent,
        bus="" if pci is None else text(pci.busId),
    )


# -- what CUDA sees ----------------------------------------------------------------------------------------------------


def visible(everything: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """The GPUs that CUDA numbers 0, 1, ..., in its order, for a value of CUDA_VISIBLE_DEVICES.

    Entries are numbers or the beginnings of UUIDs ("GPU-...", "MIG-..."); the first one that names no device, or names
    one twice, ends the list. A process sees one MIG slice at most: the first one, unless others are named; with a slice
    no whole GPU is seen. Source: NVIDIA's CUDA programming guide, "CUDA environment variables", and its MIG guide.
    """
    whole = [gpu for gpu in everything if not gpu.mig]
    if variable is None:
        chosen = whole
    else:
        chosen = []
        for entry in variable.split(","):
            named = _named(entry.strip(), whole, everything)
            if named is None or named in chosen:
                break
            chosen.append(named)
    slices = [part for gpu in chosen for part in _slice_of(gpu, everything)]
    return slices[:1] or [gpu for gpu in chosen if not gpu.mig_parent]


def _named(entry: str, whole: Sequence[Gpu], everything: Sequence[Gpu]) -> Gpu | None:
    if entry.isdecimal():
        return whole[int(entry)] if int(entry) < len(whole) else None
    matching = [gpu for gpu in everything if entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _slice_of(gpu: Gpu, everything: Sequence[Gpu]) -> list[Gpu]:
    """The slice that a process sees of what was named: itself, or the first of a GPU in MIG mode."""
    if gpu.mig:
        return [gpu]
    parts = [part for part in everything if part.mig and part.number == gpu.number]
    return parts[:1] if gpu.mig_parent else []


def visible_now(module: Any) -> list[Gpu]:
    """`visible` for this process's environment."""
    return visible(installed(module), os.environ.get(VISIBLE))


# -- the machine around them -------------------------------------------------------------------------------------------


def is_tegra(root: Path = Path("/")) -> bool:
    """Whether the GPU is inside the processor, from the device tree, which containers often mask, or from sysfs."""
    shown = {"proc/device-tree/compatible": b"nvidia,tegra", "sys/devices/soc0/family": b"Tegra"}
    return any(word in _read(root / name) for name, word in shown.items())


def _read(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def is_wsl(root: Path = Path("/")) -> bool:
    """Whether this is Linux under Windows (WSL2), where little memory can be pinned."""
    with contextlib.suppress(OSError):
        return "microsoft" in (root / "proc/version").read_text(errors="replace").lower()
    return False


def has_driver(root: Path = Path("/")) -> bool:
    """Whether a driver of NVIDIA's is loaded, from the files it shows; Windows shows its own to WSL2."""
    shown = ("proc/driver/nvidia/version", "dev/nvidiactl", "usr/lib/wsl/lib/libnvidia-ml.so.1")
    return any((root / name).exists() for name in shown)
