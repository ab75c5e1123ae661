"""The power mode and the clocks of a Jetson by name, from its own files, and the commands that change them.

modes    /etc/nvpmodel.conf: "< POWER_MODEL ID=2 NAME=MAXN_SUPER >"; an id means another mode on another board
current  /var/lib/nvpmodel/status: "pmode:0002"
clocks   min_freq, cur_freq and max_freq of the GPU in /sys/class/devfreq
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pagedkv_jetson.board import ROOT, read

MODEL = r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>"
GPU_CLOCKS = re.compile(r".*\.(gpu|ga10b|gv11b)|gpu-gpc-?\d*")
"""Names of the GPU's folder: Jetson Linux from 36 on, before, Thor's."""
UNLIMITED = ("MAXN_SUPER", "MAXN")


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """`modes`: id -> name; `current`: an id; `clocks` of the GPU in Hz: least, now, most. None is unknown."""

    modes: dict[int, str]
    current: int | None
    clocks: tuple[int, ...] | None

    @property
    def fastest(self) -> int | None:
        """The id of the mode without limits, else of the one with the most watts, the first of equals."""
        return max(self.modes, key=lambda number: (_speed(self.modes[number]), -number), default=None)

    @property
    def known(self) -> bool:
        """Whether both the current mode and the fastest one have a name."""
        return self.current in self.modes

    @property
    def fixed(self) -> bool:
        """Whether the clocks stay at their highest, as jetson_clocks leaves them."""
        return self.clocks is not None and self.clocks[0] == self.clocks[-1]

    def spell(self, number: int | None) -> str:
        """A mode for people."""
        return "unknown" if number is None else f"{self.modes.get(number, 'nameless')} (id {number})"


def _speed(name: str) -> int:
    watts = re.search(r"(\d+) ?W", name)
    return 10_000 - UNLIMITED.index(name) if name in UNLIMITED else int(watts[1]) if watts else 0


def power(root: Path = ROOT) -> Power:
    """What the files say; a file that is not there leaves its part unknown."""
    status = re.search(r"pmode:(\d+)", read(root / "var/lib/nvpmodel/status"))
    folders = [one for one in sorted((root / "sys/class/devfreq").glob("*")) if GPU_CLOCKS.fullmatch(one.name)]
    clocks = [read(one / f"{name}_freq") for one in folders[:1] for name in ("min", "cur", "max")]
    return Power(
        modes={int(number): name for number, name in re.findall(MODEL, read(root / "etc/nvpmodel.conf"))},
        current=int(status[1]) if status else None,
        clocks=tuple(map(int, clocks)) if clocks and all(one.isdigit() for one in clocks) else None,
    )


def commands(found: Power) -> tuple[list[str], list[str]]:
    """(what makes the board fastest, what undoes it), for root; what holds already is left out."""
    do, undo = [], []
    if found.current != found.fastest:
        do, undo = [f"nvpmodel -m {found.fastest}"], [f"nvpmodel -m {found.current}"]
    if not found.fixed:
        do, undo = [*do, "jetson_clocks --store", "jetson_clocks"], ["jetson_clocks --restore", *undo]
    return do, undo
