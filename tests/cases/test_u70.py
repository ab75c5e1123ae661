"""U70: a stale vendor plugin raises while registering; it must never be dropped for another backend without a word."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pagedkv import plugins
from pagedkv.api.errors import BackendLoadError
from pagedkv.cli.main import pagedkv
from tests.helpers.fake_machine import stub_torch
from tests.helpers.plugin_dists import descriptor, install

CAUSE = "ModuleNotFoundError: No module named 'vendor_sdk_of_last_year'"


@pytest.fixture(autouse=True)
def _stale_and_good(tmp_path, monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    install(tmp_path / "a", "import vendor_sdk_of_last_year", name="stale", distribution="stale-dist", version="0.1")
    install(tmp_path / "b", descriptor("good", score=90), name="good", distribution="good-dist")
    for folder in ("a", "b"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))


def run(*arguments: str):
    return CliRunner().invoke(pagedkv, arguments)


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_u70_named_it_is_a_hard_error_with_the_cause(monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("PAGEDKV_BACKEND", "stale")
    with pytest.raises(BackendLoadError) as caught:
        plugins.select("stale" if how == "argument" else None)
    assert CAUSE in str(caught.value) and "stale-dist 0.1" in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_u70_automatic_choice_warns_once_with_plugin_version_and_reason(caplog):
    chosen = plugins.select()
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "stale" in r.getMessage()]
    assert chosen.name == "good" and len(warnings) == 1
    assert "stale-dist 0.1" in warnings[0] and CAUSE in warnings[0]


def test_u70_the_list_shows_the_failed_one_and_succeeds():
    listed = run("backends", "--json")
    rows = {row["name"]: row for row in json.loads(listed.stdout)}
    assert listed.exit_code == 0
    assert rows["stale"]["status"] == "failed" and CAUSE in rows["stale"]["reasons"][0]
    assert (rows["stale"]["distribution"], rows["stale"]["version"]) == ("stale-dist", "0.1")
    assert rows["good"]["status"] == "ok"


def test_u70_doctor_fails_when_the_named_one_cannot_be_used(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(stub_torch(tmp_path / "torch")))
    named, automatic = run("doctor", "--backend", "stale"), run("doctor")
    assert named.exit_code == 2 and CAUSE in named.stdout
    assert automatic.exit_code == 1 and "would be chosen: good" in automatic.stdout and CAUSE in automatic.stdout
