"""The descriptors that the entry points of the mutants' distribution name: one for each mutant and each base."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from pagedkv.api import AttentionBackend, Capabilities, Descriptor, DeviceInfo, World
from tests.conformance.mutants import (  # noqa: F401 - each adds to the table
    attention,
    batches,
    copies,
    extensions,
    promises,
    quantized,
    writing,
)
from tests.conformance.mutants.table import MUTANTS, Base, Mutant

DESCRIPTORS = {
    "loopback": "pagedkv.conformance.loopback.descriptor:LoopbackDescriptor",
    "template": "pagedkv_template:TemplateDescriptor",
    "cpu": "pagedkv_cpu.descriptor:CpuDescriptor",
}


class Plugin(Descriptor):
    """A base under another name, with at most one method replaced."""

    api = (1, 0)

    def __init__(self, name: str, base: Base, broken: Mutant | None = None) -> None:
        self.name, self._base, self._broken = name, base, broken
        if broken is not None and broken.part == "descriptor":
            broken.spoil(self)

    def probe(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo.of(index=0, kind=f"{self._base.backend}, for the kit's own tests", score=0),)

    def describe(self, device: DeviceInfo) -> Capabilities:
        return self._original().describe(device)

    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        made = self._original().create(device, self._base.options, world)
        if self._broken is not None and self._broken.part not in ("descriptor", "module"):
            self._broken.spoil(getattr(made, self._broken.part) if self._broken.part else made)
        return made

    def _original(self) -> Descriptor:
        module, _, attribute = DESCRIPTORS[self._base.backend].partition(":")
        made: Descriptor = getattr(importlib.import_module(module), attribute)()
        return made


def attribute(name: str) -> str:
    """What an entry point names in this module."""
    return name.replace("-", "_")


CONTROLS = {one.base.control: one.base for one in MUTANTS}
"""Name -> base, as each mutant needs it."""

globals().update({attribute(name): Plugin(name, base) for name, base in CONTROLS.items()})
globals().update({attribute(one.name): Plugin(one.name, one.base, one) for one in MUTANTS})
