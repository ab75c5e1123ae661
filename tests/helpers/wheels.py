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
    (wheel,) = build_wheels([source_folder], out)
    return wheel


def build_wheels(source_folders: Sequence[Path], out: Path) -> list[Path]:
    """Build several projects with a single call of pip."""
    out.mkdir(parents=True, exist_ok=True)
    leftovers = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    with tempfile.TemporaryDirectory() as home:
        built = Path(home) / "built"
        copies = [
            shutil.copytree(f, Path(home) / str(i) / f.name, ignore=leftovers) for i, f in enumerate(source_folders)
        ]
        options = ("--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built))
        _pip("wheel", *options, *map(str, copies))
        return [Path(shutil.copy2(wheel, out)) for wheel in sorted(built.glob("*.whl"))]


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
