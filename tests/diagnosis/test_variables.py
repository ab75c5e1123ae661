"""Environment variables: misspelt ones, secrets, and folders that are not there."""

from __future__ import annotations

from pagedkv.diagnosis.known import known
from pagedkv.diagnosis.variables import variable_findings, variables


def findings(environ):
    return list(variable_findings(variables(environ, known()), known()))


def test_ours_and_those_of_toolkits_are_shown_and_no_others():
    environ = {"PAGEDKV_BACKEND": "cpu", "CUDA_VISIBLE_DEVICES": "0", "SECRET": "x", "PAGEDKV_NOSUCH": "hunter2"}
    facts = variables(environ, known())
    assert facts == {
        "PAGEDKV_BACKEND": "cpu",
        "PAGEDKV_NOSUCH": "set, but pagedkv does not read it",
        "CUDA_VISIBLE_DEVICES": "0",
    }


def test_a_key_of_the_servers_is_not_shown():
    environ = {"PAGEDKV_API_KEY": "hunter2"}
    assert variables(environ, known()) == {"PAGEDKV_API_KEY": "set"} and findings(environ) == []


def test_a_misspelt_variable_comes_with_the_right_name():
    (finding,) = findings({"PAGEDKV_BACKED": "cpu"})
    assert finding.level == "warning" and "PAGEDKV_BACKEND may be meant" in finding.why
    assert finding.command == 'export PAGEDKV_BACKEND="$PAGEDKV_BACKED"; unset PAGEDKV_BACKED'
    (finding,) = findings({"PAGEDKV_QQQQQQQQ": "1"})
    assert finding.command == "unset PAGEDKV_QQQQQQQQ" and "may be meant" not in finding.why


def test_a_toolkits_folder_that_is_not_there(tmp_path):
    assert findings({"ASCEND_HOME_PATH": str(tmp_path), "CUDA_HOME": ""}) == []
    (finding,) = findings({"ASCEND_HOME_PATH": str(tmp_path / "gone")})
    assert (finding.level, finding.command) == ("warning", "unset ASCEND_HOME_PATH") and "gone" in finding.what


def test_checking_every_call_is_noted():
    (finding,) = findings({"PAGEDKV_CHECK": "1"})
    assert (finding.level, finding.command) == ("note", "unset PAGEDKV_CHECK")
    assert findings({"PAGEDKV_CHECK": "0"}) == []
