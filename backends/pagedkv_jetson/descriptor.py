"""The Jetson backend's entry point: what can be said about the board without torch, Triton or a context."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedkv.api import AttentionBackend, Capabilities, DeviceInfo
from pagedkv_cuda import packages
from pagedkv_cuda.descriptor import CudaDescriptor
from pagedkv_cuda.devices import VISIBLE
from pagedkv_cuda.limits import Capability
from pagedkv_jetson.board import ROOT, Board, identify, meminfo
from pagedkv_jetson.power import Power, power

EXTRA = "pip install 'pagedkv[jetson]'"
NO_JETSON = "this machine is not a Jetson"
GRAPH_CONTEXT = 1024
"""Tokens up to which decode steps are recorded, once graphs are asked for."""
UNVERIFIED = (
    "not run on hardware: detection was tested on the boards' files, kernels compiled for 8.7, pools, graphs and the "
    "budget ran on a double, the processor in the board's place, which passes the kit with torch's operators. "
    "`pagedkv certify jetson` on a board tests all of it there"
)


class JetsonDescriptor(CudaDescriptor):
    """The one GPU of a Jetson board, from the files under `root`."""

    name = "jetson"
    api = (1, 1)

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def probe(self) -> tuple[DeviceInfo, ...]:
        board, memory = identify(self._root), meminfo(self._root)
        if board is None:
            return (DeviceInfo.of(index=0, kind="no Jetson", reason=NO_JETSON),)
        against = why_not(board)
        device = DeviceInfo.of(
            index=0,
            kind=f"{board.name}, compute capability {board.chip['capability']}",
            total=memory.get("MemTotal"),
            free=memory.get("MemAvailable"),
            unified=True,
            score=0 if against else board.chip["score"],
            reason=against or board.chip.get("why") or f"native, {board.chip['name']}",
        )
        return (device,)

    def describe(self, device: DeviceInfo) -> Capabilities:
        return narrowed(super().describe(device))

    def diagnose(self) -> Mapping[str, str]:
        board = identify(self._root)
        return {"state": UNVERIFIED, **({"board": NO_JETSON} if board is None else report(board, self._root))}

    def tool(self, args: Sequence[str]) -> int:
        from pagedkv_jetson.tune import group

        return int(group(self._root).main(list(args), prog_name="pagedkv jetson", standalone_mode=False) or 0)

    def _open(
        self, device: int, capability: Capability, can: Capabilities, options: Mapping[str, Any], **more: Any
    ) -> AttentionBackend:
        from pagedkv_jetson.backend import open_backend

        told = wheels(identify(self._root))
        return open_backend("", device, capability, narrowed(can), root=self._root, wheels=told, **more)


def narrowed(can: Capabilities) -> Capabilities:
    """One GPU in the host's own memory: nothing to swap to, nobody to reduce with, no graphs unless asked for."""
    less: dict[str, Any] = {"placements": frozenset({"device"}), "collectives": frozenset()}
    return dataclasses.replace(can, graph_default=False, graph_context=GRAPH_CONTEXT, **less)


def why_not(board: Board) -> str | None:
    """The first thing that keeps the GPU from being used, one line with the way out."""
    if not board.chip["score"] or "why" in board.jetpack:
        return str(board.chip.get("why") or board.jetpack["why"])
    if not board.reachable:
        return "the GPU's device nodes are not here: start the container with docker run --runtime nvidia"
    if os.environ.get(VISIBLE, "0").split(",")[0] != "0":
        return f"{VISIBLE}={os.environ[VISIBLE]!r} hides the board's only GPU: unset it"
    if reason := packages.why_no_torch(None):
        return f"{reason}; {wheels(board)}"
    return packages.why_no_triton(EXTRA)


def wheels(board: Board | None) -> str:
    """Where a torch with code for this board comes from."""
    known = board.jetpack.get("wheels") if board else None
    return f"a torch for this board comes from {known or 'what docs/jetson.md names for its JetPack'}"


def report(board: Board, root: Path) -> dict[str, str]:
    """What `pagedkv doctor` shows of a board; keys that begin with "change" name what should be changed."""
    memory, found, packs = meminfo(root), power(root), board.jetpack
    available, total, unused = (memory.get(name, 0) / 2**30 for name in ("MemAvailable", "MemTotal", "MemFree"))
    release = f"Jetson Linux {board.release or 'unknown, mount /etc/nv_tegra_release into the container'}"
    said = {
        "board": f"{board.name} ({board.model}), compute capability {board.chip['capability']}",
        "JetPack": f"{packs['name']}, {release}, CUDA {packs['cuda']}, Python {packs['python']}" if packs else release,
        "memory": f"{available:.1f} GiB available of {total:.1f} GiB, shared with the GPU; {unused:.1f} GiB unused",
        "power mode": _mode(board, found),
        "clocks": _clocks(found),
        "torch": f"{packages.version('torch') or 'not installed'}, built for CUDA {packages.torch_cuda() or 'none'}",
        "triton": packages.why_no_triton(EXTRA) or f"triton {packages.version('triton')}",
    }
    return said | _changes(board, found)


def _changes(board: Board, found: Power) -> dict[str, str]:
    changes = {}
    if against := why_not(board):
        changes["change"] = against
    elif shutil.which("cc") is None:
        changes["change compiler"] = "Triton needs a C compiler here: `sudo apt install build-essential python3-dev`"
    if found.known and found.current != found.fastest:
        modes = f"the power mode is {found.spell(found.current)}, the fastest is {found.spell(found.fastest)}"
        changes["change power mode"] = f"{modes}: `pagedkv jetson tune` prints the way there and back"
    return changes


def _mode(board: Board, found: Power) -> str:
    if found.known:
        return found.spell(found.current) + (", the fastest" if found.current == found.fastest else "")
    usual = f"; the fastest one of this board is {board.module['fastest']}" if board.module else ""
    return f"not shown here, `sudo nvpmodel -q` on the board tells{usual}"


def _clocks(found: Power) -> str:
    if found.clocks is None:
        return "not shown here"
    _, now, most = (hz // 1_000_000 for hz in found.clocks)
    return f"GPU {now} of {most} MHz, {'held there' if found.fixed else 'by load (jetson_clocks holds them)'}"
