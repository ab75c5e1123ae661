"""Folders that look like the root of another machine, and stubs of torch that a child process imports in its place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

GIB = 1 << 30

MEMINFO = (
    "MemTotal: {total} kB\nMemFree: {free} kB\nMemAvailable: {available} kB\nSwapTotal: {swap} kB\nSwapFree: 0 kB\n"
)


def machine(folder: Path, files: Mapping[str, str]) -> Path:
    """A root with these files; returns it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def meminfo(total: float, available: float, *, free: float = 0.5, swap: float = 0.0) -> str:
    """/proc/meminfo; all in GiB."""
    kib = {"total": total, "free": free, "available": available, "swap": swap}
    return MEMINFO.format(**{name: int(value * GIB / 1024) for name, value in kib.items()})


def stub_torch(folder: Path, body: str = "", *, cuda: str = "None") -> Path:
    """A package `torch` whose import runs `body`; its folder belongs in front of the path."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text(f"__version__ = '2.13.0'\ngit_version = 'abc'\ncuda = {cuda}\n")
    top = "from torch import version\n__version__ = version.__version__\n"
    arches = (
        "class _C:\n    @staticmethod\n    def _cuda_getArchFlags(): return 'sm_80 sm_90'\n" if cuda != "None" else ""
    )
    (package / "__init__.py").write_text(top + arches + body)
    return folder
