"""U80: plugins import from deep inside the core, and its files move; ours import `pagedkv.api` and nothing else of it.

That no public name disappears is watched by tests/api/test_surface.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = [ROOT / "pyproject.toml", *sorted((ROOT / "plugins").glob("*/pyproject.toml"))]
ENTRY = re.compile(r'^\[project\.entry-points\."pagedkv\.backends"\]\n((?:.+\n)+)', re.MULTILINE)


def backends() -> Iterator[tuple[str, str, Path]]:
    """(name, module of the entry point, folder that has its package) of every backend that lives in this tree."""
    for project in PROJECTS:
        section = ENTRY.search(project.read_text("utf-8") + "\n")
        assert section, project
        for name, module in re.findall(r'^([\w-]+) = "([\w.]+):', section[1], re.MULTILINE):
            homes = [project.parent, project.parent / "backends"]
            yield name, module, next(home for home in homes if (home / module.split(".")[0]).is_dir())


BACKENDS = {name: (module, home) for name, module, home in backends()}


def sources(module: str, home: Path) -> list[Path]:
    """The files of the backend: its package, that is the folder of the module that the entry point names."""
    path = home.joinpath(*module.split("."))
    return sorted((path if path.is_dir() else path.parent).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """What of pagedkv a file imports, in dots, a relative import resolved against its own folder."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "pagedkv"}


def test_u80_the_backends_of_this_tree_are_all_looked_at():
    assert {"cpu", "template"} <= set(BACKENDS)
    assert all(sources(*BACKENDS[name]) for name in BACKENDS)


@pytest.mark.parametrize("name", BACKENDS)
def test_u80_a_backend_imports_the_contract_only(name):
    module, home = BACKENDS[name]
    own = module.rpartition(".")[0] if home.joinpath(*module.split(".")).with_suffix(".py").exists() else module
    for path in sources(module, home):
        foreign = {n for n in imported(path) if not f"{n}.".startswith(("pagedkv.api.", f"{own}."))}
        assert not foreign, f"{path.name} imports {sorted(foreign)}"


@pytest.mark.parametrize("name", BACKENDS)
def test_u80_loading_its_descriptor_loads_no_framework(name):
    module, home = BACKENDS[name]
    heavy = "('torch', 'transformers', 'stevedore', 'pagedkv.engine', 'pagedkv.core', 'pagedkv.models')"
    asked = f"print([m for m in {heavy} if m in sys.modules])"
    code = f"import sys; sys.path.insert(0, {str(home)!r}); import {module}; {asked}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"
