"""Files as the systems of Jetson boards show them, under a folder of a test's own.

Models, compatible lists and power modes: NVIDIA's Jetson Linux Developer Guide, its device trees and nvpmodel files.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30


def release(major: int, rest: str) -> str:
    """/etc/nv_tegra_release of a Jetson Linux."""
    date = "Wed Jan  8 01:49:37 UTC 2025"
    return f"# R{major} (release), REVISION: {rest}, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: {date}\n"


R35, R36, R38, R39 = release(35, "6.0"), release(36, "4.3"), release(38, "2.0"), release(39, "2.1")
DPKG = """Package: linux-base
Status: install ok installed
Version: 4.5ubuntu9

Package: nvidia-l4t-core
Status: install ok installed
Priority: standard
Section: core
Maintainer: NVIDIA Corporation
Architecture: arm64
Version: 36.4.3-20250107174145
Description: NVIDIA Core Package

Package: nvidia-l4t-cuda
Version: 36.4.0-1
"""
AGX = {0: "MAXN", 1: "MODE_15W", 2: "MODE_30W", 3: "MODE_50W"}
AGX_32 = {0: "MAXN", 1: "MODE_15W", 2: "MODE_30W", 3: "MODE_40W"}
NX = {0: "MAXN", 1: "10W", 2: "15W", 3: "25W"}
NX_SUPER = {0: "MAXN_SUPER", 1: "10W", 2: "15W", 3: "25W", 4: "40W"}
NANO = {0: "15W", 1: "7W"}
NANO_4 = {0: "10W", 1: "7W_AI", 2: "7W_CPU"}
NANO_SUPER = {0: "15W", 1: "25W", 2: "MAXN_SUPER", 3: "7W"}


@dataclass(frozen=True)
class Shown:
    """One board: what its files say, and what is expected of them."""

    model: str
    compatible: tuple[str, ...]
    soc_id: int
    name: str
    capability: str
    modes: dict[int, str]
    fastest: int
    total: int
    release: str = R36
    gpu: str = "17000000.gpu"


BOARDS = {
    "agx-orin-64": Shown(
        "NVIDIA Jetson AGX Orin Developer Kit",
        ("nvidia,p3737-0000+p3701-0005", "nvidia,p3701-0005", "nvidia,tegra234"),
        35,
        "Jetson AGX Orin 64GB",
        "8.7",
        AGX,
        0,
        61 * GIB,
    ),
    "agx-orin-32": Shown(
        "NVIDIA Jetson AGX Orin",
        ("nvidia,p3737-0000+p3701-0004", "nvidia,p3701-0004", "nvidia,tegra234"),
        35,
        "Jetson AGX Orin 32GB",
        "8.7",
        AGX_32,
        0,
        30 * GIB,
    ),
    "orin-nx-16": Shown(
        "NVIDIA Jetson Orin NX Engineering Reference Developer Kit",
        ("nvidia,p3768-0000+p3767-0000", "nvidia,p3767-0000", "nvidia,tegra234"),
        35,
        "Jetson Orin NX 16GB",
        "8.7",
        NX,
        0,
        15 * GIB,
    ),
    "orin-nx-16-super": Shown(
        "NVIDIA Jetson Orin NX Engineering Reference Developer Kit Super",
        ("nvidia,p3768-0000+p3767-0000-super", "nvidia,p3767-0000", "nvidia,tegra234"),
        35,
        "Jetson Orin NX 16GB Super",
        "8.7",
        NX_SUPER,
        0,
        15 * GIB,
    ),
    "orin-nx-8": Shown(
        "NVIDIA Jetson Orin NX Engineering Reference Developer Kit",
        ("nvidia,p3768-0000+p3767-0001", "nvidia,p3767-0001", "nvidia,tegra234"),
        35,
        "Jetson Orin NX 8GB",
        "8.7",
        NX,
        0,
        7 * GIB,
        release=R39,
    ),
    "orin-nano-8": Shown(
        "NVIDIA Jetson Orin Nano Developer Kit",
        ("nvidia,p3768-0000+p3767-0005", "nvidia,p3767-0005", "nvidia,tegra234"),
        35,
        "Jetson Orin Nano 8GB, developer kit",
        "8.7",
        NANO,
        0,
        7 * GIB,
    ),
    "orin-nano-8-super": Shown(
        "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
        ("nvidia,p3768-0000+p3767-0005-super", "nvidia,p3767-0005", "nvidia,tegra234"),
        35,
        "Jetson Orin Nano 8GB, developer kit Super",
        "8.7",
        NANO_SUPER,
        2,
        7 * GIB,
    ),
    "orin-nano-4": Shown(
        "NVIDIA Jetson Orin Nano",
        ("nvidia,p3768-0000+p3767-0004", "nvidia,p3767-0004", "nvidia,tegra234"),
        35,
        "Jetson Orin Nano 4GB",
        "8.7",
        NANO_4,
        0,
        3 * GIB,
    ),
    "thor": Shown(
        "NVIDIA Jetson AGX Thor Developer Kit",
        ("nvidia,p4071-0000+p3834-0008", "nvidia,p3834-0008", "nvidia,tegra264"),
        38,
        "Jetson T5000",
        "11.0",
        {0: "MAXN", 1: "120W", 2: "90W", 3: "70W"},
        0,
        122 * GIB,
        release=R38,
        gpu="gpu-gpc-0",
    ),
    "agx-xavier": Shown(
        "Jetson-AGX",
        ("nvidia,p2972-0000", "nvidia,p2888-0004", "nvidia,tegra194"),
        25,
        "Jetson AGX Xavier",
        "7.2",
        {0: "MAXN", 1: "MODE_10W", 2: "MODE_15W", 3: "MODE_30W_ALL"},
        0,
        30 * GIB,
        release=R35,
        gpu="17000000.gv11b",
    ),
    "xavier-nx": Shown(
        "NVIDIA Jetson Xavier NX Developer Kit",
        ("nvidia,p3449-0000+p3668-0000", "nvidia,p3668-0000", "nvidia,tegra194"),
        25,
        "Jetson Xavier NX",
        "7.2",
        {0: "MODE_15W_2CORE", 1: "MODE_15W_4CORE", 7: "MODE_20W_4CORE", 8: "MODE_20W_6CORE"},
        7,
        7 * GIB,
        release=R35,
        gpu="17000000.gv11b",
    ),
}
ORINS = [name for name, shown in BOARDS.items() if shown.capability == "8.7"]
TREE = "proc/device-tree"
MASKED = (TREE, "etc/nv_tegra_release", "etc/nvpmodel.conf", "var/lib/nvpmodel", "var/lib/dpkg")
"""What a container does not see of its board unless it is given: the device tree is masked, the rest not mounted."""


def write(root: Path, name: str, text: str) -> None:
    """A file under the root."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(text.encode())


def meminfo(root: Path, *, total: int, available: int, free: int) -> None:
    """/proc/meminfo with these bytes, in place of what is there."""
    lines = {"MemTotal": total, "MemFree": free, "MemAvailable": available, "Buffers": 0, "SwapFree": total // 2}
    write(root, "proc/meminfo", "".join(f"{key + ':':<16}{size >> 10:>8} kB\n" for key, size in lines.items()))


def clocks(root: Path, shown: Shown, least: int, now: int, most: int) -> None:
    """The GPU's clocks in MHz, beside those of another device."""
    for folder, speeds in ((shown.gpu, (least, now, most)), ("15340000.vic", (115, 115, 700))):
        for key, mhz in zip(("min", "cur", "max"), speeds, strict=True):
            write(root, f"sys/class/devfreq/{folder}/{key}_freq", f"{mhz * 1_000_000}\n")


def nvpmodel(root: Path, modes: dict[int, str], current: int | None) -> None:
    """The power modes' table and the current one."""
    bodies = (f"< POWER_MODEL ID={number} NAME={name} >\nCPU_ONLINE CORE_0 1\n" for number, name in modes.items())
    write(root, "etc/nvpmodel.conf", "# FAN < x >\n< PARAM TYPE=FILE NAME=CPU_ONLINE >\n" + "\n".join(bodies))
    if current is not None:
        write(root, "var/lib/nvpmodel/status", f"pmode:{current:04d}\nfmode:0\n")


def board(root: Path, name: str, *, current: int | None = None) -> Path:
    """The whole board in its fastest mode, or another one, with clocks by load and 60 % of its memory available."""
    shown = BOARDS[name]
    write(root, f"{TREE}/model", shown.model + "\0")
    write(root, f"{TREE}/compatible", "".join(f"{one}\0" for one in shown.compatible))
    write(root, "sys/devices/soc0/family", "Tegra\n")
    write(root, "sys/devices/soc0/soc_id", f"{shown.soc_id}\n")
    write(root, "sys/devices/soc0/machine", shown.model + "\n")
    write(root, "etc/nv_tegra_release", shown.release)
    write(root, "dev/nvmap", "")
    nvpmodel(root, shown.modes, shown.fastest if current is None else current)
    clocks(root, shown, 306, 306, 918)
    meminfo(root, total=shown.total, available=shown.total * 6 // 10, free=shown.total // 10)
    return root


def container(root: Path, name: str, *, keep: tuple[str, ...] = ()) -> Path:
    """The board from inside a container that was started with its GPU: `keep` is mounted, or not masked."""
    board(root, name)
    for hidden in MASKED:
        if hidden not in keep:
            path = root / hidden
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return root
