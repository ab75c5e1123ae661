"""Which NPUs there are, from the driver's library (DCMI) and its device nodes: no torch, no context on a device.

C interface: dcmi_interface_api.h of the driver. `ROOT` is the root of the file system, another one in tests.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv_ascend import environment

ROOT = Path("/")
LIBRARY = "libdcmi.so"
FOLDERS = ("usr/local/dcmi", "usr/local/Ascend/driver/lib64/driver", "usr/local/Ascend/driver/lib64")
MOST = 64
MB = 1 << 20


class DriverMissing(Exception):
    """The driver's library is not there or does not answer; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Npu:
    """One NPU by its logical number. `chip`: "910B3"; total, free: bytes of its memory, None where it does not tell."""

    number: int
    chip: str
    total: int | None = None
    free: int | None = None


class _Chip(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_ubyte * 32),
        ("name", ctypes.c_ubyte * 32),
        ("version", ctypes.c_ubyte * 32),
        ("cores", ctypes.c_uint),
    )


class _Memory(ctypes.Structure):
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
    tried = [str(root / folder / LIBRARY) for folder in FOLDERS]
    errors = []
    for name in (LIBRARY, *tried) if root == ROOT else tried:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            errors.append(str(error))
    raise DriverMissing(
        f"the driver's {LIBRARY} does not load ({errors[-1]}): install the NPU driver, look at npu-smi info"
    )


def every(root: Path = ROOT) -> list[Npu]:
    """Every NPU of the machine, by logical number. Raises `DriverMissing`."""
    loaded = library(root)
    _call(loaded, "dcmi_init")
    cards, count = (ctypes.c_int * MOST)(), ctypes.c_int()
    listing = "dcmi_get_card_list" if hasattr(loaded, "dcmi_get_card_list") else "dcmi_get_card_num_list"
    _call(loaded, listing, ctypes.byref(count), cards, MOST)
    found = [npu for card in cards[: max(0, min(count.value, MOST))] for npu in _of_card(loaded, card)]
    return sorted(found, key=lambda npu: npu.number)


def _of_card(loaded: Any, card: int) -> Iterator[Npu]:
    count = ctypes.c_int()
    _call(loaded, "dcmi_get_device_num_in_card", card, ctypes.byref(count))
    for device in range(max(0, count.value)):
        number, chip = ctypes.c_int(), _Chip()
        _call(loaded, "dcmi_get_device_logic_id", ctypes.byref(number), card, device)
        _call(loaded, "dcmi_get_device_chip_info", card, device, ctypes.byref(chip))
        total, free = _memory(loaded, card, device)
        yield Npu(number=number.value, chip=_text(chip.name), total=total, free=free)


def _memory(loaded: Any, card: int, device: int) -> tuple[int | None, int | None]:
    """(total, free) bytes; None where the driver does not tell, or tells nothing that can be."""
    memory = _Memory()
    try:
        _call(loaded, "dcmi_get_device_hbm_info", card, device, ctypes.byref(memory))
    except DriverMissing:
        return None, None
    if not memory.size:
        return None, None
    return memory.size * MB, max(0, memory.size - memory.usage) * MB


def _call(loaded: Any, name: str, *given: Any) -> None:
    function: Callable[..., int] | None = getattr(loaded, name, None)
    if function is None:
        raise DriverMissing(f"the driver's {LIBRARY} has no {name}: update the NPU driver")
    code = function(*given)
    if code != 0:
        raise DriverMissing(f"the driver answers {name} with {code}: look at npu-smi info")


def _text(chars: Any) -> str:
    return bytes(chars).split(b"\0")[0].decode("ascii", "replace").strip().removeprefix("Ascend").strip()


def visible(found: list[Npu]) -> list[Npu]:
    """Those that `ASCEND_RT_VISIBLE_DEVICES` leaves, in its order. Raises `ValueError` with what is wrong with it."""
    text = os.environ.get(environment.VISIBLE)
    if text is None:
        return found
    if reason := environment.why_not_devices(text):
        raise ValueError(f"{environment.VISIBLE}={text!r}: {reason}; unset it, or correct it")
    wanted = environment.listed(text) if text.strip() else []
    by_number = {npu.number: npu for npu in found}
    missing = [str(number) for number in wanted if number not in by_number]
    if missing:
        there = ", ".join(str(number) for number in sorted(by_number)) or "none"
        raise ValueError(
            f"{environment.VISIBLE}={text!r}: there is no NPU {', '.join(missing)}, there are {there}; unset it, or "
            "correct it"
        )
    return [by_number[number] for number in wanted]
