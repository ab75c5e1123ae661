"""What the kit loads to test the Jetson backend without a board, as light as the real one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedkv.api import AttentionBackend, DeviceInfo, World
from pagedkv_jetson.descriptor import JetsonDescriptor
from tests.backends.cuda.double_descriptor import SEED


class DoubleDescriptor(JetsonDescriptor):
    """The backend over this machine's own memory, the processor in the GPU's place."""

    name = "jetson-double"
    options = (*JetsonDescriptor.options, SEED)

    def probe(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo.of(index=0, kind="no Jetson, the processor in its place, compute capability 8.7"),)

    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        from tests.backends.jetson.double import double

        return double(world=world, seed=int(options.get("seed") or 0) or None)
