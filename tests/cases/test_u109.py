"""U109: core and plugin want different versions of torch; the plugin must be refused with both, never run half."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from pagedkv import plugins
from pagedkv.api.errors import BackendLoadError, BackendUnavailable
from pagedkv.cli.main import pagedkv
from pagedkv.plugins.requirements import satisfies, unmet
from pagedkv_ascend.descriptor import AscendDescriptor
from tests.backends.ascend import machine
from tests.helpers.plugin_dists import descriptor, install

HERE = importlib.metadata.version("torch")
BOTH = f"vendor-dist needs torch==0.0.1, torch {HERE} is installed"


@pytest.fixture
def vendor(tmp_path, monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    folder = install(tmp_path / "site", descriptor("vendor", score=95), name="vendor", distribution="vendor-dist")
    monkeypatch.syspath_prepend(str(folder))

    def requires(line: str) -> None:
        with next(folder.glob("*.dist-info/METADATA")).open("a") as metadata:
            metadata.write(f"Requires-Dist: {line}\n")

    return requires


def test_u109_named_it_is_refused_with_both_versions(vendor):
    vendor("torch==0.0.1")
    with pytest.raises(BackendLoadError) as caught:
        plugins.select("vendor")
    assert BOTH in str(caught.value) and "pip install -U vendor-dist" in str(caught.value)


def test_u109_automatic_choice_and_listing_say_it_too(vendor, caplog):
    vendor("torch==0.0.1")
    assert plugins.select().name == "cpu"
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and BOTH in r.getMessage()]
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(pagedkv, ["backends", "--json"]).stdout)}
    assert rows["vendor"]["status"] == "failed" and BOTH in rows["vendor"]["reasons"][0]


def test_u109_a_version_that_fits_loads(vendor):
    vendor("torch>=2.10")
    vendor("numpy==0.0.1; extra == 'never'")
    vendor("numpy==0.0.2")  # another package's range is a finding of doctor, no reason to refuse
    assert plugins.select("vendor").name == "vendor"
    assert [str(one).split(",")[0] for one in unmet("vendor-dist")] == ["vendor-dist needs numpy==0.0.2"]


def test_u109_core_has_no_upper_pin_on_torch():
    (torch,) = [r for r in map(Requirement, importlib.metadata.requires("pagedkv") or ()) if r.name == "torch"]
    assert {specifier.operator for specifier in torch.specifier} == {">="}


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.10.0a0+b558c98.nv25.11", ">=2.10", True),
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.9.1", ">=2.10", False),
        ("2.14.0", ">=2.10", True),
        ("2.14.0", "<2.14", False),
        ("no version", ">=2.10", False),
    ],
)
def test_u109_a_build_counts_as_the_release_it_names(version, wanted, fits):
    assert satisfies(version, wanted) is fits


def test_u109_the_ascend_backend_says_both_versions(tmp_path, monkeypatch):
    """What the extension pins is its own, so that the backend itself compares, before anything is loaded."""
    machine.bare(monkeypatch)
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.setattr(AscendDescriptor.__init__, "__defaults__", (machine.driver(tmp_path),))
    machine.installed(monkeypatch, torch=HERE, torch_npu="0.1.0")
    with pytest.raises(BackendUnavailable) as caught:
        plugins.select("ascend")
    assert f"torch-npu 0.1.0 is made for torch 0.1, torch {HERE} is installed: pip install 'torch==0.1.*'" in str(
        caught.value
    )
