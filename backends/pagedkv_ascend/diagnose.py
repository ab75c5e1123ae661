"""What `pagedkv doctor` shows of this backend; keys that begin with "change" name what should be changed."""

from __future__ import annotations

from pathlib import Path

from pagedkv.api.errors import ConfigError
from pagedkv_ascend import devices, environment, limits, packages

STATE = (
    "not run on hardware: calls were checked against the operators of three versions of torch-npu, results on an "
    "emulation, float32 operators written from the vendor's documents, which passes the kit. `pagedkv certify ascend` "
    "on an NPU tests all of it there"
)


def report(root: Path = devices.ROOT) -> dict[str, str]:
    """Versions, devices and variables of this machine."""
    return {"state": STATE, **_versions(), "CANN": _cann(), **_npus(root), **_variables()}


def _versions() -> dict[str, str]:
    names = ("torch", "torch-npu")
    installed = ", ".join(f"{name} {packages.version(name) or 'not installed'}" for name in names)
    said = {"versions": f"{installed}; {packages.set_line()}"}
    if other := packages.why_not_this_set():
        said["change versions"] = other
    return said


def _cann() -> str:
    home = packages.cann_home()
    if home is None:
        return "ASCEND_HOME_PATH is not set"
    return f"{packages.cann_version() or 'of an unknown version'} in {home}"


def _npus(root: Path) -> dict[str, str]:
    if not devices.installed(root):
        return {"NPUs": "no driver of Ascend NPUs is installed"}
    try:
        every = devices.every(root)
    except devices.DriverMissing as error:
        return {"NPUs": "the driver does not answer", "change driver": str(error)}
    said = {f"NPU {_number(place, npu)}": _about(npu) for place, npu in enumerate(every)}
    said = said or {"NPUs": "the driver lists none"}
    try:
        ranks = enumerate(devices.visible(every))
        said["ranks"] = ", ".join(f"{rank}: NPU {_number(rank, npu)}" for rank, npu in ranks) or "none"
    except ValueError as error:
        return {**said, "change devices": str(error)}
    against = packages.against(root)
    return {**said, "change": against} if against and every else said


def _number(place: int, npu: devices.Npu) -> str:
    return f"without a number, {place + 1} in the list" if npu.number is None else str(npu.number)


def _about(npu: devices.Npu) -> str:
    if npu.against:
        return npu.against
    chip = limits.chip(npu.chip)
    memory = "memory unknown"
    if npu.total is not None and npu.free is not None:
        memory = f"{npu.free / 2**30:.1f} GiB free of {npu.total / 2**30:.1f} GiB"
    return f"Ascend{npu.chip}, {chip.series if chip else 'of no series known here'}, {memory}"


def _variables() -> dict[str, str]:
    try:
        settings = environment.profile({}).settings
    except ConfigError as error:
        return {"change variables": str(error)}
    shown = (f"{one.variable.name}={one.value} ({one.whose})" for one in settings if one.value)
    return {"variables": ", ".join(shown)}
