"""The variables that torch-npu and CANN read: checked, set before their first use, and never in place of the user's."""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.api import Option
from pagedkv.api.errors import ConfigError

_log = logging.getLogger("pagedkv.backends.ascend")

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"
EXPANDABLE = "expandable_segments"
COLLECTIVES = ("HCCL_IF_IP", "HCCL_SOCKET_IFNAME", "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", VISIBLE)
"""What shapes how ranks meet, and so is named where they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One row of the table. `type`: int, word, text, address, devices or allocator; among, least, most: its range."""

    name: str
    type: str
    help: str
    option: str = ""
    default: str = ""
    among: tuple[Any, ...] = ()
    least: int | None = None
    most: int | None = None
    read_at_import: bool = False

    def why_not(self, text: str) -> str | None:
        """One line when the variable cannot have this value."""
        if self.type == "devices":
            return why_not_devices(text)
        if self.type == "allocator":
            return why_not_allocator(text)
        if self.type == "address":
            return _why_no_address(text)
        if self.type == "int":
            return self._why_no_number(text)
        if self.among and text not in self.among:
            return f"it is one of {', '.join(self.among)}"
        return None

    def _why_no_number(self, text: str) -> str | None:
        if not text.strip().lstrip("-").isdigit():
            return "it is a whole number"
        number = int(text)
        if self.among and number not in self.among:
            return f"it is one of {', '.join(map(str, self.among))}"
        if self.least is not None and self.most is not None and not self.least <= number <= self.most:
            return f"it is {self.least} to {self.most}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A variable's value and whose it is: "yours" in the environment, "pagedkv" by an option, "default"."""

    variable: Variable
    value: str
    whose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Every variable of the table, checked."""

    settings: tuple[Setting, ...]

    def apply(self) -> None:
        """Set what options ask for, where the user's environment has nothing."""
        for one in self.settings:
            if one.whose != "pagedkv":
                continue
            if one.variable.read_at_import and "torch_npu" in sys.modules:
                _log.warning(
                    "%s=%s comes too late: torch-npu reads it when it is loaded, and something else has loaded it; set "
                    "it before the process starts",
                    one.variable.name,
                    one.value,
                )
            os.environ[one.variable.name] = one.value
            _log.info("%s=%s, from %s", one.variable.name, one.value, one.variable.option)


@functools.cache
def table() -> dict[str, Any]:
    """variables.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(Path(__file__).with_name("variables.toml").read_text("utf-8"))


@functools.cache
def variables() -> tuple[Variable, ...]:
    """Every row of the table."""
    return tuple(_variable(dict(row)) for row in table()["variable"])


def _variable(row: dict[str, Any]) -> Variable:
    at_import = row.pop("import", False)
    return Variable(**{**row, "among": tuple(row.get("among", ())), "read_at_import": at_import})


def options() -> tuple[Option, ...]:
    """The backend options that stand for variables; the variable's name is an alias."""
    return tuple(
        Option.of(
            name=one.option,
            type=int if one.type == "int" else str,
            default=None,
            help=f"{one.name}: {one.help}",
            aliases=(one.name,),
        )
        for one in variables()
        if one.option
    )


def profile(given: Mapping[str, Any]) -> Profile:
    """The variables as they are and as options ask for. Raises `ConfigError` for a value that cannot be."""
    return Profile(settings=tuple(_setting(one, given.get(one.option) if one.option else None) for one in variables()))


def _setting(variable: Variable, asked: Any) -> Setting:
    own = os.environ.get(variable.name)
    if own is not None:
        _check(variable, own, f"{variable.name}={own!r}", f"unset {variable.name}, or correct it")
    if asked is not None:
        _check(variable, str(asked), f"backend option {variable.option}={asked!r}", "correct it, or leave it out")
    if own is not None and asked is not None and own != str(asked):
        _log.warning(
            "%s=%s of your environment stays, the backend option %s=%s is left aside: unset the one or leave the other "
            "out",
            variable.name,
            own,
            variable.option,
            asked,
        )
    if own is not None:
        return Setting(variable=variable, value=own, whose="yours")
    if asked is not None:
        return Setting(variable=variable, value=str(asked), whose="pagedkv")
    return Setting(variable=variable, value=variable.default, whose="default")


def _check(variable: Variable, value: str, shown: str, way_out: str) -> None:
    if reason := variable.why_not(value):
        raise ConfigError(f"{shown}: {reason}; {way_out}")


# -- the types that have a form ----------------------------------------------------------------------------------------


def listed(text: str) -> list[int]:
    """The devices of a list "0,1,3" or with ranges "0-3". Raises `ValueError` for what is none."""
    found: list[int] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{item.strip() or 'an empty item'!s} is no device number")
        found += range(int(first), int(last if dash else first) + 1)
    return found


def why_not_devices(text: str) -> str | None:
    """One line when a list of devices cannot be."""
    if not text.strip():
        return None
    try:
        found = listed(text)
    except ValueError as error:
        return f"{error}, it is numbers with commas between, as 0,1"
    twice = sorted({one for one in found if found.count(one) > 1})
    return f"it names {', '.join(map(str, twice))} twice, each rank needs a device of its own" if twice else None


def allocator(text: str) -> dict[str, str]:
    """The allocator's settings, key by key."""
    pairs = (item.partition(":") for item in text.split(",") if item.strip())
    return {key.strip(): value.strip() for key, _, value in pairs}


def why_not_allocator(text: str) -> str | None:
    """One line when the allocator's settings cannot be."""
    found = allocator(text)
    known: Sequence[str] = table()["allocator"]["keys"]
    unknown = [key for key in found if key not in known]
    if unknown or not all(found.values()):
        return f"{', '.join(unknown) or text!s} is no key:value of torch-npu's; it knows {', '.join(known)}"
    excluded = [key for key in table()["allocator"]["excluded"] if key in found]
    if found.get(EXPANDABLE, "").lower() == "true" and excluded:
        return f"{EXPANDABLE}:True excludes {', '.join(excluded)}"
    return None


def _why_no_address(text: str) -> str | None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return "it is an IP address of this machine"
    return None


def expandable_segments() -> bool:
    """Whether the user's allocator settings turn expandable segments on."""
    return allocator(os.environ.get(ALLOCATOR, "")).get(EXPANDABLE, "").lower() == "true"


def collectives_note(device: int) -> str:
    """What a failure of collectives is told with: the device, and the variables that shape how ranks meet."""
    said = [f"NPU {device}"]
    said += [f"{name}={os.environ.get(name, 'not set')}" for name in COLLECTIVES]
    return ", ".join(said)


def connect_timeout() -> float | None:
    """Seconds that the user gives ranks to meet; None where the environment does not say."""
    text = os.environ.get("HCCL_CONNECT_TIMEOUT", "")
    return float(text) if text.isdigit() else None
