"""Devices that can be planned for although they are not here: a table of published figures, as data."""

from __future__ import annotations

import difflib
import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from pagedkv.api import DeviceInfo, MemoryInfo
from pagedkv.api.errors import ConfigError
from pagedkv.config import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One row of devices.toml. Bytes; bandwidth in bytes a second; peak in operations a second by dtype.

    `taken`: what is assumed to be in use before the engine starts; `reserve`: what a budget of shared memory leaves the
    host; `block_size`: what its backend prefers, used while that backend is not installed and cannot be asked; `note`:
    what a plan for it should say besides.
    """

    name: str
    title: str
    aliases: tuple[str, ...]
    backend: str
    kind: str
    memory: int
    taken: int
    bandwidth: float
    peak: Mapping[str, float]
    source: str
    unified: bool = False
    fraction: float | None = None
    reserve: int | None = None
    block_size: int = 16
    note: str = ""

    @property
    def info(self) -> DeviceInfo:
        """The device as its backend's probe would see it."""
        return DeviceInfo(index=0, kind=self.kind, total=self.memory, free=self.memory, unified=self.unified, score=80)

    @property
    def free_memory(self) -> MemoryInfo:
        """Its memory before the engine starts."""
        return MemoryInfo(free=self.memory - self.taken, total=self.memory, unified=self.unified)


@functools.cache
def read_data(name: str) -> Mapping[str, Any]:
    """One of this package's data files."""
    text = files("pagedkv.planning").joinpath(name).read_text(encoding="utf-8")
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


@functools.cache
def devices() -> tuple[Device, ...]:
    """The table, in its own order."""
    data = read_data("devices.toml")
    return tuple(_device(row, data["assumed"], data["reserve"]) for row in data["device"])


def _device(row: Mapping[str, Any], assumed: Mapping[str, Any], reserve: Mapping[str, Any]) -> Device:
    memory = parse_bytes(row["memory"], "memory")
    board, unified = parse_bytes(assumed["board"], "board"), bool(row.get("unified"))
    fields = {
        "aliases": tuple(row.get("aliases", ())),
        "memory": memory,
        "taken": min(board, memory // 2) if unified else int(assumed["card"] * memory),
        "reserve": max(parse_bytes(reserve["least"], "least"), memory // reserve["part"]) if unified else None,
        "bandwidth": row["bandwidth"] * 1e9,
        "peak": {dtype: rate * 1e12 for dtype, rate in row["peak"].items()},
    }
    return Device(**{**row, **fields})


def known_device(name: str) -> Device | None:
    """The device of this name, case and punctuation aside."""
    return _by_name().get(_plain(name))


def find_device(name: str) -> Device:
    """The same. Raises `ConfigError` with the nearest ones."""
    names = _by_name()
    if (found := known_device(name)) is not None:
        return found
    close = difflib.get_close_matches(_plain(name), names, n=3, cutoff=0.5)
    nearest = dict.fromkeys(names[match].name for match in close)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"known are {', '.join(d.name for d in devices())}."
    raise ConfigError(
        f"there are no figures for a device {name!r}; {hint} For any other give its memory (--memory 24GiB), for this "
        "machine's processor cpu"
    )


def _by_name() -> Mapping[str, Device]:
    return {_plain(known): device for device in devices() for known in _names(device)}


def _names(device: Device) -> tuple[str, ...]:
    return (device.name, device.title, device.name.removeprefix("rtx-"), *device.aliases)


def _plain(name: str) -> str:
    makers = "|".join(read_data("devices.toml")["makers"])
    return re.sub(rf"[^a-z0-9]|{makers}", "", name.lower())
