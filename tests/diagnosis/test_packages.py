"""Versions against requirements and against the table of pairs."""

from __future__ import annotations

import platform

import pytest

from pagedkv.diagnosis import packages
from pagedkv.diagnosis.known import known, read_known
from pagedkv.plugins.requirements import satisfies
from tests.helpers.plugin_dists import descriptor, install

TABLE = read_known("""
[[pair]]
package = "a"
versions = "==2.*"
beside = "b"
fits = "==3.1"
state = "declared"
source = "its maker"

[[pair]]
package = "a"
versions = "==2.*"
beside = "b"
fits = ">=3,<4"
state = "tested"
source = "us"

[[pair]]
package = "a"
versions = "==2.1"
beside = "c"
fits = "==2.1"
state = "declared"
source = "its maker"
strict = true

[[conflict]]
packages = ["b", "c"]
why = "they overwrite each other"
command = "pip uninstall c"
""")


@pytest.mark.parametrize(
    ("versions", "states"),
    [
        ({"a": "2.5", "b": "3.1"}, ["tested"]),
        ({"a": "2.5", "b": "3.2"}, ["tested"]),
        ({"a": "2.5", "b": "4.0"}, ["unknown"]),
        ({"a": "3.0", "b": "3.2"}, ["unknown"]),
        ({"a": "2.1", "c": "2.1.post4"}, ["declared"]),
        ({"a": "2.1", "c": "2.2"}, ["wrong"]),
        ({"a": "2.5", "b": "not installed"}, []),
        ({"b": "3.1", "c": "2.1"}, []),
    ],
)
def test_each_pair_that_is_here_is_judged(versions, states):
    assert [pair["state"] for pair in packages.pairs(versions, TABLE)] == states


@pytest.mark.parametrize(
    ("versions", "level", "command"),
    [
        ({"a": "2.5", "b": "4.0"}, "note", "pip install 'b==3.1'"),
        ({"a": "3.0", "b": "3.2"}, "note", "pip install 'a==2.*'"),
        ({"a": "2.1", "c": "2.2"}, "warning", "pip install 'c==2.1'"),
    ],
)
def test_a_pair_that_nobody_tried_is_a_note_and_a_wrong_one_a_warning(versions, level, command):
    (finding,) = packages.pair_findings(packages.pairs(versions, TABLE))
    assert (finding.level, finding.command) == (level, command)
    assert all(version in finding.what for version in versions.values())


def test_what_a_package_itself_requires_counts_where_no_row_says_more(tmp_path, monkeypatch):
    folder = install(tmp_path / "site", descriptor(), distribution="a", version="3.0")
    with next(folder.glob("*.dist-info/METADATA")).open("a") as metadata:
        metadata.write("Requires-Dist: b==3.2\n")
    monkeypatch.syspath_prepend(str(folder))
    (pair,) = packages.pairs({"a": "3.0", "b": "3.2"}, TABLE)
    assert (pair["state"], pair["source"]) == ("declared", "the metadata of the installed a")
    (pair,) = packages.pairs({"a": "3.0", "b": "3.3"}, TABLE)
    assert pair["state"] == "unknown"


def test_pairs_that_fit_are_no_finding():
    assert list(packages.pair_findings(packages.pairs({"a": "2.1", "b": "3.1", "c": "2.1"}, TABLE))) == []


def test_conflicts_count_only_where_all_are_installed():
    assert list(packages.conflict_findings({"b": "1", "c": "not installed"}, TABLE)) == []
    (finding,) = packages.conflict_findings({"b": "1", "c": "2"}, TABLE)
    assert (finding.level, finding.command) == ("warning", "pip uninstall c") and "b and c" in finding.what


def test_the_table_itself_is_sound():
    assert all(pair.source and satisfies("2", f">=0,{pair.fits}") in (True, False) for pair in known().pairs)
    assert {pair.state for pair in known().pairs} == {"tested", "declared"}
    together = {frozenset(conflict.packages) for conflict in known().conflicts}
    assert frozenset({"triton", "triton-ascend"}) in together
    assert all(library.command and library.why for library in known().libraries)
    assert known().library("libcuda.so.1").begins == "libcuda.so"  # the longest beginning
    assert known().library("libcudart.so.13").begins == "libcu"
    assert known().library("libzzz.so") is None


@pytest.mark.parametrize(
    ("torch", "beside", "version", "state"),
    [
        ("2.13.0+cpu", "triton", "3.9.0", "tested"),
        ("2.13.0+cu130", "triton", "3.7.1", "tested"),
        ("2.14.1", "triton", "3.8.0", "declared"),
        ("2.14.1", "triton", "3.9.0", "unknown"),
        ("2.10.0", "torch-npu", "2.10.0.post4", "declared"),
        ("2.13.0", "torch-npu", "2.10.0.post4", "wrong"),
    ],
)
def test_pairs_of_the_fact_sheet(torch, beside, version, state):
    judged = packages.pairs({"torch": torch, beside: version}, known())
    assert [pair["state"] for pair in judged if pair["beside"] == beside] == [state]


def test_this_interpreter_is_in_the_report():
    (pair,) = [p for p in packages.pairs({"torch": "2.13.0"}, known()) if p["beside"] == "python"]
    assert pair["beside_version"] == platform.python_version()


def test_what_a_plugin_requires_and_does_not_find(tmp_path, monkeypatch):
    folder = install(tmp_path / "site", descriptor(), distribution="pagedkv-fake")
    with next(folder.glob("*.dist-info/METADATA")).open("a") as metadata:
        metadata.write("Requires-Dist: numpy<1\nRequires-Dist: vendor-sdk>=7\nRequires-Dist: click\n")
    monkeypatch.syspath_prepend(str(folder))
    wrong, missing = [f for f in packages.requirement_findings(["pagedkv-fake"]) if "pagedkv-fake" in f.what]
    assert (
        wrong.what.startswith("pagedkv-fake needs numpy<1, numpy ") and wrong.command == "pip install -U pagedkv-fake"
    )
    assert missing.what == "pagedkv-fake needs vendor-sdk>=7, it is not installed"
    assert missing.command == "pip install 'vendor-sdk>=7'"
    assert {wrong.level, missing.level} == {"warning"}
