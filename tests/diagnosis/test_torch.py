"""torch in a child process: stubs that load, raise, hang and die."""

from __future__ import annotations

import pytest

from pagedkv.diagnosis.torch import TorchCheck, missing_file, torch_findings
from tests.helpers.fake_machine import stub_torch


@pytest.fixture
def check(tmp_path, monkeypatch):
    def look(body="", limit=20.0, **settings):
        monkeypatch.syspath_prepend(str(stub_torch(tmp_path / "site", body, **settings)))
        child = TorchCheck(limit)
        try:
            return child.facts()
        finally:
            child.close()

    return look


def test_a_build_is_described(check):
    facts = check(cuda="'13.0'")
    assert (facts["version"], facts["builds"], facts["architectures"]) == (
        "2.13.0",
        {"cuda": "13.0"},
        ["sm_80", "sm_90"],
    )
    assert list(torch_findings(facts)) == []


def test_a_build_for_processors_alone_has_no_toolkit(check):
    facts = check()
    assert (facts["builds"], facts["architectures"], facts["error"]) == ({}, [], [])


def test_u108_a_library_that_cannot_be_opened_is_named(check):
    (finding,) = torch_findings(check("raise ImportError('libfoo.so: cannot open shared object file')"))
    assert finding.level == "broken" and finding.why.startswith("libfoo.so cannot be opened")
    assert finding.command == "pip install --force-reinstall torch"


def test_u108_a_known_library_comes_with_the_script_to_source(check):
    body = """
try:
    raise ImportError('/usr/local/x/libatb.so: cannot open shared object file: No such file or directory')
except ImportError as error:
    raise RuntimeError('Failed to load the backend extension: torch_npu') from error
"""
    facts = check(body)
    (finding,) = torch_findings(facts)
    assert facts["error"][0].startswith("RuntimeError: Failed to load") and len(facts["error"]) == 2
    assert finding.why.startswith("libatb.so: CANN's") and "Failed to load the backend extension" in finding.why
    assert finding.command == "source /usr/local/Ascend/nnal/atb/set_env.sh"


def test_an_import_that_hangs_is_stopped(check):
    facts = check("import sys, time; print('looking for devices', file=sys.stderr, flush=True); time.sleep(60)", 1.0)
    (finding,) = torch_findings(facts)
    assert facts["hangs"] and finding.level == "broken" and finding.what == "importing torch hangs"
    assert "within 1 s" in finding.why and "looking for devices" in finding.why and finding.command


def test_an_import_that_dies_is_told_by_its_signal(check):
    (finding,) = torch_findings(check("import os; os.kill(os.getpid(), 4)"))
    assert finding.level == "broken" and "SIGILL" in finding.why and finding.command


def test_garbage_on_standard_output_is_no_answer(check):
    facts = check("print('{\"torch\": 1}', flush=True)")
    assert facts["version"] == "2.13.0" and facts["error"] == []


def test_no_torch_at_all(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check = TorchCheck()
    (finding,) = torch_findings(check.facts())
    check.close()
    assert (finding.level, finding.command) == ("broken", "pip install torch")


@pytest.mark.parametrize(
    ("causes", "file"),
    [
        (["ImportError: libfoo.so.1: cannot open shared object file"], "libfoo.so.1"),
        (["RuntimeError: no", "OSError: /opt/vendor/lib/libbar.so: wrong ELF class"], "libbar.so"),
        (['OSError: [WinError 126] Error loading "C:\\x\\c10.dll" or one of its dependencies'], "c10.dll"),
        (["ValueError: calibration is wrong"], None),
    ],
)
def test_the_file_of_an_import_error(causes, file):
    assert missing_file(causes) == file
