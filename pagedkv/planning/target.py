"""What is planned for: this machine's backend as it is, with other memory, or a device of the table in its place."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

from pagedkv import plugins
from pagedkv.api import AttentionBackend, Capabilities, Descriptor, MemoryInfo
from pagedkv.api.errors import ConfigError
from pagedkv.config import EngineConfig, claim_options
from pagedkv.engine.memory import read_memory
from pagedkv.planning.cost import FORMULA
from pagedkv.planning.devices import Device, find_device, known_device
from pagedkv.planning.stand_in import Absent, StandIn

_log = logging.getLogger("pagedkv.planning")

PROCESSOR = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The backend that is asked, and where its answers come from. `device`: of the table, None for what is here.

    `cost`: how the cache's bytes are known, in words. `real`: the backend itself answers for its memory.
    """

    selected: plugins.Selected
    backend: AttentionBackend
    device: Device | None
    cost: str
    real: bool

    @property
    def title(self) -> str:
        """The device in words."""
        return self.selected.device.kind if self.device is None else self.device.title

    @property
    def here(self) -> bool:
        """Whether the device is one of this machine, so that its speed can be measured."""
        return self.device is None

    def memory(self) -> MemoryInfo:
        """What the backend says of its memory now. Raises `BackendError` when it fails to."""
        return read_memory(self.backend.memory, self.selected.name)

    def kv_budget(self, fraction: float | None, reserved: int) -> int | None:
        """Bytes that the cache may take beside `reserved` ones, as the backend has it. Raises `BackendError`."""
        return read_memory(lambda: self.backend.kv_budget(fraction, reserved), self.selected.name)

    def close(self) -> None:
        """Let go of the backend."""
        self.backend.close()


def open_target(config: EngineConfig, device: str | None, memory: int | None) -> Target:
    """The target for `--device` (a name of the table, an index of this machine, "cpu") and `--memory` (bytes).

    Raises `ConfigError` for an unknown device, and whatever choosing and creating a backend raises.
    """
    here = _here(config, device)
    if here is not None:
        return _this_machine(here, memory)
    known = find_device(str(device))
    told = known.free_memory if memory is None else MemoryInfo(free=memory, total=memory, unified=known.unified)
    if config.backend not in (None, known.backend):
        return _other_backend(config, known, told)
    return _elsewhere(known, told)


def _here(config: EngineConfig, device: str | None) -> EngineConfig | None:
    """The settings where the device is one of this machine, None where it is not."""
    if device is None:
        return config
    if device.isdecimal() and known_device(device) is None:
        return dataclasses.replace(config, device=int(device))
    if device.strip().lower() == PROCESSOR:
        return dataclasses.replace(config, backend=config.backend or PROCESSOR)
    return None


def _created(config: EngineConfig) -> tuple[plugins.Selected, AttentionBackend]:
    selected = plugins.select(config.backend, device=config.device)
    accepted = {alias: o.name for o in selected.descriptor.options for alias in (o.name, *o.aliases)}
    return selected, plugins.create(selected, claim_options(config, accepted, selected.name))


def _this_machine(config: EngineConfig, memory: int | None) -> Target:
    selected, backend = _created(config)
    if memory is not None:
        unified = backend.memory().unified
        told = MemoryInfo(free=memory, total=memory, unified=unified)
        backend = StandIn(backend.capabilities(), told, inner=backend)
    return Target(selected=selected, backend=backend, device=None, cost=_asked(selected.name), real=memory is None)


def _other_backend(config: EngineConfig, device: Device, memory: MemoryInfo) -> Target:
    """A backend that runs here, with the memory of that device."""
    selected, inner = _created(config)
    backend = StandIn(inner.capabilities(), memory, fraction=device.fraction, reserve=device.reserve, inner=inner)
    return Target(selected=selected, backend=backend, device=device, cost=_asked(selected.name), real=False)


def _elsewhere(device: Device, memory: MemoryInfo) -> Target:
    found = next((f for f in plugins.discover() if f.name == device.backend and not f.conflicts), None)
    descriptor: Descriptor = Absent(device) if found is None else plugins.load(found)
    selected = plugins.Selected(
        descriptor=descriptor,
        name=device.backend,
        distribution="" if found is None else found.distribution,
        version="" if found is None else found.version,
        device=device.info,
        why=f"the backend of {device.title}",
        explicit=True,
    )
    offer: Capabilities = plugins.offer(selected)
    whose = "its backend's descriptor" if found is not None else f"nobody: backend {device.backend} is not installed"
    _log.info("%s is not here: what it can do is told by %s", device.title, whose)
    backend = StandIn(offer, memory, fraction=device.fraction, reserve=device.reserve)
    return Target(selected=selected, backend=backend, device=device, cost=f"by formula: {FORMULA}", real=False)


def _asked(name: str) -> str:
    return f"as backend {name} counts it (pool_cost)"


def check_memory(target: Target) -> None:
    """Raise `ConfigError` where nobody knows how much there is."""
    memory = target.memory()
    if memory.total is None or memory.free is None:
        raise ConfigError(
            f"backend {target.selected.name} cannot tell how much memory {target.title} has: give it, as in "
            "--memory 24GiB"
        )
