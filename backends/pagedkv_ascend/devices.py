"""Which NPUs there are, from the driver's library (DCMI) and its device nodes: no torch, no context on a device.

C interface: dcmi_interface_api.h of the driver. `ROOT` is the root of the file system, another one in tests.

DCMI's list, by logical number ── ASCEND_RT_VISIBLE_DEVICES ──> what is numbered 0, 1, ... here and by torch-npu
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv_ascend import environment

ROOT = Path("/")
LIBRARY = "libdcmi.so"
FOLDERS = ("usr/local/dcmi", "usr/local/Ascend/driver/lib64/driver", "usr/local/Ascend/driver/lib64")
MOST = 64
"""Cards that the list has room for; a machine has sixteen at most."""
MB = 1 << 20
LOOK = "look at npu-smi info"
REFUSALS = {
    -8002: ("not permitted", "run as root or as a member of the driver's group, HwHiAiUser"),
    -8008: ("no such device", "start the container with the NPUs in it, --device /dev/davinci0 and so on"),
    -8009: ("no answer of the device", "start the container with /dev/davinci_manager in it, or reset the NPU"),
    -8012: ("not ready", "wait until the NPU has started"),
    -8013: ("not in a container", "ask for it outside"),
    -8255: ("not supported", "update the NPU driver"),
}
"""What DCMI's return codes mean, and what to do; of any other, the number is said."""


class DriverMissing(Exception):
    """The driver's library is not there or does not answer; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Npu:
    """One NPU. `number`: its logical number, None where the driver does not tell; `chip`: "910B3".

    total, free: bytes of its memory, None where the driver does not tell. `against`: why the driver cannot use it.
    """

    number: int | None
    chip: str = ""
    total: int | None = None
    free: int | None = None
    against: str = ""


class _Chip(ctypes.Structure):
    """struct dcmi_chip_info_v2, which begins as dcmi_chip_info and adds `npu_name`."""

    _fields_ = (
        ("kind", ctypes.c_ubyte * 32),
        ("name", ctypes.c_ubyte * 32),
        ("version", ctypes.c_ubyte * 32),
        ("cores", ctypes.c_uint),
        ("npu_name", ctypes.c_ubyte * 32),
    )


class _Memory(ctypes.Structure):
    """struct dcmi_hbm_info; size and usage in MB."""

    _fields_ = (
        ("size", ctypes.c_ulonglong),
        ("frequency", ctypes.c_uint),
        ("usage", ctypes.c_ulonglong),
        ("temperature", ctypes.c_int),
        ("bandwidth", ctypes.c_uint),
    )


def nodes(root: Path = ROOT) -> list[int]:
    """The numbers of the device nodes that this process sees, /dev/davinci0 and so on."""
    found = (path.name.removeprefix("davinci") for path in (root / "dev").glob("davinci[0-9]*"))
    return sorted(int(number) for number in found if number.isdigit())


def installed(root: Path = ROOT) -> bool:
    """Whether there is any sign of a driver."""
    return bool(nodes(root)) or (root / "dev/davinci_manager").exists() or any((root / f).exists() for f in FOLDERS)


def library(root: Path = ROOT) -> Any:
    """The driver's library, loaded. Raises `DriverMissing`."""
    there = [str(path) for path in (root / folder / LIBRARY for folder in FOLDERS) if path.exists()]
    errors = []
    for name in (LIBRARY, *there) if root == ROOT or not there else there:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            errors.append(str(error))
    raise DriverMissing(
        f"the NPU driver's library does not load ({errors[-1]}): install the driver, or start the container with "
        "/usr/local/dcmi and /usr/local/Ascend/driver in it"
    )


# -- the list ----------------------------------------------------------------------------------------------------------


def every(root: Path = ROOT) -> list[Npu]:
    """Every NPU of the machine, by logical number, those without one last. Raises `DriverMissing`."""
    loaded = library(root)
    _call(loaded, "dcmi_init")
    cards, count = (ctypes.c_int * MOST)(), ctypes.c_int()
    listing = "dcmi_get_card_list" if hasattr(loaded, "dcmi_get_card_list") else "dcmi_get_card_num_list"
    _call(loaded, listing, ctypes.byref(count), cards, MOST)
    found = [npu for card in cards[: max(0, min(count.value, MOST))] for npu in _of_card(loaded, card)]
    return sorted(_distinct(found), key=lambda npu: (npu.number is None, npu.number or 0))


def _distinct(found: list[Npu]) -> Iterator[Npu]:
    """The same, none with another's number."""
    seen: set[int | None] = {None}
    for npu in found:
        if npu.number is not None and (npu.number in seen or npu.number < 0):
            yield Npu(number=None, against=f"the driver gives it number {npu.number}, which cannot be its own: {LOOK}")
        else:
            yield npu
        seen.add(npu.number)


def _of_card(loaded: Any, card: int) -> Iterator[Npu]:
    count = ctypes.c_int()
    try:
        _call(loaded, "dcmi_get_device_num_in_card", card, ctypes.byref(count))
    except DriverMissing as error:
        yield Npu(number=None, against=f"card {card}: {error}")
        return
    for device in range(max(0, count.value)):
        yield _npu(loaded, card, device)


def _npu(loaded: Any, card: int, device: int) -> Npu:
    number = ctypes.c_int()
    try:
        _call(loaded, "dcmi_get_device_logic_id", ctypes.byref(number), card, device)
    except DriverMissing as error:
        return Npu(number=None, against=f"card {card}, device {device}: {error}")
    try:
        chip = _chip(loaded, card, device)
    except DriverMissing as error:
        return Npu(number=number.value, against=str(error))
    total, free = _memory(loaded, card, device)
    return Npu(number=number.value, chip=chip, total=total, free=free)


def _chip(loaded: Any, card: int, device: int) -> str:
    """ "910B3"; of Atlas A3, whose chip is called 910 alone, with the NPU's own name behind, "910_9392".

    Source: the pages on --soc_version in CANN's documents.
    """
    chip = _Chip()
    try:
        _call(loaded, "dcmi_get_device_chip_info_v2", card, device, ctypes.byref(chip))
    except DriverMissing:  # drivers before 24.1 have the first version alone
        _call(loaded, "dcmi_get_device_chip_info", card, device, ctypes.byref(chip))
    name, npu = _text(chip.name), _text(chip.npu_name)
    if npu in ("", "NA") or npu.startswith(name):
        return npu if npu.startswith(name) and name else name
    return f"{name}_{npu}"


def _memory(loaded: Any, card: int, device: int) -> tuple[int | None, int | None]:
    """(total, free) bytes; None where the driver does not tell, or tells zero. Others' share is in the usage once."""
    memory = _Memory()
    try:
        _call(loaded, "dcmi_get_device_hbm_info", card, device, ctypes.byref(memory))
    except DriverMissing:
        return None, None
    if not memory.size:
        return None, None
    return memory.size * MB, max(0, memory.size - memory.usage) * MB


def _call(loaded: Any, name: str, *given: Any) -> None:
    function = getattr(loaded, name, None)
    if function is None:
        raise DriverMissing(f"the driver's {LIBRARY} has no {name}: update the NPU driver")
    code = function(*given)
    if code != 0:
        meaning, way_out = REFUSALS.get(code, ("", LOOK))
        said = f"{code}, {meaning}" if meaning else str(code)
        raise DriverMissing(f"the driver answers {name} with {said}: {way_out}")


def _text(chars: Any) -> str:
    return bytes(chars).split(b"\0")[0].decode("ascii", "replace").strip().removeprefix("Ascend").strip()


# -- what of it this process sees --------------------------------------------------------------------------------------


def visible(found: list[Npu]) -> list[Npu]:
    """Those that `ASCEND_RT_VISIBLE_DEVICES` leaves. Raises `ValueError` with what is wrong with it."""
    text = os.environ.get(environment.VISIBLE)
    if text is None:
        return found
    by_number = {npu.number: npu for npu in found if npu.number is not None}
    if reason := environment.why_not_devices(text) or _why_not_there(text, sorted(by_number)):
        raise ValueError(f"{environment.VISIBLE}={text!r}: {reason}; unset {environment.VISIBLE}, or correct it")
    return [by_number[number] for number in environment.listed(text)]


def _why_not_there(text: str, there: list[int]) -> str | None:
    missing = [str(number) for number in environment.listed(text) if number not in there]
    if not missing:
        return None
    return f"there is no NPU {', '.join(missing)}, there {_are(there)}"


def _are(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers)) or "none"
    return f"are {listed}" if len(numbers) != 1 else f"is {listed}"
