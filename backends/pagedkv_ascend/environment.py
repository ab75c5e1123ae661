"""The variables that torch-npu and CANN read: checked, set before their first use, and never in place of the user's."""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import re
import sys
from collections.abc import Mapping
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
YOURS, OURS, DEFAULT = "yours", "set by pagedkv", "default"
INTERFACES = re.compile(r"\^?=?[^\s,^=]+(,[^\s,^=]+)*")

_applied: dict[str, str] = {}
"""What this process has set for an option: not the user's, though it stands in the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One row of the table, or one key of the allocator's. `type`: int, number, word, text, or one that has a form.

    among, least, most: its range. `option`: the backend option that stands for it. `source`: where it is documented.
    """

    name: str
    type: str
    help: str = ""
    source: str = ""
    option: str = ""
    default: str = ""
    among: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    read_at_import: bool = False

    def why_not(self, text: str) -> str | None:
        """One line when the variable cannot have this value."""
        if self.type in _FORMS:
            return _FORMS[self.type](text)
        if self.type in ("int", "number"):
            return self._why_no_number(text)
        if self.among and text not in self.among:
            return f"it is {spell(self.among)}"
        return None

    def _why_no_number(self, text: str) -> str | None:
        number = _number(text, whole=self.type == "int")
        if number is None:
            return f"it is a {'whole ' if self.type == 'int' else ''}number"
        if self.among and text not in self.among:
            return f"it is {spell(self.among)}"
        if (self.least is None or number >= self.least) and (self.most is None or number <= self.most):
            return None
        return f"it is {self.least:g} or more" if self.most is None else f"it is {self.least:g} to {self.most:.12g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A variable's value and whose it is: `YOURS` by the environment, `OURS` by an option, `DEFAULT` of its reader."""

    variable: Variable
    value: str
    whose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Every variable of the table, checked."""

    settings: tuple[Setting, ...]

    def apply(self) -> None:
        """Set what options ask for, where the environment has nothing."""
        for one in self.settings:
            name = one.variable.name
            if one.whose != OURS or name in os.environ:
                continue
            if one.variable.read_at_import and "torch_npu" in sys.modules:
                _log.warning(
                    "%s=%s comes too late: torch-npu reads it when it is loaded, and it is loaded already; set it "
                    "before the process starts",
                    name,
                    one.value,
                )
            os.environ[name] = _applied[name] = one.value
            _log.info("%s=%s, set for the backend option %s", name, one.value, one.variable.option)


# -- the table ---------------------------------------------------------------------------------------------------------


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
    return tuple(map(_variable, table()["variable"]))


@functools.cache
def allocator_keys() -> dict[str, Variable]:
    """What the allocator's variable may hold, by key."""
    return {row["name"]: _variable(row) for row in table()["allocator"]["key"]}


def _variable(row: Mapping[str, Any]) -> Variable:
    plain = {name: value for name, value in row.items() if name not in ("among", "import")}
    return Variable(**plain, among=tuple(row.get("among", ())), read_at_import=row.get("import", False))


def options() -> tuple[Option, ...]:
    """The backend options that stand for variables; the variable's name is an alias."""
    return tuple(
        Option.of(
            name=one.option,
            type=int if one.type in ("int", "number") else str,
            default=None,
            help=f"{one.name}: {one.help}",
            aliases=(one.name,),
        )
        for one in variables()
        if one.option
    )


# -- what holds --------------------------------------------------------------------------------------------------------


def profile(given: Mapping[str, Any]) -> Profile:
    """The variables as they are and as options ask for. Raises `ConfigError` for a value that cannot be."""
    settings = tuple(_setting(one, given.get(one.option) if one.option else None) for one in variables())
    held = {one.variable.name: one.value for one in settings if one.whose != DEFAULT}
    for row in table()["apart"]:
        if all(held.get(name) == value if value else name in held for name, value in row["settings"].items()):
            raise ConfigError(f"{row['why']}: unset {list(row['settings'])[-1]}, or leave its option out")
    return Profile(settings=settings)


def _setting(variable: Variable, asked: Any) -> Setting:
    own = os.environ.get(variable.name)
    if own is not None:
        _check(variable, own, f"{variable.name}={own!r}", f"unset {variable.name}, or correct it")
    if asked is not None:
        _check(variable, str(asked), f"backend option {variable.option}={asked!r}", "correct it, or leave it out")
    if own is None:
        whose = DEFAULT if asked is None else OURS
        return Setting(variable=variable, value=variable.default if asked is None else str(asked), whose=whose)
    ours = _applied.get(variable.name) == own
    if asked is not None and own != str(asked):
        _log.warning(
            "%s=%s of %s stays, the backend option %s=%s is left aside: %s",
            variable.name,
            own,
            "an earlier backend in this process" if ours else "your environment",
            variable.option,
            asked,
            "start another process for it" if ours else f"unset {variable.name}, or leave the option out",
        )
    return Setting(variable=variable, value=own, whose=OURS if ours else YOURS)


def _check(variable: Variable, value: str, shown: str, way_out: str) -> None:
    if reason := variable.why_not(value):
        raise ConfigError(f"{shown}: {reason}; {way_out}")


def expandable_segments() -> bool:
    """Whether the allocator's settings turn expandable segments on."""
    return allocator(os.environ.get(ALLOCATOR, "")).get(EXPANDABLE) == "True"


def collectives_note(device: int) -> str:
    """What a failure of collectives is told with: the device, and the variables that shape how ranks meet."""
    said = [f"NPU {device}"]
    said += [f"{name}={os.environ.get(name, 'not set')}" for name in COLLECTIVES]
    return ", ".join(said)


def connect_timeout() -> float | None:
    """Seconds that the environment gives ranks to meet; None where it does not say."""
    return _number(os.environ.get("HCCL_CONNECT_TIMEOUT", ""), whole=True)


# -- the types that have a form ----------------------------------------------------------------------------------------


def spell(words: tuple[str, ...]) -> str:
    """ "0, 1 or 2"."""
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _number(text: str, *, whole: bool) -> float | None:
    form = r"-?\d+" if whole else r"-?\d+(\.\d+)?"
    return float(text) if re.fullmatch(form, text, re.ASCII) else None


def listed(text: str) -> list[int]:
    """The devices of a list "0,1,3". Raises `ValueError` for an item that is none."""
    for item in text.split(","):
        if not re.fullmatch(r"\d+", item, re.ASCII):
            raise ValueError(repr(item) if item else "an empty item")
    return [int(item) for item in text.split(",")]


def why_not_devices(text: str) -> str | None:
    """One line when a list of devices cannot be; CANN reads up to the first thing it cannot, and says nothing.

    Source: the page of ASCEND_RT_VISIBLE_DEVICES in CANN's documents: numbers and commas alone, ascending.
    """
    if not text:
        return "it names no NPU"
    try:
        found = listed(text)
    except ValueError as error:
        return f"{error} is no number of an NPU, it is a list like 0,1,3 without blanks or ranges"
    twice = sorted({one for one in found if found.count(one) > 1})
    if twice:
        return f"it names {', '.join(map(str, twice))} twice, each rank needs an NPU of its own"
    if found != sorted(found):
        return "its numbers must ascend, CANN knows no other order"
    return None


def allocator(text: str) -> dict[str, str]:
    """The allocator's settings, key by key; a value in brackets may hold commas."""
    pairs = (item.partition(":") for item in re.split(r",(?![^\[]*\])", text) if item.strip())
    return {key.strip(): value.strip() for key, _, value in pairs}


def why_not_allocator(text: str) -> str | None:
    """One line when the allocator's settings cannot be."""
    found, known = allocator(text), allocator_keys()
    if unknown := [key for key in found if key not in known]:
        return f"torch-npu's allocator has no setting {', '.join(unknown)}, its settings are {', '.join(known)}"
    for key, value in found.items():
        if reason := known[key].why_not(value) if value else f"write {key}:VALUE":
            return f"{key}:{value}: {reason}" if value else f"{key} has no value, {reason}"
    excluded = [key for key in table()["allocator"]["excluded"] if key in found]
    if found.get(EXPANDABLE) == "True" and excluded:
        return f"{EXPANDABLE}:True excludes {', '.join(excluded)}"
    return None


def _why_no_address(text: str) -> str | None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return "it is an IP address of this machine"
    return None


def _why_no_interfaces(text: str) -> str | None:
    if INTERFACES.fullmatch(text):
        return None
    return "it is beginnings of network interfaces, eth,enp; names behind =; behind ^ those that are left out"


_FORMS = {
    "devices": why_not_devices,
    "allocator": why_not_allocator,
    "address": _why_no_address,
    "interfaces": _why_no_interfaces,
}
