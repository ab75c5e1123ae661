"""What each backend says of itself, and which would be chosen: statuses of `probe_all`, read for a person.

A backend says what should be changed under the key `change` of its `diagnose()`, or under several that begin so
(`change clocks`), best with the command in backticks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagedkv.api import DeviceInfo
from pagedkv.config import show_bytes
from pagedkv.diagnosis.findings import Finding, command_in
from pagedkv.diagnosis.known import known
from pagedkv.diagnosis.torch import missing_file
from pagedkv.plugins import Status
from pagedkv.plugins.probing import selectable

CHANGE = "change"
FAILED = "diagnose"
"""Keys of `diagnose`: what a person should change, and why there is no diagnosis (a plugin that raised or hung)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What would be chosen and why; `named` is the name that was asked for, by whom stands in `why`."""

    backend: str | None
    why: str
    named: str | None

    def concerns(self, status: Status) -> bool:
        """Whether a person who made this choice must hear of the backend's troubles: with a name, of that one's."""
        return self.named is None or status.name.lower() == self.named


def backend_findings(statuses: Sequence[Status], choice: Choice, available: int | None) -> Iterator[Finding]:
    """Everything about backends. `available`: bytes of memory that this process can still get."""
    if choice.backend is None:
        yield _none(choice, statuses)
    told = choice.backend is None and choice.named is not None
    for status in filter(choice.concerns, statuses):
        yield from _said(status, choice)
        if not told:
            yield from _plugin(status)
            yield from (finding for device in status.devices for finding in _device(status, device, choice))
        if status.name == choice.backend:
            yield from (f for device in filter(selectable, status.devices) for f in _memory(status, device, available))


def _none(choice: Choice, statuses: Sequence[Status]) -> Finding:
    library = _library([reason for status in filter(choice.concerns, statuses) for reason in status.reasons])
    name = choice.named
    return Finding(
        level="broken",
        about="choice",
        what=f"backend {name} cannot be used" if name else "no backend can be used here",
        why=choice.why + (f"; {library[0]}" if library else ""),
        command=library[1] if library else command_in(choice.why) or _other(choice),
    )


def _other(choice: Choice) -> str:
    """Where no command is known: take back the choice where a variable made it, else look at what there is."""
    return "unset PAGEDKV_BACKEND" if "PAGEDKV_BACKEND" in choice.why else "pagedkv backends"


def _plugin(status: Status) -> Iterator[Finding]:
    """A plugin that does not work is worth a warning even where another backend is chosen: nobody installs it idly."""
    what = {"conflict": "is claimed twice", "timeout": "does not answer", "failed": "is broken"}.get(status.status)
    if what is None:
        return
    why = "; ".join(status.reasons)
    update = f"pip uninstall {status.distribution}" if status.status == "conflict" else _update(status)
    library = _library(status.reasons)
    yield Finding(
        level="warning",
        about="backends",
        what=f"backend {status.name} ({status.distribution} {status.version}) {what}",
        why=why + (f"; {library[0]}" if library else ""),
        command=library[1] if library else update,
    )


def _update(status: Status) -> str:
    return "pip install ." if status.distribution == "pagedkv" else f"pip install -U {status.distribution}"


def _library(texts: Sequence[str]) -> tuple[str, str] | None:
    """(why, command) of a library file that a message names and that is known."""
    file = missing_file(list(texts))
    library = known().library(file) if file else None
    return (f"{file}: {library.why}", library.command) if library else None


def _said(status: Status, choice: Choice) -> Iterator[Finding]:
    """What the backend itself wants changed, and a diagnosis that did not come."""
    for key, text in status.diagnose.items():
        if key == FAILED:
            what = f"backend {status.name} cannot be diagnosed"
            yield Finding(level="warning", about="backends", what=what, why=text, command=_update(status))
        elif key == CHANGE or key.startswith(f"{CHANGE} "):
            topic = key.removeprefix(CHANGE).strip()
            what = f"backend {status.name} advises a change" + (f" ({topic})" if topic else "")
            command = command_in(text) or _settle(status, choice)
            yield Finding(level="warning", about="backends", what=what, why=text, command=command)


def _device(status: Status, device: DeviceInfo, choice: Choice) -> Iterator[Finding]:
    """A device that is there, since its memory is known, and that cannot be used. An absent one is no trouble."""
    if selectable(device) or device.total is None:
        return
    yield Finding(
        level="warning",
        about="backends",
        what=f"{status.name}: device {device.index} ({device.kind}) cannot be used",
        why=device.reason,
        command=command_in(device.reason) or _settle(status, choice),
    )


def _settle(status: Status, choice: Choice) -> str:
    """Where no command is known: choosing the other backend by name, which settles the matter."""
    if choice.backend is not None and choice.backend != status.name:
        return f"export PAGEDKV_BACKEND={choice.backend}"
    return f"pagedkv doctor --backend {status.name}"


def _memory(status: Status, device: DeviceInfo, available: int | None) -> Iterator[Finding]:
    """Memory that the chosen backend cannot tell, that is gone, or that it sees less of than the system."""
    where = f"{status.name}: device {device.index}"
    size = 'pagedkv generate MODEL --kv-cache-memory 1GiB --prompt "..."'
    if device.free is None:
        yield Finding(
            level="warning" if status.score else "note",
            about="backends",
            what=f"{where} does not tell how much memory is free",
            why="then the cache cannot be sized: give it a size of its own",
            command=size,
        )
    elif device.free == 0:
        yield Finding(
            level="warning",
            about="backends",
            what=f"{where} says that none of its {show_bytes(device.total)} is free",
            why="other processes hold it, or the driver's answer is wrong: then give the cache a size of its own",
            command=size,
        )
    elif device.unified and available is not None and device.free < available // 2:
        yield Finding(
            level="warning",
            about="backends",
            what=f"{where} sees {show_bytes(device.free)} free where the system has {show_bytes(available)} available",
            why="its memory is the system's, and file caches, which the system gives back, may be counted as used",
            command=size,
        )


def shown(statuses: Sequence[Status], chosen: str | None) -> list[Status]:
    """Those whose diagnosis is worth a place on one screen: the chosen one, and any with a device."""
    present = [s for s in statuses if s.name == chosen or any(d.total is not None for d in s.devices)]
    return [status for status in present if status.diagnose]
