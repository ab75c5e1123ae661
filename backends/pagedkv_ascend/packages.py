"""Which torch, torch-npu and CANN are installed and whether they fit, by metadata and files: nothing is loaded."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

ROOT = Path("/")
EXTRA = "pip install '.[ascend]' in the clone"
HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""Where CANN's script says that CANN is."""
VERSION_FILES = {
    "ascend_toolkit_install.info": r"^version\s*=\s*(\S+)",
    "version.cfg": r"^toolkit_(?:running|installed)_version\s*=\s*\[(?:[^:\]]*:)?([^\]]+)\]",
}
"""Files of an installation that name CANN's version, and how; in its folder or one below, named by the processor."""
STATES = {
    "schemas": "calls checked against its operators here, with no NPU",
    "declared": "not tried here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One row of the table of sets; python: a range, cann: a release, both empty where nobody names one."""

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


def against(root: Path = ROOT) -> str | None:
    """The first thing that keeps any NPU from being used, one line with the way out."""
    return why_no_torch_npu() or why_no_triton() or why_no_cann(root)


# -- packages ----------------------------------------------------------------------------------------------------------


def torch_toolkit() -> str | None:
    """The accelerator's toolkit that torch was built with, "cuda 13.0", by its version file; None for a plain torch."""
    spec = importlib.util.find_spec("torch")
    file = None if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py")
    if file is None or not file.exists():
        return None
    form = r"^(cuda|hip|rocm|xpu)\b[^=]*=\s*['\"]([\w.+-]+)['\"]"
    found = re.search(form, file.read_text("utf-8"), re.MULTILINE)
    return f"{found[1]} {found[2]}" if found else None


def why_no_torch_npu() -> str | None:
    """One line when torch-npu is missing, made for another torch, or beside a torch with another accelerator in it.

    The last is torch-npu's own rule: importing it raises, with a device of the other kind or without.
    """
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
    if toolkit := torch_toolkit():
        return (
            f"torch {torch} is built with {toolkit}, beside which torch-npu does not load: install in its place the "
            f"build of torch {release(torch)} for processors alone, whose version ends in +cpu"
        )
    return None


def why_no_triton() -> str | None:
    """One line when Triton for two kinds of hardware lies in one folder."""
    if version("triton") and version("triton-ascend"):
        return (
            "triton and triton-ascend overwrite each other's files: pip uninstall -y triton triton-ascend, and install "
            "again the one that is needed, this backend needs neither"
        )
    return None


# -- CANN --------------------------------------------------------------------------------------------------------------


def cann_home() -> Path | None:
    """Where CANN says it is; None where its script was not sourced."""
    found = next(filter(None, map(os.environ.get, HOMES)), None)
    return None if found is None else Path(found)


def cann_version(home: Path | None = None) -> str | None:
    """CANN's version, from the files of its installation; None where there is none or its files do not tell."""
    home = home or cann_home()
    if home is None:
        return None
    for name, form in VERSION_FILES.items():
        for path in sorted((*home.glob(name), *home.glob(f"*-linux/{name}"))):
            if found := re.search(form, path.read_text("utf-8", "replace"), re.MULTILINE):
                return found[1]
    return None


def why_no_cann(root: Path = ROOT) -> str | None:
    """One line with the first library of CANN's that the dynamic linker would not find, and how it would."""
    home = cann_home()
    if home is not None and not home.is_dir():
        return f"{_named_home()}={home} is no folder: unset {_named_home()}, then {script(root)}"
    folders = list(_linked(root))
    missing = next((name for name in table()["cann"]["libraries"] if not _lies_in(name, folders)), None)
    if missing is None:
        return None
    elsewhere = next((folder for folder in _usual(root) if (folder / missing).exists()), None)
    if elsewhere is not None:
        return f"torch-npu needs {missing}, and {elsewhere} is not on the library path: {script(root)}"
    if home is not None:
        said = f"CANN {cann_version() or 'of an unknown version'} in {home} is without {missing}, which torch-npu needs"
        return f"{said}: install the whole toolkit of CANN, then {script(root)}"
    return f"torch-npu needs {missing} of CANN, which is not installed: install CANN, then {script(root)}"


def script(root: Path = ROOT, part: str = "toolkit") -> str:
    """The command that puts a part of CANN on the library path: of the scripts that are here, else the usual one."""
    usual: list[str] = table()["cann"]["scripts"][part]
    home = cann_home()
    own = [home / "set_env.sh"] if home is not None and part == "toolkit" else []
    there = (path for path in (*own, *(root / name for name in usual)) if path.exists())
    return f"source {next(there, ROOT / usual[0])}"


def _named_home() -> str:
    return next(name for name in HOMES if os.environ.get(name))


def _usual(root: Path) -> Iterator[Path]:
    """Where CANN's libraries lie after an installation."""
    home = cann_home()
    if home is not None:
        yield home / "lib64"
    yield from (root / folder for folder in table()["cann"]["folders"])


def _linked(root: Path) -> Iterator[Path]:
    """Where the dynamic linker looks."""
    yield from (Path(one) for one in os.environ.get("LD_LIBRARY_PATH", "").split(":") if one)
    for file in sorted((root / "etc/ld.so.conf.d").glob("*.conf")):
        yield from (root / line.strip().lstrip("/") for line in file.read_text("utf-8", "replace").splitlines() if line)
    for folder in ("lib", "lib64", "usr/lib", "usr/lib64", "usr/local/lib"):
        yield root / folder
        yield from (root / folder).glob("*-linux-gnu")


def _lies_in(name: str, folders: list[Path]) -> bool:
    return any((folder / name).exists() for folder in folders)


def why_not_imported(error: BaseException) -> str:
    """One line for what `import torch_npu` raised: the first cause, with the way out."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text = " ".join(str(cause).split())
    if found := re.search(r"lib[\w.+-]+\.so[\w.]*", text):
        part = "boost" if found[0].startswith("libatb") else "toolkit"
        return f"torch-npu needs {found[0]} of CANN ({text}): {script(part=part)}, or install CANN"
    return (
        f"torch-npu {version('torch-npu')} does not load with torch {version('torch')} ({text}): see `pagedkv doctor "
        "--backend ascend` for the versions that go together"
    )


# -- sets --------------------------------------------------------------------------------------------------------------


def known_set() -> Known | None:
    """The row of the torch-npu that is installed; None for one that nobody has named."""
    npu = version("torch-npu")
    return next((row for row in sets() if row.torch_npu == npu), None)


def set_line() -> str:
    """What is known of the torch-npu that is installed, and what it goes with."""
    npu, row = version("torch-npu"), known_set()
    if npu is None:
        return "no torch-npu, no set to look up"
    if row is None:
        return f"torch-npu {npu} is in no set known here; known are {', '.join(one.torch_npu for one in sets())}"
    beside = [f"torch {row.torch}", f"CANN {row.cann}" if row.cann else "a CANN that is named nowhere"]
    return f"torch-npu {npu} goes with {' and '.join(beside)}, {STATES[row.state]} ({row.source})"


def why_not_this_set() -> str | None:
    """One line where Python or CANN are not those that are named for this torch-npu: no refusal, nobody tried it."""
    row, cann, python = known_set(), cann_version(), platform.python_version()
    if row is None:
        return None
    if row.python and not SpecifierSet(row.python).contains(python, prereleases=True):
        return f"torch-npu {row.torch_npu} is named for Python {row.python}, this is {python} ({row.source})"
    if row.cann and cann is not None and release(cann) != row.cann:
        return f"torch-npu {row.torch_npu} is named for CANN {row.cann}, CANN {cann} is installed ({row.source})"
    return None
