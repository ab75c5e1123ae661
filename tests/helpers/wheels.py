"""Wheels built and installed by pip itself, as an author and a user would."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


def build_wheel(source_folder: Path, out: Path) -> Path:
    """Build the project in `source_folder` into `out`; the folder itself is left as it is."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        copy, built = Path(home) / source_folder.name, Path(home) / "built"
        leftovers = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
        shutil.copytree(source_folder, copy, ignore=leftovers)
        _pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(copy))
        (wheel,) = built.glob("*.whl")
        return Path(shutil.copy2(wheel, out))


def install_wheel(wheel: Path, target: Path) -> Path:
    """Install one wheel into a folder that belongs on `sys.path`; returns the folder."""
    return install_wheels([wheel], target)


def install_wheels(wheels: Sequence[Path], target: Path) -> Path:
    """Install them all with a single call of pip."""
    _pip("install", "--no-index", "--no-deps", "--no-compile", "--target", str(target), *map(str, wheels))
    return target


def _pip(*arguments: str) -> None:
    done = subprocess.run([*PIP, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
