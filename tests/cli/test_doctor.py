"""`pagedkv doctor` as a command: exit codes, one screen, and a report that can be published."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pagedkv import __version__
from pagedkv.cli.main import pagedkv
from pagedkv.diagnosis import report as reports
from pagedkv.diagnosis.findings import EXIT_CODES
from pagedkv.plugins import probing
from tests.helpers.engine_rig import folder
from tests.helpers.fake_machine import stub_torch
from tests.helpers.plugin_dists import descriptor, install
from tests.helpers.terminal import Terminal

PRIVATE = "/srv/janes-models/private/llama"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run doctor; torch is a stub, so that it loads at once."""
    for name in ("PAGEDKV_BACKEND", "PAGEDKV_LOG_LEVEL", "PAGEDKV_CHECK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(stub_torch(tmp_path / "torch")))
    return lambda *arguments: CliRunner().invoke(pagedkv, ["doctor", *arguments])


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    def add(name="fake", source=None, **members):
        folder = tmp_path / name
        source = source or descriptor(name, **{"score": 95, **members})
        install(folder, source, name=name, distribution=f"{name}-dist", version="1.5")
        monkeypatch.syspath_prepend(str(folder))

    return add


def only(monkeypatch, *names):
    """Leave the backends that pagedkv brings out of sight: probing each takes half a second."""
    wanted = [f for f in reports.discover() if f.name in names]
    for module in (reports, probing):
        monkeypatch.setattr(module, "discover", lambda: wanted)


def test_everything_is_there_and_fine(run):
    result = run("--json")
    report = json.loads(result.stdout)
    assert (report["verdict"], report["exit_code"], result.exit_code) == ("fine", 0, 0)
    assert report["choice"] == {"backend": "cpu", "why": "automatic choice, score 10"}
    assert (report["pagedkv"], report["contract"]) == (__version__, "1.1")
    assert report["torch"]["version"] == "2.13.0" and report["packages"]["numpy"]
    (row,) = [row for row in report["backends"] if row["name"] == "cpu"]
    assert "Q8_0" in row["weight_formats"] and row["diagnose"]["torch"] == "found"
    assert report["verified"][0] == {"backend": "cpu", "hardware": "x86-64, Linux", "how": "run by the test suite"}
    (entry,) = [entry for entry in report["verified"] if entry["backend"] == "cuda"]
    assert entry["hardware"] == "none" and entry["how"].startswith("not run on hardware: kernels were tested under")


def test_the_keys_are_stable(run, plugin):
    plugin()
    report = json.loads(run("--backend", "fake", "--json").stdout)
    assert list(report)[:3] == ["report", "pagedkv", "contract"] and report["report"] == 1
    assert set(report) == {
        *("report", "pagedkv", "contract", "system", "python", "processor", "memory", "limits", "packages", "pairs"),
        *("environment", "torch", "model", "choice", "backends", "verified", "findings", "verdict", "exit_code"),
    }
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8")
    assert [key for key in report if f"`{key}`" not in page] == []
    assert set(report["memory"]) >= {"total", "available", "swap_used", "cgroup_limit", "cgroup_left", "usable"}
    assert set(report["system"]) == {"system", "release", "machine", "distribution", "libc", "container", "wsl"}
    assert set(report["torch"]) == {
        *("installed", "version", "builds", "architectures", "seconds", "hangs", "error"),
    }
    assert report["packages"]["fake-dist"] == "1.5"


def test_one_screen_says_what_is_here_and_ends_with_the_verdict(run, plugin):
    plugin()
    result = run("--backend", "FAKE")
    *_, choice, verdict = result.stdout.splitlines()
    assert result.exit_code == 0 and choice == "would be chosen: fake (chosen by argument)"
    assert verdict.startswith("verdict: fine")
    for word in ("system", "python", "torch", "processor", "memory", "limits", "packages", "driver", "7.1"):
        assert re.search(rf"^{re.escape(word)}\b|\b{re.escape(word)}$", result.stdout, re.MULTILINE), word


def test_every_warning_has_a_command_on_the_screen(run, plugin, monkeypatch):
    plugin("stale", "import vendor_sdk_of_last_year")
    plugin("late", probe="def probe(self): time.sleep(60)")
    plugin("good")
    only(monkeypatch, "stale", "late", "good")
    monkeypatch.setenv("PAGEDKV_BACKED", "good")
    result = run()
    lines = result.stdout.splitlines()
    warned = [number for number, line in enumerate(lines) if line.startswith(("warning: ", "broken: "))]
    assert result.exit_code == 1 and len(warned) == 3
    assert all(lines[number + 2].startswith("  mend  ") for number in warned)
    assert "  mend  pip install -U stale-dist" in lines and "no answer to 'probe' within 2 s" in result.stdout
    assert lines[-1] == "verdict: warnings: 3" and lines[-2].startswith("would be chosen: good")


@pytest.mark.parametrize(
    ("members", "level", "said"),
    [
        ({"diagnose": "def diagnose(self): time.sleep(60)"}, "warning", "no answer to 'diagnose' within 0.5 s"),
        ({"diagnose": "def diagnose(self): os._exit(3)"}, "warning", "exit code 3"),
        ({"diagnose": "def diagnose(self): 1 / 0"}, "warning", "ZeroDivisionError"),
        ({"diagnose": "def diagnose(self): return {'change': 'slow: run `faster`'}"}, "warning", "slow"),
        ({"probe": "def probe(self): os.kill(os.getpid(), 11)"}, "broken", "SIGSEGV"),
        ({"probe": "def probe(self): print('x' * 99999); return 7"}, "broken", "probe() returned 7"),
        ({"top": "print('garbage' * 9999); sys.stderr.write('more')"}, None, ""),
        ({"probe": "def probe(self): return (DeviceInfo(index=0, kind='k', score=9),)"}, "warning", "not tell"),
        (
            {"probe": "def probe(self): return (DeviceInfo(index=0, kind='k', score=9, total=8, free=0),)"},
            "warning",
            "none of its 8 B",
        ),
    ],
    ids=["hangs", "dies", "raises", "change", "crash", "wrong", "garbage", "u96-none", "u96-zero"],
)
def test_a_backend_that_misbehaves(run, plugin, monkeypatch, members, level, said):
    monkeypatch.setattr(probing, "DIAGNOSE_LIMIT", 0.5)
    plugin(**members)
    result = run("--backend", "fake", "--json")
    report = json.loads(result.stdout)
    bad = [finding for finding in report["findings"] if finding["level"] != "note"]
    assert result.exit_code == {None: 0, "warning": 1, "broken": 2}[level]
    assert (bad[0]["level"] if bad else None) == level
    assert any(said in finding["what"] + finding["why"] for finding in bad) or not said
    assert all(finding["command"] for finding in bad)


def test_exit_codes_for_names(run, plugin, monkeypatch):
    only(monkeypatch, "cpu")
    result = run("--backend", "nosuch")
    assert result.exit_code == 2 and "no installed backend is called 'nosuch'" in result.stderr
    monkeypatch.setenv("PAGEDKV_BACKEND", "nosuch")
    result = run("--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["choice"]["backend"], report["verdict"]) == (2, None, "broken")
    assert "no installed backend is called 'nosuch'" in report["choice"]["why"]


def test_u108_a_torch_that_does_not_load_breaks_the_verdict_and_not_doctor(run, plugin, monkeypatch, tmp_path):
    plugin()
    broken = stub_torch(tmp_path / "broken", "raise ImportError('libfoo.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(broken))
    result = run("--backend", "fake")
    assert result.exit_code == 2 and result.stdout.splitlines()[-1] == "verdict: 1 broken"
    assert "broken: torch does not load" in result.stdout and "libfoo.so cannot be opened" in result.stdout
    assert "mend  pip install --force-reinstall torch" in result.stdout


def test_a_report_holds_no_personal_path_name_or_token(run, plugin, monkeypatch, tmp_path):
    home = tmp_path / "home" / "janedoe"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("getpass.getuser", lambda: "janedoe")
    monkeypatch.setattr("socket.gethostname", lambda: "secretbox")
    monkeypatch.setenv("PAGEDKV_TOKEN", "hunter2hunter2")
    monkeypatch.setenv("HF_HOME", str(home / "cache"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{PRIVATE}/lib:/usr/lib")
    said = (
        f"{{'model': '{PRIVATE}/w.gguf', 'log': '{home}/log', 'who': 'janedoe at secretbox', 't': 'hf_abcdefgh12345'}}"
    )
    plugin(diagnose=f"def diagnose(self): return {said}")
    text = run("--backend", "fake", "--json").stdout
    report = json.loads(text)
    for private in ("janedoe", "secretbox", "hunter2", "private", "janes-models", "hf_abc", sys.prefix, str(tmp_path)):
        assert private not in text, private
    (row,) = report["backends"]
    assert row["diagnose"] == {
        "model": "<path>/w.gguf",
        "log": "~/log",
        "who": "<user> at <host>",
        "t": "<secret>",
    }
    assert report["environment"]["LD_LIBRARY_PATH"] == "<path>/lib:/usr/lib"
    assert report["environment"]["PAGEDKV_TOKEN"] == "set, but pagedkv does not read it"


def test_a_model_that_is_not_there_breaks_the_verdict_and_its_path_stays_private(run, monkeypatch, tmp_path):
    home = tmp_path / "home" / "janedoe"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    sys.path.remove(str(tmp_path / "torch"))  # models need the real one
    result = run(str(home / "my models" / "llama"), "--backend", "cpu", "--json")
    report = json.loads(result.stdout)
    first = report["findings"][0]
    assert (result.exit_code, first["level"], first["about"]) == (2, "broken", "model")
    assert report["model"]["name"] == "<path>/llama" and "neither a folder nor a file" in first["why"]
    assert first["command"] and "jane" not in result.stdout and "my models" not in result.stdout


def test_a_model_that_fits_is_planned_as_an_engine_would(run, tmp_path):
    sys.path.remove(str(tmp_path / "torch"))
    result = run(str(folder()), "--backend", "cpu", "--json")
    report = json.loads(result.stdout)
    plan = report["model"]["plan"]
    assert (result.exit_code, report["model"]["error"], plan["refusal"]) == (0, None, None)
    # 256 sequences of the 256 positions that this model has, in blocks of 16, and the null block
    assert (plan["settings"]["block_size"], plan["blocks"]) == (16, 256 * 256 // 16 + 1)
    assert {"weights", "blocks", "verdict"} <= {label for label, _ in report["model"]["summary"]}


def test_the_exit_code_is_the_verdicts(run, plugin):
    plugin()
    report = json.loads(run("--backend", "fake", "--json").stdout)
    assert report["exit_code"] == EXIT_CODES[report["verdict"]]


def test_a_terminal_shows_what_is_waited_for_and_standard_output_stays_json(plugin, tmp_path):
    plugin()
    paths = [str(tmp_path / "fake"), str(stub_torch(tmp_path / "torch"))]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *sys.path]), "TERM": "xterm"}
    terminal = Terminal()
    command = [sys.executable, "-m", "pagedkv.cli.main", "doctor", "--backend", "fake", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal.end, env=environ, check=False)
    os.close(terminal.end)
    assert "asking the backends" in terminal.shown()
    assert json.loads(done.stdout)["exit_code"] == done.returncode == 0


def test_help_has_the_exit_codes_and_examples(run):
    text = run("--help").stdout
    assert "Exit code 0: fine" in text and "pagedkv doctor --json" in text and "--backend NAME" in text
