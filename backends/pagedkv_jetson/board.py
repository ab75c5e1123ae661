"""Which Jetson this is, from the files that its system shows; each reading takes the root of the file system.

    chip     /proc/device-tree/compatible, else /sys/devices/soc0/soc_id
    module   /proc/device-tree/compatible
    model    /proc/device-tree/model, else /sys/devices/soc0/machine
    release  /etc/nv_tegra_release, else the package nvidia-l4t-core in /var/lib/dpkg/status

Containers show fewer of them: Docker masks the device tree, and the release is there only where it is mounted.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv_cuda.devices import is_tegra

ROOT = Path("/")
NODES = ("dev/nvmap", "dev/nvgpu", "dev/nvhost-gpu", "dev/nvidiactl")
"""Any of them is there where a process can reach the GPU."""
RELEASE_FILE = r"# R(\d+) \(release\), REVISION: ([\d.]+)"
RELEASE_PACKAGE = r"^Package: nvidia-l4t-core\n(?:.+\n)*?Version: (\d+)\.([\d.]+)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """`chip`, `module` and `jetpack` are rows of boards.toml, the last two empty where unknown; `release`: "36.4.3"."""

    name: str
    model: str
    chip: dict[str, Any]
    module: dict[str, Any]
    release: str
    jetpack: dict[str, Any]
    reachable: bool


@functools.cache
def table() -> dict[str, Any]:
    """boards.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(Path(__file__).with_name("boards.toml").read_text("utf-8"))


def read(path: Path) -> str:
    """A file's text, the zero bytes of device trees as line ends; "" where there is none."""
    with contextlib.suppress(OSError):
        return path.read_text("utf-8", "replace").replace("\0", "\n").strip()
    return ""


def identify(root: Path = ROOT) -> Board | None:
    """The board; None where this is no Tegra."""
    if not is_tegra(root):
        return None
    compatible, soc_id = read(root / "proc/device-tree/compatible"), read(root / "sys/devices/soc0/soc_id")
    model = read(root / "proc/device-tree/model") or read(root / "sys/devices/soc0/machine")
    chips = [one for one in table()["chip"] if one["compatible"] in compatible.split() or one["soc_id"] == soc_id]
    module: dict[str, Any] = next((one for one in table()["module"] if one["number"] in compatible), {})
    known = f"{module['name']}{' Super' if '-super' in compatible else ''}" if module else ""
    major, release = _release(root)
    return Board(
        name=known or model or "a board that does not tell its model",
        model=model,
        chip=chips[0] if chips else table()["unknown"],
        module=module,
        release=release,
        jetpack=next((one for one in table()["jetpack"] if one["l4t"] == major), {}),
        reachable=any((root / node).exists() for node in NODES),
    )


def _release(root: Path) -> tuple[int, str]:
    """Jetson Linux's major number and all of it; (0, "") where it is not shown."""
    told = re.match(RELEASE_FILE, read(root / "etc/nv_tegra_release"))
    told = told or re.search(RELEASE_PACKAGE, read(root / "var/lib/dpkg/status"), re.MULTILINE)
    return (int(told[1]), f"{told[1]}.{told[2]}") if told else (0, "")


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """Bytes by the names of /proc/meminfo."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", read(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(size) * 1024 for name, size in lines}
