"""U87: discovery touches no device in this process; help, version and list run at most the probe, in a child."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.plugin_dists import descriptor, install

MARK = """
    def mark(what):
        with open(os.environ["MARKS"], "a") as file:
            file.write(f"{what} {os.getpid()} {os.getppid()}\\n")
    mark("module")
"""


@pytest.fixture
def run(tmp_path):
    """(arguments) -> (pid of the command, marks as {what: {(pid, parent)}})."""
    site, marks = tmp_path / "site", tmp_path / "marks"
    probe = "def probe(self): mark('probe'); return (DeviceInfo(index=0, kind='k', score=95),)"
    create = "def create(self, device, options, world): mark('create'); return FakeBackend()"
    install(site, descriptor("marked", top=MARK, probe=probe, create=create), name="marked")

    def start(*arguments: str):
        marks.write_text("")
        environment = os.environ | {"PYTHONPATH": str(site), "MARKS": str(marks)}
        process = subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL)
        assert process.wait(60) == 0
        seen: dict[str, set[tuple[int, int]]] = {}
        for line in marks.read_text().splitlines():
            what, pid, parent = line.split()
            seen.setdefault(what, set()).add((int(pid), int(parent)))
        return process.pid, seen

    return start


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("backends", "--help")])
def test_u87_help_and_version_touch_nothing(run, arguments):
    assert run("-m", "pagedkv.cli.main", *arguments)[1] == {}


def test_u87_the_list_probes_in_a_child(run):
    pid, seen = run("-m", "pagedkv.cli.main", "backends")
    assert seen.keys() == {"module", "probe"}
    assert seen["module"] == seen["probe"] and len(seen["probe"]) == 1
    ((child, parent),) = seen["probe"]
    assert child != pid and parent == pid


def test_u87_the_chosen_one_is_created_in_the_process_that_uses_it(run):
    pid, seen = run("-c", "from pagedkv import plugins; plugins.create(plugins.select(), {})")
    assert {p for p, _ in seen["create"]} == {pid}
    assert {p for p, _ in seen["probe"]}.isdisjoint({pid})
