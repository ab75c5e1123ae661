"""The Ascend backend's entry point: what can be said about the NPUs here without torch, torch-npu or a context."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedkv.api import AttentionBackend, BackendUnavailable, Capabilities, Descriptor, DeviceInfo, Option, World
from pagedkv_ascend import devices, diagnose, environment, limits, packages
from pagedkv_ascend.capabilities import declared
from pagedkv_ascend.devices import DriverMissing, Npu
from pagedkv_ascend.limits import Chip

_log = logging.getLogger("pagedkv.backends.ascend")

NO_DRIVER = "no driver of Ascend NPUs is installed: install it, or choose another backend"
NONE_VISIBLE = "the driver lists no NPU: look at npu-smi info"
UNNAMED = "the driver does not tell its chip: update the NPU driver"
NEAREST = "910B3"
"""The chip whose limits are taken for one that is not in the table."""
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
            return (_unusable("no NPU", NONE_VISIBLE),)
        against, note = packages.against(self._root), packages.why_not_this_set()
        return tuple(device_info(index, npu, against, note) for index, npu in enumerate(found))

    def describe(self, device: DeviceInfo) -> Capabilities:
        return declared(chip_of(device))

    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        found = self.probe()
        info = next((one for one in found if one.index == device), None)
        if info is None or not info.score:
            raise BackendUnavailable(f"NPU {device}: {info.reason if info else _none_of(found)}")
        if reason := why_no_map(device, world, found):
            raise BackendUnavailable(reason)
        environment.profile(options)  # what cannot be is said before torch is loaded
        if note := packages.why_not_this_set():
            _log.warning("%s: see `pagedkv doctor --backend ascend`", note)
        from pagedkv_ascend.opening import open_backend

        return open_backend(device, chip_of(info), options, world=world)

    def diagnose(self) -> Mapping[str, str]:
        return diagnose.report(self._root)


def device_info(index: int, npu: Npu, against: str | None, note: str | None = None) -> DeviceInfo:
    """An NPU as the core sees it; `against`: what speaks against every NPU here, `note`: what is worth a word."""
    chip = limits.chip(npu.chip)
    score, reason = _judged(npu, chip, against)
    if score and note:
        reason = f"{reason}; {note}"
    series = chip.series if chip else "of no series known here"
    kind = f"Ascend{npu.chip}, {series}" if npu.chip else "Ascend, chip unknown"
    return DeviceInfo.of(index=index, kind=kind, total=npu.total, free=npu.free, score=score, reason=reason)


def _judged(npu: Npu, chip: Chip | None, against: str | None) -> tuple[int, str]:
    """(score, why)."""
    if npu.against or not npu.chip:
        return 0, npu.against or UNNAMED
    if chip is not None and not chip.attention:
        return 0, f"the {chip.series} has no npu_fused_infer_attention_score: choose backend cpu"
    if against:
        return 0, against
    if chip is None:
        return limits.GENERIC, f"generic: it is in no table here, the limits of {_nearest().series} are taken for it"
    return limits.NATIVE, f"native, {chip.series}"


def chip_of(device: DeviceInfo) -> Chip:
    """The row of a device's chip, or that of the nearest one."""
    named = re.match(r"Ascend(\S+),", device.kind)
    return (limits.chip(named[1]) if named else None) or _nearest()


def _nearest() -> Chip:
    found = limits.chip(NEAREST)
    if found is None:
        raise BackendUnavailable(f"limits.toml has no row for the chip {NEAREST}: install pagedkv again")
    return found


def why_no_map(device: int, world: World, found: tuple[DeviceInfo, ...]) -> str | None:
    """One line unless each rank has a device of its own that can be used: rank r the r-th visible one."""
    if world.size == 1:
        return None
    if world.size > len(found):
        return (
            f"{world.size} ranks need {world.size} NPUs and {len(found)} are visible: set {environment.VISIBLE}, or "
            f"lower tensor_parallel_size to {len(found)}"
        )
    if device != world.rank:
        return (
            f"rank {world.rank} was given NPU {device}, and rank r takes the r-th visible NPU: choose others with "
            f"{environment.VISIBLE}, leave device unset"
        )
    unusable = next((one for one in found[: world.size] if not one.score), None)
    return None if unusable is None else f"NPU {unusable.index}, which rank {unusable.index} needs: {unusable.reason}"


def _none_of(found: tuple[DeviceInfo, ...]) -> str:
    return f"there is none, the last one is {found[-1].index}: choose with device=N"


def _unusable(kind: str, reason: str) -> DeviceInfo:
    return DeviceInfo.of(index=0, kind=kind, score=0, reason=reason)
