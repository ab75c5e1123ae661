"""The Ascend backend on the processor: pools, plans, copies and graphs over an unkind runtime, operators emulated."""

from __future__ import annotations

from collections.abc import Callable

from pagedkv.api import World
from pagedkv_ascend import limits
from pagedkv_ascend.backend import AscendBackend
from pagedkv_ascend.capabilities import declared
from pagedkv_ascend.runtime import HostRuntime
from tests.backends.ascend.emulation import operators
from tests.helpers.delaying import Delaying


class DelayingNpu(Delaying, HostRuntime):
    """The processor in an NPU's place."""

    words = HostRuntime.words

    @property
    def recording(self) -> bool:
        return self.operators is not None

    def task(self, issue: Callable[[], None]) -> None:
        if self.operators is None:
            issue()
        else:
            self.operators.issue(issue)


def double(
    *,
    chip: str = "910B3",
    runtime: HostRuntime | None = None,
    world: World | None = None,
    seed: int | None = None,
    note: str = "",
) -> AscendBackend:
    """An instance as `create` makes it for this chip, with the processor in its place and the operators emulated."""
    operators.install()
    found = limits.chip(chip)
    if found is None:
        raise ValueError(f"no chip {chip} in limits.toml")
    return AscendBackend(declared(found), runtime or DelayingNpu(seed), world=world, note=note)
