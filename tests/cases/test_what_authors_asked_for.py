"""The twelve things that authors of backends ask of an engine, each held by one check here.

Most have tests of their own elsewhere (named in each docstring); these fail when the promise itself is taken back.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pagedkv import plugins
from pagedkv.api import API_VERSION, AttentionBackend, Descriptor, Pool, backend, extensions, records
from pagedkv.api.errors import BackendLoadError, BackendVersionError
from pagedkv.config import EngineConfig
from tests.conformance.mutants import plugins as _  # noqa: F401 - fills the table
from tests.conformance.mutants import table
from tests.helpers.plugin_dists import descriptor, install

try:
    import tomllib
except ImportError:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
MODULES = (records, extensions)
RECORDS = [value for module in MODULES for value in vars(module).values() if dataclasses.is_dataclass(value)]


def toml(path: str):
    return tomllib.loads((ROOT / path).read_text("utf-8"))


def test_01_a_small_versioned_contract_whose_public_surface_is_reviewed():
    """tests/api/test_surface.py, U78."""
    surface = (ROOT / "tests" / "api" / "surface.txt").read_text("utf-8")
    assert f"API_VERSION = {API_VERSION}" in surface
    assert all(f"class {record.__name__}" in surface for record in RECORDS)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_02_records_grow_without_breakage(record):
    """Every field is given by name, so that a new one never moves another. tests/plugins/test_growth.py."""
    kinds = {p.kind for p in inspect.signature(record).parameters.values()}
    assert kinds <= {inspect.Parameter.KEYWORD_ONLY} and record.__dataclass_params__.frozen


def test_03_errors_at_load_are_early_and_name_plugin_version_and_what_is_missing(tmp_path, monkeypatch):
    """tests/plugins/test_broken.py, U70, U79."""
    install(tmp_path, descriptor("lame", without=("describe",)), name="lame", distribution="lame-dist", version="4.2")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendLoadError, match=r"lame-dist 4\.2.*describe"):
        plugins.select("lame")


def test_04_one_public_import_path():
    """U80: everything a backend may import is below `pagedkv.api`, which imports nothing else of ours."""
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "pagedkv" / "api").glob("*.py"))
    assert set(re.findall(r"^(?:from|import) (pagedkv[\w.]*)", sources, re.M)) and all(
        name.startswith("pagedkv.api") for name in re.findall(r"^(?:from|import) (pagedkv[\w.]*)", sources, re.M)
    )


def test_05_the_backend_owns_layout_and_bytes():
    """U84: all that the core sees of a pool."""
    assert {name for name in dir(Pool) if not name.startswith("_")} == {"close", "num_blocks", "placement"}


def test_06_little_to_implement():
    """tests/plugins/test_template.py: a whole backend in 300 lines."""
    assert len(AttentionBackend.__abstractmethods__) == 6 and len(Descriptor.__abstractmethods__) == 3


def test_07_an_open_registry():
    """U82: our own backends come through the group that everybody's do, by the name of their entry points."""
    ours = {entry.name for entry in importlib.metadata.entry_points(group="pagedkv.backends") if entry.dist is not None}
    assert {"cpu", "loopback", "null"} <= ours and "str | None" in EngineConfig.__annotations__["backend"]


def test_08_a_kit_that_runs_without_the_device_and_is_itself_tested():
    """tests/conformance."""
    assert len(table.MUTANTS) >= 25
    assert "pytest11" not in (ROOT / "pyproject.toml").read_text("utf-8")


def test_09_declared_capabilities():
    """U85, U86: what a record of sizes, dtypes and features leaves out is refused before a weight is read."""
    names = {field.name for field in dataclasses.fields(records.Capabilities)}
    assert {"dtypes", "kv_dtypes", "block_sizes", "head_dims", "features", "placements", "graph"} <= names


def test_10_loading_in_every_process_and_no_device_at_discovery():
    """U81, U87: workers are told whom to load; nothing is registered by a call that only the parent makes."""
    assert callable(plugins.reselect)
    assert not [name for name in dir(plugins) if "register" in name.lower()]


def test_11_hooks_for_memory_collectives_and_graphs_belong_to_the_backend():
    """tests/test_structure.py: no hardware word in the core."""
    assert {"memory", "kv_budget", "communicator", "extension", "op"} <= vars(AttentionBackend).keys()
    assert {"options", "diagnose", "tool"} <= vars(Descriptor).keys()


def test_12_a_dependency_policy_that_lets_plugins_live(tmp_path, monkeypatch):
    """A plugin depends on plain pagedkv, no extra of ours replaces torch, and the version is checked when it loads."""
    assert toml("plugins/template/pyproject.toml")["project"]["dependencies"] == ["pagedkv", "numpy"]
    ours = toml("pyproject.toml")["project"]
    assert [need for need in ours["dependencies"] if need.startswith("torch")] == ["torch>=2.10"]
    extras = [Requirement(need).name for needs in ours["optional-dependencies"].values() for need in needs]
    assert "torch-npu" in extras and "torch" not in extras
    install(tmp_path, descriptor("late", api="(2, 0)"), name="late", distribution="late-dist")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BackendVersionError, match=rf"2\.0.*{backend.API_VERSION[0]}\.{backend.API_VERSION[1]}"):
        plugins.select("late")
