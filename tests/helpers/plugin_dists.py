"""Builds small backend distributions on the fly: a module next to a real .dist-info or .egg-info folder.

To `importlib.metadata` such a folder on `sys.path` is an installed distribution; nothing is downloaded or built.
"""

from __future__ import annotations

import hashlib
import textwrap
import zipfile
from pathlib import Path

HEAD = """
    import dataclasses, json, os, sys, time
    from pagedkv.api import AttentionBackend, Capabilities, Descriptor, DeviceInfo, Option, PoolCost
"""

BACKEND = {
    "capabilities": "def capabilities(self): return CAPABILITIES",
    "pool_cost": "def pool_cost(self, spec): return PoolCost(per_block=1, fixed=0)",
    "alloc_pool": "def alloc_pool(self, spec): raise NotImplementedError",
    "plan": "def plan(self, pool, group, batch): return None",
    "attend": "def attend(self, plan, layer, q, k, v, out, *, extra=None): return None",
    "copy_blocks": "def copy_blocks(self, src, dst, pairs, *, after=None): return None",
}

CAPABILITIES = """
    CAPABILITIES = Capabilities.of(
        dtypes=("fp32", "bf16"), kv_dtypes=("fp32", "bf16"), block_sizes=(frozenset({8, 16}), (32, 32, 128)),
        head_dims=(frozenset({64, 128}),), preferred_block_size=32, features=frozenset({"window", "nan_safe"}),
        exclusions=(({"dtype": "bf16", "head_dim": frozenset({128}), "block_size": (8, 8, 16)}, "no such kernel"),),
        extensions={"graph": (1, 0)}, a_field_of_tomorrow=3,
    )
"""


def descriptor(
    name: str = "fake",
    /,
    *,
    api: str | None = "(1, 0)",
    score: int = 60,
    reason: str = "",
    top: str = "",
    without: tuple[str, ...] = (),
    backend_without: tuple[str, ...] = (),
    backend: dict[str, str] | None = None,
    capabilities: str = CAPABILITIES,
    **members: str,
) -> str:
    """Source of a plugin module whose `Fake` is a descriptor; `members` replaces one member's source each.

    `backend` does so for the instance that it creates.
    """
    device = f'DeviceInfo.of(index=0, kind="fake card", total=100, free=50, score={score}, reason={reason!r}, new=1)'
    own = {
        "name": f"name = {name!r}",
        "api": f"api = {api}" if api else "",
        "options": 'options = (Option(name="level", type=int, default=3, help="how much", aliases=("depth",)),)',
        "probe": f"def probe(self): return ({device},)",
        "describe": "def describe(self, device): return CAPABILITIES",
        "create": "def create(self, device, options, world): return FakeBackend()",
        "diagnose": 'def diagnose(self): return {"driver": "7.1"}',
    } | members
    parts = [textwrap.dedent(HEAD), textwrap.dedent(top), textwrap.dedent(capabilities)]
    methods = {k: v for k, v in (BACKEND | (backend or {})).items() if k not in backend_without}
    parts.append(_class("FakeBackend(AttentionBackend)", methods))
    parts.append(_class("Fake(Descriptor)", {k: v for k, v in own.items() if k not in without}))
    return "\n".join(parts)


def install(
    folder: Path,
    source: str,
    *,
    name: str = "fake",
    distribution: str = "pagedkv-fake",
    version: str = "1.5",
    module: str | None = None,
    form: str = "dist-info",
) -> Path:
    """Put module and metadata into `folder`, which belongs on `sys.path`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    safe = distribution.replace("-", "_")
    module = module or f"{safe}_{hashlib.sha256(f'{folder}{source}'.encode()).hexdigest()[:8]}"
    (folder / f"{module}.py").write_text(source)
    info = folder / (f"{safe}-{version}.dist-info" if form == "dist-info" else f"{safe}.egg-info")
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (info / ("METADATA" if form == "dist-info" else "PKG-INFO")).write_text(metadata)
    (info / "entry_points.txt").write_text(f"[pagedkv.backends]\n{name} = {module}:Fake\n")
    if form == "dist-info":
        (info / "RECORD").write_text(f"{module}.py,,\n{info.name}/METADATA,,\n{info.name}/entry_points.txt,,\n")
    return folder


def _class(head: str, members: dict[str, str]) -> str:
    body = "\n".join(textwrap.indent(textwrap.dedent(source).strip("\n"), "    ") for source in members.values())
    return f"class {head}:\n{body or '    pass'}\n"


def wheel(folder: Path, source: str, *, name: str, distribution: str, version: str = "0.3") -> Path:
    """A wheel file as a package index would serve it, for `pip install`."""
    safe = distribution.replace("-", "_")
    info = f"{safe}-{version}.dist-info"
    files = {
        f"{safe}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[pagedkv.backends]\n{name} = {safe}:Fake\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    path = folder / f"{safe}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path


def source_tree(folder: Path, source: str, *, name: str, distribution: str, version: str = "0.3") -> Path:
    """A project as its author keeps it: pyproject.toml and one module."""
    module = distribution.replace("-", "_")
    folder.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    (folder / "pyproject.toml").write_text(
        f"""
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{distribution}"
version = "{version}"
dependencies = ["pagedkv"]

[project.entry-points."pagedkv.backends"]
{name} = "{module}:Fake"

[tool.setuptools]
py-modules = ["{module}"]
"""
    )
    return folder
