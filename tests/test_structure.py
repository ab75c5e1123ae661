"""Who may import whom, where a hardware word may stand, and what no module of ours may do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "pagedkv").rglob("*.py"), *(ROOT / "backends").rglob("*.py")])
HARDWARE = (
    "amdgpu|ascend|cann|cublas|cuda|cudnn|gpu|gpus|hccl|hip|jetson|mps|musa|nccl|npu|nvidia|nvml|orin|rocm|"
    "tegra|tpu|triton|xpu"
)
WORD = re.compile(rf"(?<![a-z])(?:{HARDWARE})(?![a-z])")
DATA = {"install_hints.toml", "diagnosis/known.toml", "planning/devices.toml", "planning/rates.toml"}
"""Data files of the core where a hardware word may stand."""
ACCEPTED_NAMES = ("gpu_memory_utilization", "num_gpu_blocks_override")
"""Names that people bring with them; the second only to be told today's name."""

ENGINE = {"api", "core", "models", "ops", "sampling", "plugins", "config", "environment", "engine", "logs"}
ROOMS: dict[str, set[str]] = {
    "api": set(),
    "errors": {"api"},
    "environment": set(),
    "config": {"api"},
    "core": {"api"},
    "ops": {"api"},
    "models": {"api", "ops"},
    "sampling": {"api"},
    "checking": {"api"},
    "plugins": {"api", "environment", "checking"},
    "engine": ENGINE,
    "diagnosis": {"api", "config", "environment", "plugins", "engine", "planning"},
    "logs": {"api", "environment"},
    "progress": {"api", "engine"},
    "llm": ENGINE | {"logs", "progress"},
    "async_llm": ENGINE | {"logs", "progress"},
    "server": ENGINE | {"logs", "progress"},
    "entrypoints": {"cli"},
    "conformance": ENGINE | {"llm", "checking"},
    "planning": ENGINE,
    "cli": ENGINE | {"llm", "logs", "progress", "server", "conformance", "diagnosis", "planning"},
    "pagedkv": ENGINE | {"llm", "async_llm"},
}
"""Room -> the rooms it may import, itself and `errors` (the tree of `api`, re-exported) aside."""

TYPE_ONLY = {("sampling", "models")}
"""Arrows that may be drawn for a type annotation only, under `if TYPE_CHECKING`."""

EXTENDS = {("pagedkv_jetson", "pagedkv_cuda"), ("pagedkv_cuda", "pagedkv_cpu")}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "backends" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[str, bool]]:
    """(dotted name, under TYPE_CHECKING) of everything the module imports, at the top or inside a function."""
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in typed) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".") if is_package else module.split(".")[:-1]
            start = ".".join(base[: len(base) - node.level + 1] + ([node.module] if node.module else []))
            start = start if node.level else str(node.module)
            yield from ((f"{start}.{alias.name}", id(node) in typed) for alias in node.names)


def room(name: str) -> str:
    """The room of a dotted name: `pagedkv.LLM` and its like live behind the lazy front, in `llm`."""
    parts = name.split(".")
    if len(parts) == 1:
        return "pagedkv"
    return parts[1] if parts[1] in ROOMS else "llm"


def arrows(path: Path) -> Iterator[tuple[str, str, bool]]:
    module = module_name(path)
    for name, typed in imports(parse(path), module, path.name == "__init__.py"):
        if name.split(".")[0] == "pagedkv" and name not in ("pagedkv", "pagedkv.__version__"):
            yield module, name, typed


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "pagedkv")], ids=ids)
def test_imports_point_one_way(path):
    here = room(module_name(path))
    assert module_name(path) == "pagedkv" or module_name(path).split(".")[1] in ROOMS, "give the new room its arrows"
    for _, name, typed in arrows(path):
        there = room(name)
        allowed = there in ROOMS[here] | {here, "errors"} or (typed and (here, there) in TYPE_ONLY)
        assert allowed, f"{here} may not import {name}"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "backends")], ids=ids)
def test_backends_import_the_contract_and_nothing_else_of_ours(path):
    own = module_name(path).split(".")[0]
    for name, _ in imports(parse(path), module_name(path), path.name == "__init__.py"):
        top = name.split(".")[0]
        if top == "pagedkv":
            assert name.startswith("pagedkv.api."), f"a backend imports pagedkv.api only, not {name}"
        elif top.startswith("pagedkv_"):
            assert top == own or (own, top) in EXTENDS, f"{own} may not import {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "pagedkv" / "api").glob("*.py")), ids=ids)
def test_the_contract_needs_the_standard_library_and_numpy(path):
    tops = {name.split(".")[0] for name, _ in imports(parse(path), module_name(path), path.name == "__init__.py")}
    own = {"pagedkv", "numpy"} | ({"torch"} if path.name.startswith("torch") else set())  # imported on request only
    assert tops <= own | sys.stdlib_module_names


@pytest.mark.parametrize("name", ["loopback", "null"])
def test_u80_the_backends_of_the_kit_import_the_contract_and_themselves_only(name):
    own = f"pagedkv.conformance.{name}."
    paths = sorted((ROOT / "pagedkv" / "conformance" / name).rglob("*.py"))
    assert {path.name for path in paths} >= {"descriptor.py", "backend.py"}
    for path in paths:
        for imported, _ in imports(parse(path), module_name(path), path.name == "__init__.py"):
            ours = imported.startswith(("pagedkv", "pagedkv_"))
            assert not ours or imported.startswith(("pagedkv.api.", own)), f"{ids(path)} imports {imported}"


@pytest.mark.parametrize("name", ["loopback", "null"])
def test_a_descriptor_of_the_kit_imports_the_standard_library_and_the_contract_at_the_top(name):
    tree = parse(ROOT / "pagedkv" / "conformance" / name / "descriptor.py")
    tree.body = [node for node in tree.body if isinstance(node, _IMPORTS)]
    tops = {imported.split(".")[0] for imported, _ in imports(tree, "descriptor", False)}
    assert tops - {"pagedkv"} <= sys.stdlib_module_names
    assert all(n.startswith("pagedkv.api.") for n, _ in imports(tree, "descriptor", False) if n.startswith("pagedkv"))


def test_the_arrows_have_no_cycle():
    def reach(start: str, seen: frozenset[str] = frozenset()) -> set[str]:
        assert start not in seen, f"cycle through {start}"
        return {start}.union(*(reach(there, seen | {start}) for there in ROOMS[start] - {start}))

    assert "api" in reach("cli")


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_no_module_needs_an_oracle_of_the_tests(path):
    tops = {name.split(".")[0] for name, _ in imports(parse(path), module_name(path), path.name == "__init__.py")}
    if path == ROOT / "pagedkv" / "models" / "bridge.py":
        top_level = {alias.name for n in parse(path).body if isinstance(n, ast.Import) for alias in n.names}
        assert "transformers" in tops - top_level  # the one place, and only once it is used
        tops -= {"transformers"}
    if path.is_relative_to(ROOT / "pagedkv" / "conformance"):
        tops -= {"pytest"}  # the kit is a set of pytest modules
    assert not tops & {"transformers", "gguf", "sentencepiece", "pytest", "hypothesis", "vllm"}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "pagedkv")], ids=ids)
def test_no_hardware_word_in_the_core(path):
    text = path.read_text("utf-8").lower()
    for name in ACCEPTED_NAMES:
        text = text.replace(name, "")
    assert WORD.findall(text) == []


def test_no_hardware_word_in_data_of_the_core_but_in_the_files_named_here():
    for path in (ROOT / "pagedkv").rglob("*.toml"):
        if path.relative_to(ROOT / "pagedkv").as_posix() not in DATA:
            assert WORD.findall(path.read_text("utf-8").lower()) == [], path


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_no_attribute_of_an_imported_name_is_replaced_and_nothing_is_asserted(path):
    tree = parse(path)
    bound = {(a.asname or a.name).split(".")[0] for n in ast.walk(tree) if isinstance(n, _IMPORTS) for a in n.names}
    replaced = [f"line {line}: {text}" for line, text in _patches(tree, bound)]
    asserted = [f"line {node.lineno}: assert" for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert replaced == []
    assert path.is_relative_to(ROOT / "pagedkv" / "conformance") or asserted == []


_IMPORTS = (ast.Import, ast.ImportFrom)


def _patches(tree: ast.Module, bound: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [t for target in node.targets for t in _flat(target)]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif _is_setattr(node) and _root(node.args[0]) in bound:
            yield node.lineno, ast.unparse(node)
        for target in targets:
            if isinstance(target, ast.Attribute) and _root(target) in bound:
                yield target.lineno, ast.unparse(target)


def _is_setattr(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("setattr", "delattr") and len(node.args) > 1


def _flat(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for item in target.elts:
            yield from _flat(item)
    else:
        yield target


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch.nn.Linear.forward = f", 1),
        ("from torch import nn\nsetattr(nn.Linear, 'forward', f)", 1),
        ("import a, b\na.x, b.y = 1, 2", 2),
        ("import a\nself.a = a.x\nowner.name = 1\nx = {a.b: 1}", 0),
    ],
)
def test_the_patch_detector_itself(source, found):
    assert len(list(_patches(ast.parse(source), {"torch", "nn", "a", "b"}))) == found


@pytest.mark.parametrize(
    ("text", "found"), [("the cuda path", 1), ("input output ascending timestamps", 0), ("x_npu_y NCCL2".lower(), 2)]
)
def test_the_word_detector_itself(text, found):
    assert len(WORD.findall(text)) == found


def test_the_contract_core_plugins_and_command_load_no_torch():
    core = [module_name(p) for p in SOURCES if p.is_relative_to(ROOT / "pagedkv" / "core")]
    modules = ["pagedkv.api", *core, "pagedkv.plugins", "pagedkv.config", "pagedkv.cli.main", "pagedkv.cli.doctor"]
    checks = "".join(f"import {name}\nassert 'torch' not in sys.modules, '{name}'\n" for name in modules)
    done = subprocess.run([sys.executable, "-c", f"import sys\n{checks}"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
