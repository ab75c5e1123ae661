"""What each generation of GPUs allows, from `generations.toml`, and whether built code runs on a compute capability."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Capability = tuple[int, int]
"""Compute capability, (major, minor)."""

LEAST: Capability = (7, 5)
"""Below it neither today's torch nor Triton has code."""
TRITON_LEAST = (3, 6)
"""The oldest Triton whose API the kernels keep to."""
NATIVE, GENERIC, PORTABLE = 80, 50, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One row of the table. `shared_memory`: bytes for a block of threads. `why_not`: what speaks against Triton.

    `least_cuda`: a torch built for an older CUDA has no code for it; "" where every torch that runs here is newer.
    """

    name: str
    capabilities: tuple[Capability, ...]
    score: int
    triton: bool
    dtypes: tuple[str, ...]
    native_dtypes: tuple[str, ...]
    shared_memory: int
    advice: tuple[str, ...]
    why_not: str = ""
    least_cuda: str = ""


def spell(capability: Capability) -> str:
    """ "9.0" of (9, 0)."""
    return "{}.{}".format(*capability)


def parse(text: str) -> Capability:
    """(9, 0) of "9.0"."""
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


@functools.cache
def generations() -> tuple[Generation, ...]:
    """The table, by ascending capability."""
    rows = _read(Path(__file__).with_name("generations.toml").read_text("utf-8"))["generation"]
    return tuple(sorted(map(_generation, rows), key=lambda row: row.capabilities))


def _read(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def _generation(row: dict[str, Any]) -> Generation:
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    lists["capabilities"] = tuple(parse(text) for text in lists["capabilities"])
    return Generation(**{**row, **lists})


def generation(capability: Capability) -> Generation | None:
    """The row of a capability, else the nearest one below it; None below all of them."""
    below = [row for row in generations() if row.capabilities[0] <= capability]
    exact = [row for row in below if capability in row.capabilities]
    return (exact or below)[-1] if below else None


def score(capability: Capability) -> int:
    """The table's score; `GENERIC` for a capability that is not in it, as its tile sizes are another one's."""
    row = generation(capability)
    if row is None:
        return 0
    return row.score if capability in row.capabilities or not row.triton else GENERIC


# -- built code --------------------------------------------------------------------------------------------------------


def runs_on(capability: Capability, built: Iterable[str], *, tegra: bool = False) -> bool:
    """Whether code built for `built` ("sm_80", "sm_90a", "compute_80") runs on a GPU of this capability.

    A cubin runs on its own major number at its minor or a later one, on Tegra only on its own, and so does code for a
    family ("sm_100f", "compute_100f"); code for one architecture ("sm_90a") only there; PTX ("compute_80") on its own
    capability and every later one. Source: NVIDIA's CUDA programming guide, "Binary compatibility", "PTX
    compatibility" and "Family-specific features".
    """
    return any(_one_runs(capability, name, tegra) for name in built)


def _one_runs(capability: Capability, name: str, tegra: bool) -> bool:
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
    if found is None:
        return False
    target, kind = (int(found[2]), int(found[3])), found[4]
    if kind == "a" or (tegra and found[1] == "sm"):
        return target == capability
    if found[1] == "compute" and not kind:
        return target <= capability
    return target[0] == capability[0] and target[1] <= capability[1]
