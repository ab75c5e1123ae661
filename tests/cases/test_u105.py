"""U105: a board whose torch was built without support for it ends on the processor; doctor must say so, non-zero."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pagedkv.cli.main import pagedkv
from tests.helpers.fake_machine import stub_torch
from tests.helpers.plugin_dists import descriptor, install

RELEASE = "# R36 (release), REVISION: 4.3"
WHEEL = "pip install torch --index-url WHEELS_OF_THE_BOARD"
PROBE = f"""
def probe(self):
    if "R36" in open(os.environ["FAKE_RELEASE"]).read():
        why = "torch 2.13.0 is built without CUDA: {WHEEL}"
        return (DeviceInfo(index=0, kind="Orin board", total=8 << 30, free=4 << 30, unified=True, reason=why),)
    return (DeviceInfo(index=0, kind="no board", reason="this is no such board"),)
"""


@pytest.fixture
def board(tmp_path, monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.syspath_prepend(str(stub_torch(tmp_path / "torch")))
    install(tmp_path / "site", descriptor("board", probe=PROBE), name="board", distribution="board-dist")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    release = tmp_path / "nv_tegra_release"
    release.write_text(RELEASE)
    monkeypatch.setenv("FAKE_RELEASE", str(release))
    return release


def doctor(*arguments: str):
    result = CliRunner().invoke(pagedkv, ["doctor", "--json", *arguments])
    return result.exit_code, json.loads(result.stdout)


def test_u105_board_build_and_next_step_are_told_and_the_exit_code_is_not_zero(board):
    code, report = doctor()
    (finding,) = [finding for finding in report["findings"] if "board" in finding["what"]]
    assert code == 1 and report["choice"]["backend"] == "cpu"
    assert "Orin board" in finding["what"] and "built without CUDA" in finding["why"] and finding["command"] == WHEEL
    assert report["torch"]["builds"] == {}


def test_u105_named_it_is_broken(board):
    code, report = doctor("--backend", "board")
    assert code == 2 and report["findings"][0]["what"] == "backend board cannot be used"
    assert report["findings"][0]["command"] == WHEEL


def test_u105_elsewhere_nothing_is_said(board):
    board.write_text("")
    code, report = doctor()
    assert code == 0 and report["verdict"] == "fine"
