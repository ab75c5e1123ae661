"""Backends of strangers that compute as the CPU backend does, and differ in what they declare or cost."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.plugin_dists import install


def cpu_plugin(folder: Path, name: str, *, cost: str = "super().pool_cost(spec)", **capabilities: object) -> Path:
    """Install one: `capabilities` replaces fields of its record, `cost` is the expression of its `pool_cost`."""
    source = f"""
import dataclasses
from pagedkv.api import PoolCost
from pagedkv_cpu.descriptor import CpuDescriptor


class Fake(CpuDescriptor):
    name = {name!r}

    def describe(self, device):
        return dataclasses.replace(super().describe(device), **{capabilities!r})

    def create(self, device, options, world):
        backend = super().create(device, options, world)
        described = self.describe(self.probe()[0])

        class Own(type(backend)):
            def capabilities(self):
                return described

            def pool_cost(self, spec):
                return {cost}

        backend.__class__ = Own
        return backend
"""
    return install(folder, source, name=name, distribution=f"{name}-dist")
