"""Asks plugins what devices they see, each in a child process, so that this process imports only the chosen one.

`ready` comes once pagedkv's own imports are done, so that the plugin's time limit measures the plugin.

    parent                     child
      starts it  ------------>  imports pagedkv.plugins
                 <------------  {"ready": true}
                 <------------  {"probe": {...}}       within the limit, else "timeout" and its process group is killed
                 <------------  {"diagnose": {...}}    only when asked for
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from pagedkv.api import Capabilities, Descriptor, DeviceInfo
from pagedkv.api.errors import PagedKVError
from pagedkv.plugins.checks import is_version
from pagedkv.plugins.child import Child, open_channel
from pagedkv.plugins.discovery import Found, conflict_text, discover, find
from pagedkv.plugins.loading import blamed, checked_descriptor, described, import_target, probed

PROBE_LIMIT = 2.0
"""Seconds that a plugin's import and `probe()` may take before it counts as hanging."""

State = Literal["ok", "unavailable", "failed", "conflict", "timeout"]

START_LIMIT = 20.0
"""Seconds that the interpreter and pagedkv's own imports may take on a loaded machine."""

DIAGNOSE_LIMIT = 10.0
"""Seconds that `diagnose()` may take; only `doctor` asks for it."""

AT_ONCE = max(4, os.cpu_count() or 1)
"""Probes that run at the same time: with many plugins on few cores, one's limit must not count the others' imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One backend as the listing shows it. `score` is its best device's; `capabilities` has one entry a device.

    "ok": usable. "unavailable": the plugin works, no device does. "failed": the plugin is broken. "conflict": two
    distributions claim the name. "timeout": it did not answer in time. `reasons` holds every reason for a no.
    """

    name: str
    distribution: str
    version: str
    api: str | None = None
    status: State
    score: int = 0
    devices: tuple[DeviceInfo, ...] = ()
    reasons: tuple[str, ...] = ()
    diagnose: Mapping[str, str] = field(default_factory=dict)
    capabilities: tuple[Capabilities | None, ...] = ()

    @property
    def offer(self) -> Capabilities | None:
        """What the device that an engine would get may do at most; None when it would get none."""
        usable = [device for device in self.devices if selectable(device)]
        return self.capabilities[self.devices.index(best(usable))] if usable else None


def encode(value: Any) -> Any:
    """A contract value as JSON: sets, tuples and mappings are tagged, so that `decode` gives the same value back."""
    if isinstance(value, (set, frozenset)):
        return {"set": [encode(item) for item in sorted(value, key=repr)]}
    if isinstance(value, (tuple, list)):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, Mapping):
        return {"map": [[encode(key), encode(item)] for key, item in value.items()]}
    return value


def decode(value: Any) -> Any:
    """The value that `encode` was given; lists come back as tuples."""
    if not isinstance(value, dict):
        return value
    ((tag, items),) = value.items()
    if tag == "set":
        return frozenset(decode(item) for item in items)
    if tag == "tuple":
        return tuple(decode(item) for item in items)
    return {decode(key): decode(item) for key, item in items}


def capabilities_to_json(capabilities: Capabilities) -> dict[str, Any]:
    """One JSON value a field."""
    return {f.name: encode(getattr(capabilities, f.name)) for f in dataclasses.fields(capabilities)}


def capabilities_from_json(values: Mapping[str, Any]) -> Capabilities:
    """The record that `capabilities_to_json` was given; fields this core does not know are dropped (law G3)."""
    return Capabilities.of(**{name: decode(value) for name, value in values.items()})


def probe_all(
    names: Sequence[str] | None = None, timeout: float = PROBE_LIMIT, *, diagnose: bool = False
) -> list[Status]:
    """Probe the named backends (None: all), each in its own child process, several at once; imports none here.

    `timeout` is in seconds for each plugin. Raises `BackendNotFound` for a name that no distribution offers; what a
    plugin does wrong stands in its status.
    """
    chosen = discover() if names is None else [find(name) for name in names]
    if not chosen:
        return []
    with ThreadPoolExecutor(max_workers=AT_ONCE, thread_name_prefix="pagedkv-probe") as pool:
        return list(pool.map(lambda found: _probe(found, timeout, diagnose), chosen))


def _probe(found: Found, timeout: float, diagnose: bool) -> Status:
    if found.conflicts:
        return _no(found, "conflict", conflict_text(found))
    try:
        child = Child(json.dumps({"found": dataclasses.asdict(found), "diagnose": diagnose}))
    except OSError as error:
        return _no(found, "failed", f"its probe could not be started: {error}")
    try:
        return _conversation(child, found, timeout, diagnose)
    finally:
        child.end()


def _conversation(child: Child, found: Found, timeout: float, diagnose: bool) -> Status:
    try:
        child.answer("ready", START_LIMIT)
        answer = child.answer("probe", timeout)
    except TimeoutError as error:
        return _no(found, "timeout", f"{error}{child.last_output()}")
    except EOFError:
        return _no(found, "failed", f"{child.how_it_ended()}{child.last_output()}")
    status = _yes(found, answer)
    return _diagnosed(child, status) if diagnose and status.status != "failed" else status


def _no(found: Found, state: State, reason: str) -> Status:
    return Status(
        name=found.name, distribution=found.distribution, version=found.version, status=state, reasons=(reason,)
    )


def _yes(found: Found, answer: Mapping[str, Any]) -> Status:
    devices = tuple(DeviceInfo.of(**device) for device in answer["devices"])
    return Status(
        name=found.name,
        distribution=found.distribution,
        version=found.version,
        api=answer["api"],
        status=answer["status"],
        score=max((device.score for device in devices), default=0),
        devices=devices,
        reasons=tuple(answer["reasons"]),
        capabilities=tuple(None if c is None else capabilities_from_json(c) for c in answer["capabilities"]),
    )


def _diagnosed(child: Child, status: Status) -> Status:
    try:
        lines = child.answer("diagnose", DIAGNOSE_LIMIT)
    except TimeoutError as error:
        lines = {"diagnose": f"{error}{child.last_output()}"}
    except EOFError:
        lines = {"diagnose": f"{child.how_it_ended()}{child.last_output()}"}
    return dataclasses.replace(status, diagnose=lines)


def probe_child(payload: str) -> None:
    """What a probe's child process runs; `payload` is the JSON that `_probe` wrote."""
    send = open_channel()
    wanted = json.loads(payload)
    found = Found(**wanted["found"])
    importlib.import_module("stevedore.driver")  # here, so that its import does not count as the plugin's time
    send({"ready": True})
    answer: dict[str, Any] = {"api": None, "status": "failed", "devices": [], "reasons": [], "capabilities": []}
    try:
        descriptor = _probe_into(found, answer)
    except PagedKVError as error:
        send({"probe": {**answer, "status": "failed", "devices": [], "capabilities": [], "reasons": [str(error)]}})
        return
    send({"probe": answer})
    if wanted["diagnose"]:
        send({"diagnose": _diagnosis(found, descriptor)})


def _probe_into(found: Found, answer: dict[str, Any]) -> Descriptor:
    target = import_target(found)
    if is_version(api := getattr(target, "api", None)):
        answer["api"] = "{}.{}".format(*api)
    descriptor = checked_descriptor(found, target)
    devices = probed(found, descriptor)
    for device in devices:
        answer["devices"].append({name: getattr(device, name) for name in DeviceInfo.__dataclass_fields__})
        usable = selectable(device)
        answer["capabilities"].append(capabilities_to_json(described(found, descriptor, device)) if usable else None)
    answer["status"] = "ok" if any(selectable(device) for device in devices) else "unavailable"
    answer["reasons"] = device_reasons(devices)
    return descriptor


def _diagnosis(found: Found, descriptor: Descriptor) -> dict[str, str]:
    try:
        with blamed(found, "diagnosing"):
            return {str(key): str(value) for key, value in descriptor.diagnose().items()}
    except PagedKVError as error:
        return {"diagnose": str(error)}


def selectable(device: DeviceInfo) -> bool:
    """Whether an explicit choice may use it: score 0 without a reason is "only when chosen by name", not "broken"."""
    return device.score > 0 or not device.reason


def best(devices: Sequence[DeviceInfo]) -> DeviceInfo:
    """The one with the highest score; equal scores by index."""
    return min(devices, key=lambda device: (-device.score, device.index))


def device_reasons(devices: Sequence[DeviceInfo]) -> list[str]:
    if not devices:
        return ["it sees no device"]
    unscored = [device for device in devices if device.score == 0]
    return [f"device {d.index} ({d.kind}): {d.reason or 'used only when chosen by name'}" for d in unscored]
