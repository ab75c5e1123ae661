"""The root of a machine with NPUs: the stand-in for the driver's library of dcmi.c, and empty files for CANN's."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pagedkv_ascend import environment, packages

SOURCE = Path(__file__).with_name("dcmi.c")
DRIVER = "usr/local/dcmi"
CANN = "usr/local/Ascend/cann"
GOOD = {"torch": "2.13.0+cpu", "torch-npu": "2.13.0"}


def driver(root: Path, *flags: str) -> Path:
    """The driver under `root`; returns the root. Skips the test where nothing can build it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the stand-in for the driver's library cannot be built")
    target = root / DRIVER / "libdcmi.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, "-shared", "-fPIC", "-w", *flags, "-o", str(target), str(SOURCE)], check=True)
    return root


def cann(root: Path, *, version: str = "9.1.0", without: str = "") -> Path:
    """An installation of CANN under `root`, which needs `sourced`; returns its home."""
    home = root / CANN
    (home / "x86_64-linux").mkdir(parents=True)
    (home / "lib64").mkdir()
    (home / "set_env.sh").write_text("")
    info = f"package_name=Ascend-cann-toolkit\nversion={version}\ninnerversion=V100R001C23\narch=x86_64\n"
    (home / "x86_64-linux/ascend_toolkit_install.info").write_text(info)
    for name in packages.table()["cann"]["libraries"]:
        if name != without:
            (home / "lib64" / name).write_text("")
    return home


def sourced(home: Path, patch: pytest.MonkeyPatch) -> None:
    """What set_env.sh does."""
    patch.setenv("ASCEND_HOME_PATH", str(home))
    patch.setenv("LD_LIBRARY_PATH", str(home / "lib64"))


def bare(patch: pytest.MonkeyPatch) -> None:
    """No variable of torch-npu's or CANN's, none set for an option."""
    patch.setattr(environment, "_applied", {})
    names = (*(one.name for one in environment.variables()), *packages.HOMES, "LD_LIBRARY_PATH")
    for name in names:
        patch.delenv(name, raising=False)


def installed(patch: pytest.MonkeyPatch, toolkit: str | None = None, **versions: str | None) -> None:
    """These packages, and no others; names with a dash have an underscore here. `toolkit`: what torch has in it."""
    patch.setattr(packages, "torch_toolkit", lambda: toolkit)
    found = {re.sub("_", "-", name): version for name, version in versions.items()}
    patch.setattr(packages, "version", found.get)
