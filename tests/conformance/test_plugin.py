"""The kit's pytest plugin: what it refuses, what it counts, and that nobody else's pytest notices it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv.api import Capabilities
from pagedkv.checking import CheckedBackend
from pagedkv.conformance import plugin
from pagedkv.conformance.certificate import Certificate
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.subject import Subject
from pagedkv_cpu.backend import CpuBackend

ROOT = plugin.HERE.parents[1]
CAN = Capabilities(
    dtypes=("fp32",),
    kv_dtypes=("fp32",),
    block_sizes=((1, 1, 64),),
    head_dims=((1, 1, 64),),
    preferred_block_size=16,
    features=frozenset({"window", "sinks"}),
    extensions={"graph": (1, 0)},
)


def run_pytest(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


# -- nobody else notices -----------------------------------------------------------------------------------------------


def test_our_metadata_registers_nothing_with_pytest():
    groups = {entry.group for entry in importlib.metadata.distribution("pagedkv").entry_points}
    assert "pagedkv.backends" in groups and "pytest11" not in groups


def test_a_plain_run_elsewhere_does_not_know_the_options(tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    assert run_pytest("-q", cwd=tmp_path).returncode == 0
    done = run_pytest("--backend", "cpu", cwd=tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "unrecognized arguments: --backend" in done.stderr


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name the backend to test: --backend NAME (`pagedkv backends` lists them)"),
        (("--backend", "nosuch"), "BackendNotFound: no installed backend is called 'nosuch'; installed backends: "),
        (("--backend", "cpu", "--backend-option", "threds=1"), "did you mean 'threads'?"),
        (("--backend", "cpu", "--backend-device", "7"), "there is no device 7"),
    ],
    ids=["no-name", "unknown", "option", "device"],
)
def test_what_cannot_be_tested_is_a_usage_error_that_says_what_to_do(arguments, words, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    given = ["-p", "pagedkv.conformance.plugin", "--pyargs", "pagedkv.conformance", "--rootdir", str(tmp_path)]
    assert pytest.main(["-c", os.devnull, *given, *arguments]) == pytest.ExitCode.USAGE_ERROR
    assert words in capfd.readouterr().err


# -- what it counts ----------------------------------------------------------------------------------------------------


def test_a_selection_is_never_complete_and_cases_of_others_do_not_count(tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own_numerics(): pass\n")
    file = tmp_path / "made.json"
    done = run_pytest(
        *("-p", "pagedkv.conformance.plugin", "--pyargs", "pagedkv.conformance", "test_own.py", "-q"),
        *("--backend", "cpu", "--backend-option", "threads=1", "--certificate", str(file)),
        *("-k", "own_numerics or (numerics and decode and sinks)"),
        cwd=tmp_path,
    )
    made = Certificate.from_json(file.read_text("utf-8"))
    assert done.returncode == 0, done.stdout
    assert f"{len(made.cases) + 1} passed" in done.stdout  # one of them is not the kit's
    assert {case.id.partition("[")[0] for case in made.cases} == {"test_numerics.py::test_every_declared_combination"}
    assert not made.complete and not made.passed and made.verdict("core") == "not reached"
    assert "some cases were left out, so no level is reached" in done.stdout
    assert all(case.error is not None and 0 <= case.error <= case.tolerance for case in made.cases)
    assert json.loads(file.read_text())["machine"]["torch"]  # the kit has loaded it


@pytest.mark.parametrize("chosen", ["pagedkv.conformance.test_growth", "pagedkv.conformance.test_growth::NAME"])
def test_one_section_or_case_alone_is_not_the_kit(chosen, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    with contextlib.closing(Subject("cpu", options={"threads": 1})) as subject:
        gatherer = plugin.Gatherer(subject)
        name = re.search(r"def (test_\w+)", (plugin.HERE / "test_growth.py").read_text()).group(1)
        given = ["-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "--pyargs"]
        code = pytest.main([*given, chosen.replace("NAME", name)], plugins=[plugin, gatherer])
        assert code == 0 and gatherer.cases and not gatherer.certificate().complete


def item(*marks):
    made = [getattr(pytest.mark, name).with_args(*arguments).mark for name, *arguments in marks]
    return SimpleNamespace(iter_markers=lambda wanted: (mark for mark in made if mark.name == wanted))


@pytest.mark.parametrize(
    ("marks", "applies"),
    [
        ((), True),
        ((("needs", "window"),), True),
        ((("needs", "window", "softcap"),), False),
        ((("needs", "window"), ("needs", "alibi")), False),
        ((("without", "alibi"),), True),
        ((("without", "alibi", "sinks"),), False),
        ((("extension", "graph"),), True),
        ((("extension", "canonical_kv"),), False),
        ((("placement", "device"),), True),
        ((("placement", "host"),), False),
        ((("applies", lambda can: can.preferred_block_size == 16),), True),
        ((("needs", "window"), ("applies", lambda can: can.async_copy)), False),
    ],
)
def test_which_cases_apply_follows_from_the_capabilities_alone(marks, applies):
    assert plugin._applies(item(*marks), CAN) is applies


def test_levels_are_called_for_by_what_is_declared():
    subject = SimpleNamespace(capabilities=CAN)
    assert plugin.declared(subject) == ("core", "copy", "graph", "engine")


# -- what it writes ----------------------------------------------------------------------------------------------------


def report(message, path="/somewhere/mine/backend.py", line=12):
    return SimpleNamespace(longrepr=SimpleNamespace(reprcrash=SimpleNamespace(message=message, path=path, lineno=line)))


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (report("AssertionError: worst error 3, allowed 1\nassert 3 <= 1"), "worst error 3, allowed 1"),
        (report("AssertionError: first\nsecond\nassert (1, 2) == 3\n  more"), "first\nsecond"),
        (report("assert 3 <= 1"), "assert 3 <= 1 (backend.py, line 12)"),
        (report("TypeError: no such thing"), "TypeError: no such thing (backend.py, line 12)"),
        (SimpleNamespace(longrepr=("a.py", 3, "Skipped: one core only")), "Skipped: one core only"),
        (SimpleNamespace(longrepr="while collecting"), "while collecting"),
    ],
)
def test_a_message_is_the_assertions_own_words_or_the_exception_and_its_place(found, text):
    assert plugin._message(found) == text


def test_a_message_without_end_is_cut_and_says_so():
    text = plugin._message(report(f"AssertionError: {'x' * 5000}"))
    assert text == f"{'x' * plugin.LONGEST_MESSAGE} ... (3000 characters more)"


def test_figures_are_plain_values_and_under_declared_features_are_all_kept():
    properties = [("check", (1.0, 2.0)), ("plan_ms", np.float32(0.5)), ("gap", float("inf")), ("plan_ms", 0.25)]
    properties += [("under_declared", "sinks"), ("under_declared", "alibi"), ("shape", "2x3")]
    assert plugin._figures(SimpleNamespace(user_properties=properties)) == {
        "checks": [(1.0, 2.0)],
        "plan_ms": 0.25,
        "gap": "inf",
        "shape": "2x3",
        "under_declared": ["sinks", "alibi"],
    }


@pytest.mark.parametrize(("error", "kept"), [(1.23456e-7, 1.23e-7), (0.0, 0.0), (float("inf"), None), (None, None)])
def test_errors_have_three_digits_and_what_is_not_finite_has_none(error, kept):
    assert plugin._rounded(error) == kept


def test_ids_have_no_folders_whatever_their_parameters_hold():
    assert plugin.short_id("a/b/test_c.py::test_d[int8/token_head-x::y]") == "test_c.py::test_d[int8/token_head-x::y]"


def test_cases_that_break_the_callers_laws_meet_the_backend_itself(monkeypatch):
    monkeypatch.setenv("PAGEDKV_CHECK", "1")
    with contextlib.closing(Subject("cpu", options={"threads": 1})) as subject:
        usual, breaking = Kit(subject, print), Kit(subject, print, checked=False)
        assert isinstance(usual.backend, CheckedBackend) and isinstance(usual.create(), CheckedBackend)
        own = breaking.create()
        assert {type(breaking.backend), type(own)} == {CpuBackend} and breaking.backend is not own
        usual.close()
        breaking.close()
    monkeypatch.delenv("PAGEDKV_CHECK")
    with contextlib.closing(Subject("cpu", options={"threads": 1})) as subject:
        assert subject.unchecked is subject.backend
