"""Chooses one backend: the argument, then `PAGEDKV_BACKEND`, then the best that is there, by (score, name)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagedkv.api import Capabilities, Descriptor, DeviceInfo
from pagedkv.api.errors import BackendError, BackendLoadError, BackendNotFound, BackendUnavailable, ConfigError
from pagedkv.environment import check_environment
from pagedkv.plugins.discovery import Found, canonical, discover, find, not_found
from pagedkv.plugins.loading import described, load, probed
from pagedkv.plugins.probing import PROBE_LIMIT, Status, best, device_reasons, probe_all, selectable

AUTO = "auto"

_log = logging.getLogger("pagedkv.plugins")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a worker process must load to have its parent's backend. Small, and can be pickled.

    `device` is an index of the backend's `probe`; a worker with a device of its own replaces it.
    """

    name: str
    distribution: str
    version: str
    device: int

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The chosen backend, loaded but not created. Its `identity` is what workers get, for `reselect`."""

    descriptor: Descriptor
    name: str
    distribution: str
    version: str
    device: DeviceInfo
    why: str
    explicit: bool

    @property
    def identity(self) -> Identity:
        """Which plugin and device this is, for another process."""
        return Identity(name=self.name, distribution=self.distribution, version=self.version, device=self.device.index)

    @property
    def found(self) -> Found:
        """Whom an error names."""
        return Found(name=self.name, distribution=self.distribution, version=self.version, target="")


def select(backend: str | None = None, *, device: int | None = None) -> Selected:
    """Choose and load one backend: the argument, else `PAGEDKV_BACKEND`, else the best that is there.

    `device` is an index of the backend's `probe`; None takes its best one. An explicit name (any case, blanks around
    it ignored) gives that backend or raises `BackendNotFound`, `BackendLoadError`, `BackendVersionError` or
    `BackendUnavailable` with every reason. The automatic choice logs the whole table.
    """
    check_environment()
    name, why = requested(backend)
    if device is not None and (type(device) is not int or device < 0):
        raise ConfigError(f"device must be a whole number from 0 on, or None for the best one, not {device!r}")
    chosen = _automatic(device) if name is None else _explicit(find(name), why, device)
    _log.info("backend %s on device %d (%s): %s", chosen.name, chosen.device.index, chosen.device.kind, chosen.why)
    return chosen


def reselect(identity: Identity) -> Selected:
    """Load exactly the backend that another process chose: what a worker calls; nothing is chosen or detected again.

    Raises `BackendNotFound` when this process has no such backend, `BackendLoadError` when it comes from another
    distribution or version, and otherwise what `select` raises for an explicit choice.
    """
    found = next((f for f in discover() if f.name == identity.name), None)
    if found is None:
        raise _unknown_to_workers(identity)
    theirs = (canonical(identity.distribution), identity.version)
    if not found.conflicts and (canonical(found.distribution), found.version) != theirs:
        raise BackendLoadError(
            f"this worker process has {found}, its parent process uses backend {identity}; let both see the same "
            "installation (same interpreter, same PYTHONPATH)",
            distribution=found.distribution,
            version=found.version,
        )
    return _explicit(found, "chosen by the parent process", identity.device)


def _unknown_to_workers(identity: Identity) -> BackendNotFound:
    known = [found.name for found in discover() if not found.conflicts]
    return BackendNotFound(
        f"backend {identity}, chosen by the parent process, is not installed in this worker process: a backend that is "
        "registered only inside the parent process is unknown to its workers; install it as a distribution (pip "
        f"install) where every worker finds it; installed here: {', '.join(map(repr, known)) or 'none'}",
        name=identity.name,
        known=known,
    )


def offer(selected: Selected) -> Capabilities:
    """The most that the selected device may declare, checked. Raises `BackendLoadError`."""
    return described(selected.found, selected.descriptor, selected.device)


def requested(backend: str | None = None) -> tuple[str | None, str]:
    """(name or None for automatic, who asked for it), from the argument and `PAGEDKV_BACKEND`."""
    if backend is not None and not isinstance(backend, str):
        raise ConfigError(f"backend must be a name such as 'cpu', or None for the best one, not {backend!r}")
    argument = (backend or "").strip().lower()
    variable = os.environ.get("PAGEDKV_BACKEND", "").strip().lower()
    name = argument or variable
    if argument and variable and argument != variable:
        why = f"chosen by argument, which comes before PAGEDKV_BACKEND={variable}"
    else:
        why = "chosen by argument" if argument else "chosen by PAGEDKV_BACKEND"
    return (None, "automatic") if name in ("", AUTO) else (name, why)


def _explicit(found: Found, why: str, device: int | None) -> Selected:
    descriptor = load(found)
    devices = probed(found, descriptor, PROBE_LIMIT)
    usable = [d for d in devices if selectable(d) and device in (None, d.index)]
    if not usable:
        raise BackendUnavailable(f"{found}, {why}, cannot be used: {_why_not(devices, device)}")
    return _selected(found, descriptor, best(usable), why, True)


def _why_not(devices: Sequence[DeviceInfo], device: int | None) -> str:
    if device is not None and all(d.index != device for d in devices):
        there = ", ".join(str(d.index) for d in devices) or "none"
        return f"there is no device {device}; its devices: {there}"
    return "; ".join(device_reasons([d for d in devices if device in (None, d.index)]))


def _automatic(device: int | None) -> Selected:
    statuses = probe_all()
    order = rank(statuses, device)
    _log_table(statuses, order)
    for status in order:
        try:
            found = find(status.name)
            usable = [d for d in status.devices if d.score > 0 and device in (None, d.index)]
            return _selected(found, load(found), best(usable), _why(order, status), False)
        except BackendError as error:
            # Its probe worked in a child a moment ago; it is out, the next one's turn is logged like any choice.
            _log.warning("%s is left out of the automatic choice: %s", status.name, error)
    raise BackendUnavailable(f"no backend can be used here: {_every_reason(statuses, device)}")


def rank(statuses: Iterable[Status], device: int | None = None) -> list[Status]:
    """What the automatic choice may take, best first: by score, equal scores by name."""

    def score(status: Status) -> int:
        return max((d.score for d in status.devices if device in (None, d.index)), default=0)

    usable = [status for status in statuses if status.status == "ok" and score(status) > 0]
    return sorted(usable, key=lambda status: (-score(status), status.name))


def preview(statuses: Sequence[Status], backend: str | None = None) -> tuple[str | None, str]:
    """(name that `select` would choose or None, why), from probes alone: nothing is loaded."""
    name, why = requested(backend)
    if name is None:
        order = rank(statuses)
        return (order[0].name, _why(order, order[0])) if order else (None, _every_reason(statuses))
    status = next((s for s in statuses if s.name.lower() == name), None)
    if status is None:
        known = [s.name for s in statuses if s.status != "conflict"]
        return None, f"{why}: {not_found(name, known)}"
    return (status.name, why) if status.status == "ok" else (None, f"{why}: {'; '.join(status.reasons)}")


def _why(order: Sequence[Status], chosen: Status) -> str:
    scores = {status.name: status.score for status in order}
    equal = [name for name, score in scores.items() if score == chosen.score and name != chosen.name]
    tie = f", first by name among equals ({', '.join(equal)}; PAGEDKV_BACKEND chooses another)" if equal else ""
    return f"automatic choice, score {chosen.score}{tie}"


def _every_reason(statuses: Iterable[Status], device: int | None = None) -> str:
    lines = [f"{s.name}: {'; '.join(s.reasons) or f'it has no device {device}'}" for s in statuses]
    return " | ".join(lines) or "none is installed; install pagedkv again, it brings one"


def _log_table(statuses: Iterable[Status], order: Sequence[Status]) -> None:
    for status in order:
        kinds = ", ".join(device.kind for device in status.devices if device.score > 0)
        verdict = "best" if status is order[0] else f"after {order[0].name}"
        _log.info("backend %s (%s %s): score %d, %s: %s", *_who(status), status.score, kinds, verdict)
    for status in statuses:
        if status not in order:
            level = logging.INFO if status.status in ("ok", "unavailable") else logging.WARNING
            _log.log(level, "backend %s (%s %s): %s: %s", *_who(status), status.status, "; ".join(status.reasons))


def _who(status: Status) -> tuple[str, str, str]:
    return status.name, status.distribution, status.version


def _selected(found: Found, descriptor: Descriptor, device: DeviceInfo, why: str, explicit: bool) -> Selected:
    return Selected(
        descriptor=descriptor,
        name=found.name,
        distribution=found.distribution,
        version=found.version,
        device=device,
        why=why,
        explicit=explicit,
    )
