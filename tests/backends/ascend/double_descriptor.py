"""What the kit loads to test the Ascend backend without an NPU: a backend by name only, as light as the real one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedkv.api import AttentionBackend, Capabilities, Descriptor, DeviceInfo, Option, World

CHIP = "910B3"
SEED = Option.of(name="seed", type=int, default=0, help="0: copies run as late as they may; else when this seed says")


class DoubleDescriptor(Descriptor):
    """The backend with emulated operators, the processor in an NPU's place; the real descriptor is imported later."""

    name = "ascend-double"

    @property
    def _real(self) -> Descriptor:
        from pagedkv_ascend.descriptor import AscendDescriptor

        return AscendDescriptor()

    @property
    def api(self) -> tuple[int, int]:  # type: ignore[override]
        return self._real.api

    @property
    def options(self) -> tuple[Option, ...]:  # type: ignore[override]
        return (*self._real.options, SEED)

    def probe(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo.of(index=0, kind=f"no NPU, the processor in its place, Ascend{CHIP}"),)

    def describe(self, device: DeviceInfo) -> Capabilities:
        from pagedkv_ascend import limits
        from pagedkv_ascend.capabilities import declared

        found = limits.chip(CHIP)
        if found is None:
            raise ValueError(f"no chip {CHIP} in limits.toml")
        return declared(found)

    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        from tests.backends.ascend.double import double

        return double(chip=CHIP, world=world, seed=int(options.get("seed") or 0) or None)


DOUBLE = DoubleDescriptor()
"""An instance, as what it takes from the real descriptor is asked of one."""
