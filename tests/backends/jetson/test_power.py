"""Power modes by name, clocks, and `pagedkv jetson tune`: the commands right for a board, and what undoes them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pagedkv.api.errors import BackendUnavailable, ConfigError
from pagedkv_jetson.descriptor import JetsonDescriptor
from pagedkv_jetson.power import commands, power
from tests.backends.jetson import trees
from tests.backends.jetson.trees import BOARDS

STORE, MOST, RESTORE = "jetson_clocks --store", "jetson_clocks", "jetson_clocks --restore"


@pytest.mark.parametrize("name", BOARDS)
def test_the_fastest_mode_is_found_by_name(tmp_path: Path, name: str) -> None:
    found = power(trees.board(tmp_path, name))
    assert found.modes == BOARDS[name].modes
    assert found.fastest == found.current == BOARDS[name].fastest
    assert found.clocks == (306_000_000, 306_000_000, 918_000_000) and not found.fixed


def test_mode_0_is_the_fastest_on_some_boards_only(tmp_path: Path) -> None:
    fastest = {name: power(trees.board(tmp_path / name, name)).fastest for name in ("agx-orin-64", "orin-nano-8-super")}
    assert fastest == {"agx-orin-64": 0, "orin-nano-8-super": 2}


@pytest.mark.parametrize(
    ("modes", "fastest"),
    [
        ({0: "MAXN", 1: "MAXN_SUPER"}, 1),
        ({3: "7W", 1: "25W", 2: "15W"}, 1),
        ({0: "MODE_30W_ALL", 1: "MODE_30W_6CORE"}, 0),
        ({0: "MY_OWN", 1: "15W"}, 1),
        ({0: "MY_OWN"}, 0),
        ({}, None),
    ],
)
def test_which_mode_is_the_fastest(tmp_path: Path, modes: dict[int, str], fastest: int | None) -> None:
    trees.nvpmodel(tmp_path, modes, 0)
    assert power(tmp_path).fastest == fastest


@pytest.mark.parametrize("status", ["", "pmode:", "nonsense"])
def test_a_status_that_tells_nothing_is_unknown(tmp_path: Path, status: str) -> None:
    trees.nvpmodel(tmp_path, trees.AGX, None)
    trees.write(tmp_path, "var/lib/nvpmodel/status", status)
    found = power(tmp_path)
    assert (found.current, found.known, found.spell(found.current)) == (None, False, "unknown")


def test_an_id_that_the_table_does_not_name_is_not_known(tmp_path: Path) -> None:
    trees.nvpmodel(tmp_path, trees.NANO, 7)
    assert not power(tmp_path).known and power(tmp_path).spell(7) == "nameless (id 7)"


@pytest.mark.parametrize("gpu", ["17000000.gpu", "17000000.ga10b", "17000000.gv11b", "gpu-gpc-0"])
def test_fixed_clocks_are_seen_under_each_name_of_the_gpu(tmp_path: Path, gpu: str) -> None:
    for name in ("min", "cur", "max"):
        trees.write(tmp_path, f"sys/class/devfreq/{gpu}/{name}_freq", "918000000\n")
    trees.write(tmp_path, "sys/class/devfreq/00000000.vic/min_freq", "1\n")
    assert power(tmp_path).fixed


def test_clocks_that_cannot_be_read_are_unknown(tmp_path: Path) -> None:
    trees.write(tmp_path, "sys/class/devfreq/17000000.gpu/min_freq", "306000000\n")
    assert power(tmp_path).clocks is None and not power(tmp_path).fixed


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "current", "fixed", "do", "undo"),
    [
        ("agx-orin-64", 2, False, ["nvpmodel -m 0", STORE, MOST], [RESTORE, "nvpmodel -m 2"]),
        ("orin-nano-8-super", 0, False, ["nvpmodel -m 2", STORE, MOST], [RESTORE, "nvpmodel -m 0"]),
        ("orin-nano-8", 1, True, ["nvpmodel -m 0"], ["nvpmodel -m 1"]),
        ("orin-nx-16-super", 0, False, [STORE, MOST], [RESTORE]),
        ("orin-nx-8", 0, True, [], []),
    ],
)
def test_what_holds_already_is_left_out(
    tmp_path: Path, name: str, current: int, fixed: bool, do: list[str], undo: list[str]
) -> None:
    trees.board(tmp_path, name, current=current)
    if fixed:
        trees.clocks(tmp_path, BOARDS[name], 918, 918, 918)
    assert commands(power(tmp_path)) == (do, undo)


def tune(root: Path, *arguments: str) -> str:
    """What `pagedkv jetson tune` prints on a board with these files."""

    @click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
    @click.argument("given", nargs=-1)
    def run(given: tuple[str, ...]) -> None:
        assert JetsonDescriptor(root).tool(given) == 0

    result = CliRunner().invoke(run, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_tune_prints_the_commands_and_what_undoes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *given, **more: pytest.fail("nothing may run"))
    assert tune(trees.board(tmp_path, "orin-nano-8-super", current=0), "tune").splitlines() == [
        "power mode 15W (id 0), fastest MAXN_SUPER (id 2)",
        "  sudo nvpmodel -m 2",
        "  sudo jetson_clocks --store",
        "  sudo jetson_clocks",
        "to undo it:",
        "  sudo jetson_clocks --restore",
        "  sudo nvpmodel -m 0",
        "modes outlast a restart, clocks do not: run it again after one",
    ]


def test_nothing_to_do_is_said(tmp_path: Path) -> None:
    trees.board(tmp_path, "orin-nx-8")
    trees.clocks(tmp_path, BOARDS["orin-nx-8"], 918, 918, 918)
    assert "nothing to do" in tune(tmp_path, "tune", "--apply")


def test_apply_runs_them_in_order_as_root_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append(command))
    trees.board(tmp_path, "agx-orin-32", current=3)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="sudo pagedkv jetson tune --apply"):
        JetsonDescriptor(tmp_path).tool(["tune", "--apply"])
    assert ran == []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    shown = tune(tmp_path, "tune", "--apply")
    assert ran == [["nvpmodel", "-m", "0"], ["jetson_clocks", "--store"], ["jetson_clocks"]]
    assert shown.index("sudo nvpmodel -m 3") < shown.index("running nvpmodel -m 0"), "how to undo it comes first"


@pytest.mark.parametrize("error", [FileNotFoundError("nvpmodel"), subprocess.CalledProcessError(1, "nvpmodel")])
def test_a_command_that_fails_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    ran: list[list[str]] = []

    def fail(command: list[str], check: bool) -> None:
        ran.append(command)
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    trees.board(tmp_path, "agx-orin-64", current=1)
    with pytest.raises(BackendUnavailable, match="nothing after it was run"):
        JetsonDescriptor(tmp_path).tool(["tune", "--apply"])
    assert len(ran) == 1


def test_no_command_is_guessed(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="not in a container"):
        JetsonDescriptor(trees.container(tmp_path / "c", "agx-orin-64")).tool(["tune"])
    with pytest.raises(BackendUnavailable, match="not a Jetson"):
        JetsonDescriptor(tmp_path / "nowhere").tool(["tune"])


def test_help_names_the_command(tmp_path: Path) -> None:
    assert "tune" in tune(tmp_path, "--help")
    assert "sudo pagedkv jetson tune --apply" in tune(tmp_path, "tune", "--help")
