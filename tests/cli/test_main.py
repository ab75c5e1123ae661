"""The command itself: lazy, one message for an error, flags in either spelling, logs on standard error only."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from pagedkv import __version__
from pagedkv.api.errors import (
    BackendNotFound,
    BackendUnavailable,
    ConfigError,
    DeviceError,
    ModelError,
    PagedKVError,
    RequestTooLong,
)
from pagedkv.cli import main as cli
from pagedkv.cli.common import model_argument
from tests.helpers.plugin_dists import descriptor, install


@pytest.fixture
def run(monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.delenv("PAGEDKV_LOG_LEVEL", raising=False)
    return lambda *arguments: CliRunner().invoke(cli.pagedkv, arguments)


@pytest.fixture
def command(monkeypatch):
    """Put one command of the test's own into the group, under the name `try`."""

    def add(function, *decorators):
        for decorator in decorators:
            function = decorator(function)
        made = click.command("try")(function)
        monkeypatch.setitem(cli.COMMANDS, "try", (__name__, "A test's command."))
        monkeypatch.setattr(sys.modules[__name__], "try", made, raising=False)
        monkeypatch.setattr(cli.importlib, "import_module", lambda name: sys.modules[__name__])
        monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object())

    return add


@pytest.fixture
def fake(tmp_path, monkeypatch):
    install(tmp_path / "site", descriptor(score=95))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def test_version_and_help_import_neither_torch_nor_a_command():
    script = (
        "import sys\nfrom pagedkv.cli.main import pagedkv\n"
        "for arguments in (['--version'], ['--help']):\n    pagedkv.main(arguments, standalone_mode=False)\n"
        "print([m for m in ('torch', 'rich', 'stevedore', 'pagedkv.cli.backends') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, *_, last = done.stdout.splitlines()
    assert (first, last) == (f"pagedkv {__version__}", "[]")
    assert "backends" in done.stdout and "doctor" in done.stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad"), 2),
        (BackendNotFound("bad"), 2),
        (RequestTooLong("bad"), 2),
        (BackendUnavailable("bad"), 1),
        (ModelError("bad"), 1),
        (DeviceError("bad"), 1),
        (PagedKVError(), 1),
    ],
)
def test_our_errors_are_one_line_and_an_exit_code(run, command, error, code):
    def fail():
        raise error

    command(fail)
    result = run("try")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == f"error: {str(error) or 'PagedKVError'}\n"


@pytest.mark.parametrize("arguments", [("--debug", "try"), ("try", "--debug")])
def test_debug_shows_the_traceback_before_the_message(run, command, arguments):
    def fail():
        raise ModelError("no such file")

    command(fail)
    result = run(*arguments)
    assert "Traceback" in result.stderr and "in fail" in result.stderr
    assert result.stderr.endswith("error: no such file\n")


def test_an_error_that_is_not_ours_is_not_hidden(run, command):
    def fail():
        raise ZeroDivisionError

    command(fail)
    assert isinstance(run("try").exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("try",), ["info", "warning: warning"]),
        (("try", "-q"), ["warning: warning"]),
        (("--quiet", "try"), ["warning: warning"]),
        (("try", "--verbose"), ["debug: debug", "info", "warning: warning"]),
    ],
)
def test_logs_go_to_standard_error_at_the_chosen_level(run, command, arguments, shown):
    def work():
        log = logging.getLogger("pagedkv.test")
        log.debug("debug")
        log.info("info")
        log.warning("warning")
        click.echo("result")

    command(work)
    result = run(*arguments)
    assert (result.stdout, result.stderr.splitlines()) == ("result\n", shown)


def test_the_log_level_variable_counts_and_a_wrong_one_is_an_error(run, command, monkeypatch):
    command(lambda: logging.getLogger("pagedkv.test").info("info"))
    monkeypatch.setenv("PAGEDKV_LOG_LEVEL", "warning")
    assert run("try").stderr == ""
    monkeypatch.setenv("PAGEDKV_LOG_LEVEL", "loud")
    result = run("try")
    assert result.exit_code == 2
    assert result.stderr == "error: PAGEDKV_LOG_LEVEL='LOUD' is no log level; use one of DEBUG, INFO, WARNING, ERROR\n"


def test_logging_is_left_as_it_was(run, command):
    command(lambda: None)
    before = (logging.getLogger("pagedkv").handlers[:], logging.getLogger("pagedkv").level)
    run("try", "--verbose")
    assert (logging.getLogger("pagedkv").handlers, logging.getLogger("pagedkv").level) == before


@pytest.mark.parametrize("flag", ["--max-tokens", "--max_tokens"])
def test_flags_are_accepted_with_dashes_and_underscores(run, command, flag):
    command(lambda max_tokens: click.echo(max_tokens), click.option("--max-tokens", type=int))
    assert run("try", flag, "7").stdout == "7\n"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("my_model",), 0, "my_model"),
        (("--model", "my_model"), 0, "my_model"),
        (("my_model", "--model", "my_model"), 0, "my_model"),
        ((), 2, "no model is given; name a folder, a .gguf file, a hub id, or demo"),
        (("a", "--model", "b"), 2, "two models are given, 'a' and --model 'b'"),
    ],
)
def test_the_model_is_positional_or_an_option(run, command, arguments, code, text):
    command(lambda model: click.echo(model), model_argument)
    result = run("try", *arguments)
    assert result.exit_code == code and text in result.output


def test_a_misspelt_variable_is_warned_of_by_any_command(run, command, monkeypatch):
    from pagedkv import environment

    environment._warn_of_variable.cache_clear()
    monkeypatch.setenv("PAGEDKV_LOG_LEVLE", "DEBUG")
    command(lambda: None)
    assert "PAGEDKV_LOG_LEVLE has no effect" in run("try").stderr


def test_a_command_whose_module_is_not_there_does_not_break_the_others(run, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "serve", ("pagedkv.cli.no_such_module", "Not built."))
    assert run("serve").exit_code == 2 and "No such command 'serve'" in run("serve").output
    assert "serve" not in run("--help").output


def test_backends_as_json_has_one_object_a_backend(run, fake):
    result = run("backends", "--json")
    (row,) = [row for row in json.loads(result.stdout) if row["name"] == "fake"]
    assert {k: row[k] for k in ("distribution", "version", "api", "status", "score", "reasons")} == {
        "distribution": "pagedkv-fake",
        "version": "1.5",
        "api": "1.0",
        "status": "ok",
        "score": 95,
        "reasons": [],
    }
    assert (row["devices"][0]["kind"], row["devices"][0]["total"]) == ("fake card", 100)


def test_the_table_cuts_no_reason_and_reads_no_markup(run, tmp_path, monkeypatch):
    reason = "[bold]" + " ".join(f"word{i}" for i in range(60)) + "[/nosuch]"
    install(tmp_path / "long", descriptor("long", score=0, reason=reason), name="long", distribution="long-dist")
    monkeypatch.syspath_prepend(str(tmp_path / "long"))
    text = run("backends").stdout
    assert all(word in text.split() for word in reason.split()[1:-1]) and "[bold]word0" in text and "[/nosuch]" in text
