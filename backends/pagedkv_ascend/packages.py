"""Which torch, torch-npu and CANN are installed and whether they fit, by metadata and files: nothing is imported."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path("/")
EXTRA = "pip install '.[ascend]' in the clone"
FOLDERS = (
    "usr/local/Ascend/ascend-toolkit/latest/lib64",
    "usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_1/lib",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
)
"""Where the dynamic linker may look besides `LD_LIBRARY_PATH`."""
VERSION = r"version\w*\s*=\s*\[?(?:[\w.]+:)?([\d.]+[\w.]*)"
VERSION_FILES = ("version.cfg", "ascend_toolkit_install.info", "version.info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One row of the table of sets."""

    torch: str
    torch_npu: str
    python: str
    cann: str
    state: str
    source: str


@functools.cache
def table() -> dict[str, Any]:
    """sets.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(Path(__file__).with_name("sets.toml").read_text("utf-8"))


def sets() -> tuple[Known, ...]:
    """Every row."""
    return tuple(Known(**row) for row in table()["set"])


def version(package: str) -> str | None:
    """The installed version; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(text: str) -> str:
    """ "2.13" of "2.13.0.post4+cpu"."""
    found = re.match(r"\d+\.\d+", text)
    return found[0] if found else text


def why_no_torch_npu() -> str | None:
    """One line when torch-npu is missing, or made for another torch."""
    npu, torch = version("torch-npu"), version("torch")
    if npu is None:
        return f"torch-npu is not installed: {EXTRA}"
    if torch is None:
        return f"torch is not installed, torch-npu {npu} wants {release(npu)}: {EXTRA}"
    if release(npu) != release(torch):
        return (
            f"torch-npu {npu} is made for torch {release(npu)}, torch {torch} is installed: pip install "
            f"'torch=={release(npu)}.*', or a torch-npu {release(torch)}"
        )
    return None


def why_no_triton() -> str | None:
    """One line when Triton for two kinds of hardware lies in one folder."""
    if version("triton") and version("triton-ascend"):
        return (
            "triton and triton-ascend overwrite each other's files: pip uninstall triton triton-ascend, then install "
            "the one you need (this backend needs neither)"
        )
    return None


def cann_home() -> Path | None:
    """Where CANN says it is; None where its variables are not set."""
    found = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    return Path(found) if found else None


def cann_version(home: Path | None = None) -> str | None:
    """CANN's version, from the files of its installation."""
    home = home or cann_home()
    if home is None or not home.is_dir():
        return None
    for name in VERSION_FILES:
        for path in sorted((*home.glob(name), *home.glob(f"*-linux/{name}"))):
            found = re.search(
                r"version\w*\s*=\s*\[?(?:[\w.]+:)?([\d.]+[\w.]*)", path.read_text("utf-8", "replace"), re.I
            )
            if found:
                return found[1]
    return None


def why_no_cann(root: Path = ROOT) -> str | None:
    """One line with the first library that the dynamic linker would not find, and the script that puts it there."""
    folders = [Path(one) for one in os.environ.get("LD_LIBRARY_PATH", "").split(":") if one]
    folders += [root / folder for folder in FOLDERS]
    for part in ("toolkit", "boost"):
        for name in table()["libraries"][part]:
            if not any((folder / name).exists() for folder in folders):
                return _missing(name, f"it is in none of {len(folders)} folders of the library path")
    return None


def why_not_imported(error: BaseException) -> str:
    """One line for what `import torch_npu` raised: the first cause, with the way out."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    found = re.search(r"(lib[\w.+-]+\.so[\w.]*)", str(cause))
    if found:
        return _missing(found[1], str(cause))
    return (
        f"torch-npu {version('torch-npu')} does not load with torch {version('torch')} ({cause}): see pagedkv doctor "
        "--backend ascend for the versions that go together"
    )


def _missing(name: str, why: str) -> str:
    part = next(
        (part for part, names in table()["libraries"].items() if name.split(".so")[0] + ".so" in names), "toolkit"
    )
    return f"torch-npu needs {name} of CANN ({why}): {table()['scripts'][part]}, or install CANN"


def known_set() -> Known | None:
    """The row of what is installed; None for a set that nobody has named."""
    npu = version("torch-npu")
    return next((row for row in sets() if row.torch_npu == npu), None)
