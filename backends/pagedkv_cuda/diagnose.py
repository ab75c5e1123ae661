"""What `pagedkv doctor` shows: driver, GPUs, their wiring, packages, and what to change. Loads no framework."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from pagedkv_cuda import devices, limits, packages
from pagedkv_cuda.devices import DriverMissing, Gpu, ask, gib, holders, holders_text, text
from pagedkv_cuda.limits import spell

UNVERIFIED = (
    "not run on hardware: kernels were tested under Triton's interpreter and compiled ahead of time; pools, copies and "
    "graphs on a double, the processor in a GPU's place, which passes the kit with torch's operators. `pagedkv certify "
    "cuda` on a machine with a GPU tests all of it there"
)
ANCESTORS = {0: "SELF", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's nearest common point of two GPUs on PCIe, by the names of `nvidia-smi topo -m`."""
MEANINGS = {
    "NV": "NVLink, by number of links",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the processor's PCIe bridge",
    "NODE": "bridges of one NUMA node",
    "SYS": "between sockets",
}
MOST_LINKS = 18
"""Of one GPU, where the binding has no number of its own."""
P2P_READ = 0
SWITCH = 2
"""NVML's type of the far end of an NVLink that is a switch."""


def report() -> dict[str, str]:
    """Every line, those about GPUs only where the driver answers."""
    said = {"state": UNVERIFIED, **_packages()}
    if devices.is_tegra():
        return {**said, "GPU": "in the processor (Tegra): backend jetson is made for it"}
    try:
        with devices.nvml() as module:
            return {**said, **_driver(module), **_gpus(module), **_wiring(module)}
    except DriverMissing as error:
        return {**said, "driver": str(error)}


def _packages() -> dict[str, str]:
    built = packages.torch_cuda()
    torch = f"{packages.version('torch') or 'not installed'}" + (f", built for CUDA {built}" if built else ", no CUDA")
    triton = packages.why_no_triton() or f"triton {packages.triton()}"
    return {"torch": torch, "triton": triton}


def _driver(module: Any) -> dict[str, str]:
    newest = devices.driver_cuda(module)
    said = {"driver": text(ask(module, "nvmlSystemGetDriverVersion")) or "unknown"}
    if newest is not None:
        said["driver"] += f", CUDA up to {spell(newest)}"
    if devices.is_wsl():
        said["WSL2"] = (
            "little host memory can be pinned: keep swap_space small, or raise [wsl2] memory= in .wslconfig; NVML "
            "does not see other processes"
        )
    if reason := packages.why_no_torch(newest):
        said["change"] = reason
    return said


# -- each GPU ----------------------------------------------------------------------------------------------------------


def _gpus(module: Any) -> dict[str, str]:
    everything = devices.installed(module)
    said = {
        f"GPU {gpu.number}{' MIG' if gpu.mig else ''} {gpu.uuid}".strip(): _about(module, gpu) for gpu in everything
    }
    variable = os.environ.get(devices.VISIBLE)
    if variable is not None:
        seen = devices.visible(everything, variable)
        said[devices.VISIBLE] = f"{variable!r} leaves {', '.join(gpu.uuid for gpu in seen) or 'none'}"
    if devices.order_is_open(everything):
        said[devices.ORDER] = (
            f"not {devices.BY_ADDRESS}: CUDA numbers unequal GPUs by speed, NVML and this report by address; set "
            f"{devices.ORDER}={devices.BY_ADDRESS}, or name GPUs by UUID in {devices.VISIBLE}"
        )
    for capability in sorted({gpu.capability for gpu in everything if gpu.capability}):
        said |= _advice(capability)
    return said


def _about(module: Any, gpu: Gpu) -> str:
    parts = [gpu.name, f"compute capability {spell(gpu.capability)}" if gpu.capability else "capability unknown"]
    parts.append(f"{gib(gpu.free)} free of {gib(gpu.total)}" if gpu.total is not None else "memory unknown")
    if others := holders(module, ask(module, "nvmlDeviceGetHandleByIndex", gpu.number)):
        parts.append(f"also used by {holders_text(others)}")
    if gpu.mig_parent:
        parts.append("in MIG mode: a process sees one slice of it")
    return ", ".join(parts)


def _advice(capability: limits.Capability) -> dict[str, str]:
    generation = limits.generation(capability)
    if generation is None or capability < limits.LEAST:
        return {f"advice for {spell(capability)}": "too old for today's torch: choose another GPU"}
    known = capability in generation.capabilities
    newer = [] if known else [f"not in the table, what follows is of {spell(generation.capabilities[0])}"]
    against = [reason for reason in (packages.why_too_old(generation), generation.why_not) if reason]
    return {f"advice for {generation.name} {spell(capability)}": "; ".join((*newer, *against, *generation.advice))}


# -- between GPUs ------------------------------------------------------------------------------------------------------


def _wiring(module: Any) -> dict[str, str]:
    handles = [ask(module, "nvmlDeviceGetHandleByIndex", n) for n in range(ask(module, "nvmlDeviceGetCount") or 0)]
    if len(handles) < 2:
        return {}
    rows = topology(module, handles)
    said = {"topology": matrix_text(rows)}
    seen = {"NV" if cell.startswith("NV") else cell for row in rows for cell in row}
    said["topology means"] = ", ".join(f"{name}: {what}" for name, what in MEANINGS.items() if name in seen)
    said["peer access"] = _peers(module, handles)
    return said


def topology(module: Any, handles: Sequence[Any]) -> list[list[str]]:
    """How each pair of GPUs is connected, as `nvidia-smi topo -m` names it: NV# links, else the place on PCIe."""
    buses = [_bus(ask(module, "nvmlDeviceGetPciInfo", handle)) for handle in handles]
    links = [dict(_links(module, handle)) for handle in handles]
    rows = []
    for i, handle in enumerate(handles):
        row = []
        for j, other in enumerate(handles):
            direct = links[i].get(buses[j], 0) if buses[j] else 0
            direct = direct or min(links[i].get("switch", 0), links[j].get("switch", 0))
            row.append("X" if i == j else f"NV{direct}" if direct else _on_pcie(module, handle, other))
        rows.append(row)
    return rows


def _links(module: Any, handle: Any) -> Iterator[tuple[str, int]]:
    """(far end, number of active links): a GPU's PCI address, or "switch" for all that end at one."""
    counts: dict[str, int] = {}
    for link in range(getattr(module, "NVML_NVLINK_MAX_LINKS", MOST_LINKS)):
        if ask(module, "nvmlDeviceGetNvLinkState", handle, link) != 1:
            continue
        switched = ask(module, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == SWITCH
        far = "switch" if switched else _bus(ask(module, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
        counts[far] = counts.get(far, 0) + 1
    yield from counts.items()


def _bus(pci: Any) -> str:
    """A PCI address, its domain as short as it goes: NVML writes four or eight digits, by the function's version."""
    domain, colon, rest = ("" if pci is None else text(pci.busId).lower()).partition(":")
    return f"{domain.lstrip('0') or '0'}{colon}{rest}" if rest else ""


def _on_pcie(module: Any, handle: Any, other: Any) -> str:
    level = ask(module, "nvmlDeviceGetTopologyCommonAncestor", handle, other)
    return ANCESTORS.get(level, "?")


def _peers(module: Any, handles: Sequence[Any]) -> str:
    """Which pairs cannot read each other's memory. The binding's constant for reading is a tuple, and 0 is meant."""
    without = [
        f"{i}-{j}"
        for i, handle in enumerate(handles)
        for j, other in enumerate(handles)
        if i < j and ask(module, "nvmlDeviceGetP2PStatus", handle, other, P2P_READ) != 0
    ]
    if not without:
        return "between all pairs"
    return (
        f"none between {', '.join(without)}: collectives go through host memory there; use pairs that have it, or look "
        "for ACS and IOMMU settings"
    )


def matrix_text(rows: Sequence[Sequence[str]]) -> str:
    """The matrix on one line, its rows separated by bars."""
    return " | ".join(f"{number}: {' '.join(row)}" for number, row in enumerate(rows))
