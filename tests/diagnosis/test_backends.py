"""Findings about backends, from statuses made by hand."""

from __future__ import annotations

import dataclasses

import pytest

from pagedkv.api import DeviceInfo
from pagedkv.diagnosis.backends import Choice, backend_findings, shown
from pagedkv.plugins import Status

GIB = 1 << 30
CARD = DeviceInfo(index=0, kind="card", total=16 * GIB, free=8 * GIB, score=80)
FINE = Status(name="fine", distribution="fine-dist", version="1", status="ok", score=80, devices=(CARD,))
AUTOMATIC = Choice(backend="fine", why="automatic choice, score 80", named=None)


def status(name="other", state="unavailable", **fields):
    return Status(name=name, distribution=f"{name}-dist", version="2", status=state, **fields)


def found(*statuses, choice=AUTOMATIC, available=32 * GIB):
    return list(backend_findings((FINE, *statuses), choice, available))


def on(**changes):
    return dataclasses.replace(FINE, devices=(dataclasses.replace(CARD, **changes),))


def test_a_backend_that_works_is_no_finding():
    assert found() == []


@pytest.mark.parametrize(
    ("state", "reason", "what", "command"),
    [
        ("failed", "importing raised ModuleNotFoundError", "is broken", "pip install -U other-dist"),
        ("timeout", "no answer to 'probe' within 2 s", "does not answer", "pip install -U other-dist"),
        ("conflict", "the name is claimed more than once", "is claimed twice", "pip uninstall other-dist"),
        ("failed", "ImportError: libhccl.so: cannot open", "is broken", None),
    ],
)
def test_a_broken_plugin_is_a_warning_even_beside_one_that_works(state, reason, what, command):
    (finding,) = found(status(state=state, reasons=(reason,)))
    assert finding.level == "warning" and finding.what == f"backend other (other-dist 2) {what}"
    assert reason in finding.why
    assert finding.command == (command or "source /usr/local/Ascend/ascend-toolkit/set_env.sh")


def test_with_a_name_only_that_backends_troubles_count():
    broken = status(state="failed", reasons=("importing raised OSError",))
    assert found(broken, choice=Choice(backend="fine", why="chosen by argument", named="fine")) == []
    (named,) = found(broken, choice=Choice(backend=None, why="chosen by argument: no", named="other"))
    assert (named.level, named.what, named.command) == ("broken", "backend other cannot be used", "pagedkv backends")
    (named,) = found(broken, choice=Choice(backend=None, why="chosen by PAGEDKV_BACKEND: no", named="other"))
    assert named.command == "unset PAGEDKV_BACKEND"


def test_u105_a_device_that_is_there_and_cannot_be_used_is_a_warning_and_an_absent_one_is_none():
    board = DeviceInfo(index=0, kind="board", total=8 * GIB, free=GIB, reason="torch has no code for it: pip install x")
    (finding,) = found(status(devices=(board,)))
    assert (finding.level, finding.command) == ("warning", "pip install x") and "board" in finding.what
    assert found(status(devices=(DeviceInfo(index=0, kind="none", reason="no such hardware here"),))) == []
    # Without a command in the reason, the backend that would be chosen is made the choice, and the matter is settled.
    (finding,) = found(status(devices=(dataclasses.replace(board, reason="too old"),)))
    assert finding.command == "export PAGEDKV_BACKEND=fine"


def test_what_a_backend_wants_changed_is_a_warning():
    said = {"driver": "7.1", "change": "the mode is the slowest: run `modeset -m 0`", "change clocks": "they are low"}
    first, second = found(status(state="ok", diagnose=said))
    assert (first.level, first.command) == ("warning", "modeset -m 0")
    assert first.what == "backend other advises a change"
    assert second.what == "backend other advises a change (clocks)"
    assert second.command == "export PAGEDKV_BACKEND=fine"


def test_a_diagnosis_that_hangs_is_a_warning():
    (finding,) = found(status(state="ok", diagnose={"diagnose": "no answer to 'diagnose' within 10 s"}))
    assert finding.what == "backend other cannot be diagnosed" and finding.command == "pip install -U other-dist"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"free": None, "total": None}, "does not tell how much memory is free"),
        ({"free": 0}, "none of its 16.0 GiB is free"),
        ({"free": GIB, "unified": True}, "sees 1.0 GiB free where the system has 40.0 GiB available"),
        ({"free": 30 * GIB, "unified": True}, None),
        ({"free": GIB, "unified": False}, None),
    ],
    ids=["u96 none", "u96 zero", "u99 caches counted", "u99 right", "memory of its own"],
)
def test_what_a_device_says_of_its_memory(changes, said):
    findings = list(backend_findings((on(**changes),), AUTOMATIC, 40 * GIB))
    assert [finding.level for finding in findings] == (["warning"] if said else [])
    assert all(said in finding.what and "--kv-cache-memory" in finding.command for finding in findings)


def test_no_backend_at_all_is_broken_with_every_reason():
    choice = Choice(backend=None, why="other: the toolkit is missing: pip install toolkit", named=None)
    (finding,) = backend_findings((status(),), choice, None)
    assert (finding.level, finding.about, finding.command) == ("broken", "choice", "pip install toolkit")


def test_one_screen_has_the_chosen_and_those_with_a_device():
    absent = status(diagnose={"driver": "none"}, devices=(DeviceInfo(index=0, kind="none"),))
    present = status("second", diagnose={"driver": "1"}, devices=(CARD,))
    assert shown((absent, present, FINE), "fine") == [present]
    assert shown((absent, present), "other") == [absent, present]
