"""`pagedkv NAME ...` is the own command of an installed backend; what it raises, prints and returns comes through."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from pagedkv.cli import main as cli
from tests.helpers.plugin_dists import descriptor, install

ECHO = "def tool(self, args): print(list(args)); return len(args)"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command line beside a backend `fake` with this `tool`."""

    def with_tool(tool, *arguments):
        members = {} if tool is None else {"tool": tool}
        install(tmp_path / "site", descriptor(top="import click", **members))
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        return CliRunner().invoke(cli.pagedkv, list(arguments))

    return with_tool


@pytest.mark.parametrize("name", ["fake", "FAKE"])
def test_every_argument_is_the_backends_and_what_it_returns_is_the_exit_code(run, name):
    given = ["--help", "-q", "--not_known", "x", "--", "-h"]
    result = run(ECHO, name, *given)
    assert (result.exit_code, result.stdout) == (len(given), f"{given}\n")


def test_no_arguments_and_success(run):
    result = run(ECHO, "fake")
    assert (result.exit_code, result.stdout) == (0, "[]\n")


def test_a_backend_without_a_command_says_so(run):
    result = run(None, "fake", "tune")
    assert result.exit_code == 1
    assert result.stderr.endswith("error: backend 'fake' has no command of its own\n")


def test_a_name_that_nobody_offers_is_no_command(run):
    result = run(ECHO, "nosuch")
    assert result.exit_code == 2 and "No such command 'nosuch'" in result.stderr


@pytest.mark.parametrize(
    ("tool", "code", "words"),
    [
        ("def tool(self, args): raise ZeroDivisionError('oh')", 1, "backend 'fake' (pagedkv-fake 1.5) cannot be used"),
        ("def tool(self, args): return None", 1, "its own command returned None, must return an exit code"),
        ("def tool(self, args): sys.exit(3)", 3, ""),
        ("def tool(self, args): raise click.UsageError('no such option')", 2, "Error: no such option"),
        ("def tool(self, args): raise click.exceptions.Exit(4)", 4, ""),
    ],
)
def test_what_goes_wrong_is_the_backends_and_comes_through(run, tool, code, words):
    result = run(tool, "fake", "x")
    assert result.exit_code == code and words in result.stderr
    assert "Traceback" not in result.stderr


def test_help_names_the_way_and_loads_no_plugin():
    script = (
        "import sys\nfrom pagedkv.cli.main import pagedkv\npagedkv.main(['--help'], standalone_mode=False)\n"
        "print([m for m in sys.modules if m.startswith(('pagedkv_', 'stevedore', 'pagedkv.plugins'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "BACKEND ..." in done.stdout and done.stdout.splitlines()[-1] == "[]"
