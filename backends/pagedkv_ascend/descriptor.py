"""The Ascend backend's entry point: what can be said about the NPUs here without torch, torch-npu or a context."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedkv.api import AttentionBackend, BackendUnavailable, Capabilities, Descriptor, DeviceInfo, Option, World
from pagedkv_ascend import devices, diagnose, environment, limits, packages
from pagedkv_ascend.capabilities import declared
from pagedkv_ascend.devices import DriverMissing, Npu
from pagedkv_ascend.limits import Chip

NO_DRIVER = "no driver of Ascend NPUs is installed: install it, or choose another backend"
NONE_VISIBLE = "the driver lists no NPU that this process may see: look at npu-smi info"
POOL = Option.of(
    name="use_ascend_memory_pool",
    type=bool,
    default=True,
    help="the cache lies in a memory pool of its own, apart from torch-npu's other allocations",
)


class AscendDescriptor(Descriptor):
    """Huawei's NPUs that this process may see, numbered as ASCEND_RT_VISIBLE_DEVICES lists them."""

    name = "ascend"
    api = (1, 1)
    options = (POOL, *environment.options())

    def __init__(self, root: Path = devices.ROOT) -> None:
        self._root = root

    def probe(self) -> tuple[DeviceInfo, ...]:
        if not devices.installed(self._root):
            return (_unusable("no NPU", NO_DRIVER),)
        try:
            found = devices.visible(devices.every(self._root))
        except DriverMissing as error:
            return (_unusable("no NPU can be asked", str(error)),)
        except ValueError as error:
            return (_unusable("none visible", str(error)),)
        if not found:
            return (_unusable("none visible", NONE_VISIBLE),)
        against = packages.why_no_torch_npu() or packages.why_no_triton() or packages.why_no_cann(self._root)
        return tuple(device_info(number, npu, against) for number, npu in enumerate(found))

    def describe(self, device: DeviceInfo) -> Capabilities:
        return declared(chip_of(device))

    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        found = self.probe()
        info = next((one for one in found if one.index == device), None)
        if info is None or (info.score == 0 and info.reason):
            raise BackendUnavailable(f"NPU {device}: {info.reason if info else 'there is none'}")
        if reason := why_no_map(device, world, len(found)):
            raise BackendUnavailable(reason)
        from pagedkv_ascend.opening import open_backend

        return open_backend(device, chip_of(info), options, world=world)

    def diagnose(self) -> Mapping[str, str]:
        return diagnose.report(self._root)


def device_info(number: int, npu: Npu, against: str | None) -> DeviceInfo:
    """An NPU as the core sees it; `against`: what speaks against every NPU here."""
    found = limits.chip(npu.chip)
    series = found.series if found else "of no series known here"
    if found is not None and not found.attention:
        score, reason = 0, f"the {series} has no npu_fused_infer_attention_score: choose backend cpu"
    elif against:
        score, reason = 0, against
    elif found is None:
        score, reason = limits.GENERIC, "generic: the limits of Atlas A2 are taken for it"
    else:
        score, reason = limits.NATIVE, f"native, {series}"
    kind = f"Ascend{npu.chip}, {series}"
    return DeviceInfo.of(index=number, kind=kind, total=npu.total, free=npu.free, score=score, reason=reason)


def chip_of(device: DeviceInfo) -> Chip:
    """The row of a device's chip; that of Atlas A2 for one that is not in the table."""
    named = re.match(r"Ascend(\S+?),", device.kind)
    found = limits.chip(named[1] if named else "") or limits.chip("910B3")
    if found is None:
        raise BackendUnavailable("limits.toml has no row for the chip 910B3: install pagedkv again")
    return found


def why_no_map(device: int, world: World, count: int) -> str | None:
    """One line unless each rank has a device of its own: rank r the r-th visible one."""
    if world.size == 1:
        return None
    if world.size > count:
        return (
            f"{world.size} ranks need {world.size} NPUs and {count} are visible: set {environment.VISIBLE}, or lower "
            "tensor_parallel_size"
        )
    if device != world.rank:
        return f"rank {world.rank} was given NPU {device}: rank r takes the r-th visible NPU, set {environment.VISIBLE}"
    return None


def _unusable(kind: str, reason: str) -> DeviceInfo:
    return DeviceInfo.of(index=0, kind=kind, score=0, reason=reason)
