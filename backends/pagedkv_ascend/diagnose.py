"""What `pagedkv doctor` shows of this backend; keys that begin with "change" name what should be changed."""

from __future__ import annotations

from pathlib import Path

from pagedkv.api.errors import ConfigError
from pagedkv_ascend import devices, environment, packages

STATE = (
    "not run on hardware: calls were checked against the operators of three versions of torch-npu, results on an "
    "emulation, float32 operators written from the vendor's documents, which passes the kit. `pagedkv certify ascend` "
    "on an NPU tests all of it there"
)


def report(root: Path = devices.ROOT) -> dict[str, str]:
    """Versions, devices and variables of this machine."""
    said = {"state": STATE, "versions": _versions(), "CANN": _cann(), **_npus(root)}
    try:
        settings = environment.profile({}).settings
    except ConfigError as error:
        return {**said, "change variables": str(error)}
    shown = [f"{one.variable.name}={one.value} ({one.whose})" for one in settings if one.value]
    return {**said, "variables": ", ".join(shown)}


def _versions() -> str:
    installed = {name: packages.version(name) or "not installed" for name in ("torch", "torch-npu")}
    row = packages.known_set()
    if packages.version("torch-npu") is None:
        known = "no set to look up"
    elif row is None:
        known = "a set that is in no table here"
    else:
        known = f"{'calls checked' if row.state == 'schemas' else 'declared'}: {row.source}"
    return ", ".join(f"{name} {number}" for name, number in installed.items()) + f"; {known}"


def _cann() -> str:
    home, number = packages.cann_home(), packages.cann_version()
    if home is None:
        return "ASCEND_HOME_PATH is not set"
    return f"{number or 'of an unknown version'} in {home}"


def _npus(root: Path) -> dict[str, str]:
    if not devices.installed(root):
        return {"NPUs": "no driver of Ascend NPUs is installed"}
    try:
        found = devices.visible(devices.every(root))
    except (devices.DriverMissing, ValueError) as error:
        return {"NPUs": "none", "change": str(error)}
    listed = {"NPUs": "; ".join(_shown(rank, npu) for rank, npu in enumerate(found)) or "none visible"}
    against = packages.why_no_torch_npu() or packages.why_no_triton() or packages.why_no_cann(root)
    return {**listed, "change": against} if against and found else listed


def _shown(rank: int, npu: devices.Npu) -> str:
    memory = "memory unknown"
    if npu.total is not None and npu.free is not None:
        memory = f"{npu.free / 2**30:.1f} of {npu.total / 2**30:.1f} GiB free"
    return f"rank {rank}: NPU {npu.number}, Ascend{npu.chip}, {memory}"
