"""`pagedkv certify`: exit codes, what is printed and written, and that nothing around it has a say."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap

import pytest
from click.testing import CliRunner

from pagedkv.api.errors import ConfigError
from pagedkv.cli import certify as command
from pagedkv.cli import main as cli
from pagedkv.cli.certify_display import Counts, Lines, display
from pagedkv.conformance import run as kit_run
from pagedkv.conformance.certificate import Certificate
from pagedkv.conformance.run import Outcome
from tests.conformance.certificates import case, certificate
from tests.helpers.plugin_dists import descriptor, install
from tests.helpers.terminal import Terminal

CPU = ("cpu", "--backend-option", "threads=1")
ONE_CASE = "test_plan_dropped_at_once"


@pytest.fixture
def run(monkeypatch, tmp_path):
    for name in ("PAGEDKV_BACKEND", "PAGEDKV_LOG_LEVEL", "PAGEDKV_CHECK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(cli.pagedkv, ["certify", *arguments])


@pytest.fixture
def found(monkeypatch):
    """Let the command find this instead of running the kit."""

    def give(made, **fields):
        outcome = Outcome(**{"certificate": made, "interrupted": False, "printed": "", "warnings": (), **fields})
        monkeypatch.setattr(command, "_run", lambda chosen: outcome)

    return give


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Install a backend whose `alloc_pool` is this source."""

    def add(alloc_pool, top=""):
        source = descriptor().replace(
            "def alloc_pool(self, spec): raise NotImplementedError",
            textwrap.indent(textwrap.dedent(alloc_pool), "    ").strip(),
        )
        install(tmp_path / "site", textwrap.dedent(top) + source)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    return add


# -- real runs ---------------------------------------------------------------------------------------------------------


def test_a_selection_is_partial_and_shows_levels_laws_and_the_worst_error(run, tmp_path):
    result = run(*CPU, "-k", ONE_CASE, "--json", "made.json", "--markdown", "made.md")
    assert result.exit_code == 1, result.output
    made = Certificate.from_json((tmp_path / "made.json").read_text("utf-8"))
    (only,) = made.cases
    assert only.outcome == "passed" and only.error <= only.tolerance and not made.complete
    lines = result.stdout.splitlines()
    assert lines[0] == lines[-1].replace("partial", f"cpu (pagedkv {made.version}): partial")
    assert any(line.split()[:4] == ["core", "not", "reached", "1"] for line in lines)
    assert any(only.law in line and line.endswith("passed") for line in lines)
    assert (tmp_path / "made.md").read_text("utf-8").startswith("# Certificate: cpu")
    assert "plans: 1 passed in " in result.stderr and "written to made.json" in result.stderr


def test_json_to_standard_output_is_json_alone(run, tmp_path):
    result = run(*CPU, "-k", ONE_CASE, "--json", "-", "--quiet")
    assert len(Certificate.from_json(result.stdout).cases) == 1
    assert result.stderr == "" and list(tmp_path.iterdir()) == []


def test_a_failure_says_the_law_the_message_and_how_to_run_the_case_again(run, fake, tmp_path):
    fake("def alloc_pool(self, spec):\n    print('\\x1b[2J' + 'x' * 10**6)\n    raise NotImplementedError('not yet')")
    result = run("fake", "-k", ONE_CASE, "--json", "made.json", "--backend-option", "level=4")
    assert result.exit_code == 1
    (failed,) = Certificate.from_json((tmp_path / "made.json").read_text("utf-8")).cases
    assert failed.message.startswith("NotImplementedError: not yet (pagedkv_fake_")
    assert f"failed: {failed.law}" in result.stderr.splitlines()
    again = f"  run it: pagedkv certify fake --backend-option level=4 -k {ONE_CASE}"
    assert result.stdout.splitlines()[-5:-2] == [f"failed: {failed.law}", f"  {failed.message}", again]
    assert "xxxx" not in result.output and "\x1b[2J" not in result.output  # what it prints stays away from the screen


def test_ctrl_c_keeps_what_was_found_so_far(run, fake, tmp_path):
    fake("def alloc_pool(self, spec): raise KeyboardInterrupt")
    result = run("fake", "-k", f"an_op_that_does_not_exist or {ONE_CASE}", "--json", "made.json")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1].startswith("interrupted after ")
    assert not Certificate.from_json((tmp_path / "made.json").read_text("utf-8")).complete


def test_every_call_can_be_checked_as_well(run, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CHECK", "1")
    result = run(*CPU, "-k", ONE_CASE)
    assert "partial (1 passed" in result.stdout
    assert any(line.split()[:2] == ["checked", "yes:"] for line in result.stdout.splitlines())


def test_a_projects_pytest_settings_change_nothing(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (project / "conftest.py").write_text("raise RuntimeError('conftest was read')\n")
    site = install(tmp_path / "site", "raise RuntimeError('plugin was loaded')", distribution="pytest-broken")
    entry_points = next(site.glob("*.dist-info")) / "entry_points.txt"
    entry_points.write_text(entry_points.read_text().replace("pagedkv.backends", "pytest11"))
    hostile = {"PYTEST_ADDOPTS": "--no-such-option", "PYTEST_PLUGINS": "no_such_plugin", "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-m", "pagedkv.cli.main", "certify", *CPU, "-k", ONE_CASE],
        capture_output=True,
        text=True,
        cwd=project,
        env={**os.environ, **hostile, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1 and "partial (1 passed" in done.stdout, done.stderr
    assert sorted(path.name for path in project.iterdir()) == ["conftest.py", "pytest.ini"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nosuch",), "no installed backend is called 'nosuch'; installed backends: "),
        (("cpu", "--backend-option", "threds=1"), "did you mean 'threads'?"),
        (
            ("cpu", "--json", "none/made.json"),
            "none/made.json cannot be written; name a file in a folder of yours with",
        ),
        (("cpu", "--markdown", "."), ". cannot be written; name a file in a folder of yours with --markdown FILE"),
        (("cpu", "--json", "-", "--markdown", "-"), "would both print to standard output"),
        ((*CPU, "-k", "a b"), "-k 'a b' is no expression that pytest reads: "),
        ((*CPU, "-k", "no_such_case"), "no case of this backend matches -k 'no_such_case'"),
        ((), "Missing argument 'NAME'"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_a_usage_error(run, arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2 and words in result.stderr and result.stdout == "", result.output


def test_without_pytest_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'pagedkv\[certify\]'"):
        command._check(command.Choice(name="cpu", device=None, options=(), select=None, json=None, markdown=None))


def test_a_section_that_cannot_be_read_is_an_error_of_ours():
    broken = kit_run._Reporter(Lines(io.StringIO()))
    broken.broken = "test_a.py: SyntaxError"
    with pytest.raises(kit_run.InternalError, match=r"could not be collected: test_a.py"):
        kit_run._refuse(2, broken, "", None)


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "fields", "code"),
    [
        (certificate(), {}, 0),
        (certificate(case(0), case(1, outcome="failed")), {}, 1),
        (certificate(case(0), case(1, outcome="skipped", message="one core")), {}, 1),
        (certificate(complete=False), {}, 1),
        (certificate(complete=False), {"interrupted": True}, 130),
    ],
    ids=["passed", "failed", "skipped", "partial", "interrupted"],
)
def test_exit_code_0_means_certified(run, found, made, fields, code):
    found(made, **fields)
    assert run("mine").exit_code == code


def test_a_whole_run_is_written_without_being_asked_and_an_interrupted_one_is_not(run, found, tmp_path):
    found(certificate())
    result = run("mine")
    assert Certificate.from_json((tmp_path / "pagedkv-certificate-mine.json").read_text()) == certificate()
    assert "written to pagedkv-certificate-mine.json" in result.stderr
    found(certificate(complete=False), interrupted=True)
    (tmp_path / "pagedkv-certificate-mine.json").unlink()
    result = run("mine")
    assert list(tmp_path.iterdir()) == []
    assert "no certificate is written of a run that left cases out" in result.stderr


def test_figures_skipped_cases_and_under_declared_features_are_shown(run, found):
    found(
        certificate(
            case(0, figures={"plan_ms": {"1": 0.25, "64": 1.5}, "under_declared": ["sinks"]}),
            case(1, outcome="skipped", message="this machine has\none core", id="test_a.py::test_c[a, b]"),
        )
    )
    lines = run("mine", "--device", "2").stdout.splitlines()
    assert "a        plan_ms  1 0.25, 64 1.5" in lines
    assert "works although it is not declared: sinks; declare it, or refuse it" in lines
    start = lines.index("skipped: numerics: agrees")
    assert lines[start + 1 : start + 4] == [
        "  this machine has",
        "  one core",
        "  run it: pagedkv certify mine --device 2 -k test_c",
    ]


def test_markdown_to_standard_output_is_markdown_alone(run, found, tmp_path):
    found(certificate())
    assert run("mine", "--markdown", "-").stdout.startswith("# Certificate: mine (pagedkv-mine 1.5)\n\n**passed")


def test_warnings_and_what_was_printed_outside_of_cases_are_said(run, found):
    found(certificate(), warnings=("DeprecationWarning: old",), printed="from a thread\n")
    result = run("mine", "--quiet")
    assert result.stderr.splitlines() == [
        "warning: DeprecationWarning: old",
        "warning: printed outside of all cases:",
        "from a thread",
    ]


def test_help_has_examples(run):
    assert "pagedkv certify cpu\n" in run("--help").output


@pytest.mark.parametrize("state", ["not run on a card: a stand-in took its place", None])
def test_a_backend_without_a_device_says_what_was_verified_instead(run, tmp_path, monkeypatch, state):
    said = {"driver": "7.1"} | ({"state": state} if state else {})
    source = descriptor(score=0, reason="no card is there: put one in", diagnose=f"def diagnose(self): return {said}")
    install(tmp_path / "site", source)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    result = run("fake")
    text = str(result.exception) + result.stderr
    assert "no card is there: put one in. So nothing can be certified here" in text
    assert ("It says of itself: not run on a card: a stand-in took its place" in text) is (state is not None)
    assert result.exit_code != 0 and not list(tmp_path.glob("*.json"))


# -- the display -------------------------------------------------------------------------------------------------------


def test_lines_name_each_section_once_and_each_failure_at_once():
    stream = io.StringIO()
    lines = Lines(stream)
    lines.begin(3)
    for section, outcome in (("copy", "passed"), ("copy", "failed"), ("plans", "skipped")):
        lines.start(section, "law")
        lines.end(section, case(0, outcome=outcome))
    lines.finish()
    said = [line.rpartition(" in ")[0] or line for line in stream.getvalue().splitlines()]
    assert said == ["failed: numerics: agrees", "copy: 1 passed, 1 failed", "plans: 0 passed, 1 skipped"]


def test_a_terminal_gets_a_bar_that_nothing_printed_meanwhile_disturbs(monkeypatch, capfd):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(terminal.end, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        with display(quiet=False) as (bar, stream), kit_run._silenced(stream) as printed:
            bar.begin(2)
            bar.start("copy", "copy: [bold] bits")
            os.write(1, b"from the backend")
            bar.end("copy", case(0, outcome="failed"))
        monkeypatch.undo()
    shown = terminal.shown()
    assert all(words in shown for words in ("copy", "1/2", "0 passed, 1 failed", "copy: [bold] bits"))
    assert "from the backend" not in shown and printed.text == "from the backend"
    assert "from the backend" not in capfd.readouterr().out


@pytest.mark.parametrize("quiet", [True, False])
def test_quiet_shows_nothing(quiet, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with display(quiet=quiet) as (watcher, _):
        watcher.begin(1)
        watcher.start("copy", "law")
        watcher.end("copy", case(0, outcome="failed"))
    assert (stream.getvalue() == "") is quiet


def test_what_is_printed_without_end_is_cut_and_says_so(monkeypatch):
    monkeypatch.setattr(kit_run, "MOST_PRINTED", 10)
    with kit_run._silenced(sys.stderr) as printed:
        os.write(2, b"0123456789abcdef")
    assert printed.text == "(6 bytes before this are left out)\n6789abcdef"


def test_counts_always_say_how_many_passed():
    assert str(Counts()) == "0 passed"
