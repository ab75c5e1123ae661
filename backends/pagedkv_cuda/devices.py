"""The GPUs of this machine as the driver's management library (NVML) lists them: no context, no framework.

NVML's list, by PCI address ── CUDA_VISIBLE_DEVICES ──> what is numbered 0, 1, ... here

CUDA orders unequal GPUs by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID is set, and nothing but CUDA knows that order:
numbers here follow the address, and `opening.torch_index` finds the same GPU for torch by its UUID.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv_cuda.limits import Capability

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER, BY_ADDRESS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
INSTALL = "install it, or start the container with the GPUs in it (docker run --gpus all)"
WAYS_OUT = {
    4: "this user may not open /dev/nvidia*: ask for that right, or start the container with the GPUs in it",
    18: "its library and its kernel module are of different versions, as after an update: restart the machine",
}
"""What to do, by NVML's error code."""
RUNNING = ("Compute", "Graphics", "MPSCompute")
"""The kinds of processes that NVML lists, as its functions' names have them."""
VERSIONS = ("", "_v2")
"""Endings of a function's name: what the binding takes for today's, and what older drivers have."""

Holder = tuple[int, int | None]
"""A process id, and the bytes that it holds; None is unknown."""


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

    if not hasattr(pynvml, "nvmlInit"):
        raise DriverMissing(
            f"{pynvml.__file__} is not the pynvml of nvidia-ml-py: pip install --force-reinstall nvidia-ml-py"
        )
    return pynvml


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """NVML, initialised; every device file is closed again at the end. Raises `DriverMissing`."""
    module = binding()
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        way_out = WAYS_OUT.get(getattr(error, "value", 0), INSTALL)
        raise DriverMissing(f"NVIDIA's driver does not answer ({error}): {way_out}") from error
    try:
        yield module
    finally:
        ask(module, "nvmlShutdown")


def ask(module: Any, function: str, *arguments: Any) -> Any:
    """What NVML answers; None where this driver, device or binding does not know it."""
    mismatch = getattr(module, "NVMLLibraryMismatchError", module.NVMLError)  # no NVMLError, and means the same
    with contextlib.suppress(module.NVMLError, mismatch, AttributeError):
        return getattr(module, function)(*arguments)
    return None


def driver_cuda(module: Any) -> Capability | None:
    """The newest CUDA that the driver knows, (major, minor); None where it does not say."""
    version = ask(module, "nvmlSystemGetCudaDriverVersion")
    return (version // 1000, version % 1000 // 10) if version else None


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
    pci = ask(module, "nvmlDeviceGetPciInfo", handle)
    found = capability or ask(module, "nvmlDeviceGetCudaComputeCapability", handle)
    total, free = _memory(module, handle)
    return Gpu(
        number=number,
        name=text(ask(module, "nvmlDeviceGetName", handle)) or "unnamed GPU",
        uuid=text(ask(module, "nvmlDeviceGetUUID", handle)),
        capability=(int(found[0]), int(found[1])) if found and found[0] > 0 else None,
        total=total,
        free=free,
        mig=mig,
        mig_parent=mig_parent,
        bus="" if pci is None else text(pci.busId),
    )


def _memory(module: Any, handle: Any) -> tuple[int | None, int | None]:
    """(total, free); unknown where NVML says nothing, zeros, or more free than there is."""
    memory = ask(module, "nvmlDeviceGetMemoryInfo", handle)
    if memory is None or memory.total <= 0 or not 0 <= memory.free <= memory.total:
        return None, None
    return int(memory.total), int(memory.free)


# -- who else is there -------------------------------------------------------------------------------------------------


def holders(module: Any, handle: Any) -> list[Holder]:
    """The other processes that the driver lists on a GPU, computing or drawing; under WSL2 it lists none."""
    found: dict[int, int | None] = {}
    for kind in RUNNING:
        answers = (ask(module, f"nvmlDeviceGet{kind}RunningProcesses{version}", handle) for version in VERSIONS)
        for one in next((answer for answer in answers if answer is not None), []):
            found[int(one.pid)] = None if one.usedGpuMemory is None else int(one.usedGpuMemory)
    return [(pid, size) for pid, size in sorted(found.items()) if pid != os.getpid()]


def holders_text(found: Sequence[Holder]) -> str:
    """They in words."""
    return ", ".join(f"process {pid} ({gib(size)})" for pid, size in found)


def holders_of(uuid: str) -> str:
    """What other processes hold on the GPU of this UUID, in words; "" where the driver names none."""
    with contextlib.suppress(DriverMissing), nvml() as module:
        handle = ask(module, "nvmlDeviceGetHandleByUUID", uuid)
        return "" if handle is None else holders_text(holders(module, handle))
    return ""


def gib(size: int | None) -> str:
    """Bytes in GiB, in words."""
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"


# -- what CUDA sees ----------------------------------------------------------------------------------------------------


def visible(everything: Sequence[Gpu], variable: str | None) -> list[Gpu]:
    """The GPUs that CUDA shows for a value of CUDA_VISIBLE_DEVICES, in its order, unequal GPUs by address.

    Entries are all numbers, or all beginnings of UUIDs of one kind ("GPU-...", "MIG-..."); the first one that names no
    device ends the list, and one that is named twice empties it. A process sees one MIG slice at most: the first one,
    unless others are named; with a slice no whole GPU is seen. Sources: NVIDIA's CUDA programming guide, "CUDA
    environment variables", and its MIG guide; of repetitions and mixtures, what torch reads from the same variable.
    """
    whole = [gpu for gpu in everything if not gpu.mig]
    chosen = whole if variable is None else _chosen(variable, whole, everything)
    slices = [part for gpu in chosen for part in _slice_of(gpu, everything)]
    return slices[:1] or [gpu for gpu in chosen if not gpu.mig_parent]


def _chosen(variable: str, whole: Sequence[Gpu], everything: Sequence[Gpu]) -> list[Gpu]:
    prefix = variable[:4] if variable.startswith(("GPU-", "MIG-")) else ""
    entries = list(itertools.takewhile(lambda entry: _is_entry(entry, prefix), variable.split(",")))
    keys = entries if prefix else [str(_number(entry)) for entry in entries]
    named = [_by_uuid(key, everything) if prefix else _by_number(int(key), whole) for key in keys]
    there = [gpu for gpu in itertools.takewhile(lambda gpu: gpu is not None, named) if gpu is not None]
    repeated = len(set(keys)) < len(keys) or len(set(there)) < len(there)
    return [] if repeated else there


def _is_entry(entry: str, prefix: str) -> bool:
    return entry.startswith(prefix) if prefix else _number(entry) >= 0


def _number(entry: str) -> int:
    """The number that an entry begins with ("1" of "1 of 4"); -1 where there is none."""
    found = re.match(r"[+-]?\d+", entry.strip(), re.ASCII)
    return int(found[0]) if found else -1


def _by_number(number: int, whole: Sequence[Gpu]) -> Gpu | None:
    return whole[number] if number < len(whole) else None


def _by_uuid(beginning: str, everything: Sequence[Gpu]) -> Gpu | None:
    matching = [gpu for gpu in everything if gpu.uuid.startswith(beginning)]
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


def order_is_open(everything: Sequence[Gpu]) -> bool:
    """Whether CUDA may number these GPUs otherwise than by address: some differ, and no order was asked for."""
    kinds = {(gpu.name, gpu.capability, gpu.total) for gpu in everything if not gpu.mig}
    return len(kinds) > 1 and os.environ.get(ORDER) != BY_ADDRESS


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


def available(root: Path = Path("/")) -> int | None:
    """Bytes of the machine's own memory that can be had without swapping; None where the system does not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable:\s*(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    return None


def has_driver(root: Path = Path("/")) -> bool:
    """Whether a driver of NVIDIA's is loaded, from the files it shows; Windows shows its own to WSL2."""
    shown = ("proc/driver/nvidia/version", "dev/nvidiactl", "usr/lib/wsl/lib/libnvidia-ml.so.1")
    return any((root / name).exists() for name in shown)
