"""A vendor's extension that `import torch` would load and that lacks its libraries: pagedkv works all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
CAUSE = "libhccl.so: cannot open shared object file: No such file or directory"
TORCHS = f"Failed to load the backend extension: torch_npu. You can disable extension auto-loading with {VARIABLE}=0."
COMMANDS = """
import json
from click.testing import CliRunner
from pagedkv.cli.main import pagedkv
for line in (
    ["backends", "--json"],
    ["doctor", "--backend", "cpu", "--json"],
    ["generate", "demo", "--backend", "cpu", "--backend-option", "threads=1", "--max-tokens", "3", "--prompt", "hi"],
):
    result = CliRunner().invoke(pagedkv, line)
    print(json.dumps([line[0], result.exit_code, result.stdout]))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """torch-npu as it is installed where CANN is not: torch asks for it, and it does not load."""
    (tmp_path / "torch_npu.py").write_text(f"raise ImportError({CAUSE!r})\n")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return tmp_path


def python(site: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    there = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "PAGEDKV_BACKEND")}
    own = {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=there | own, capture_output=True, text=True, timeout=120)


def test_u108_every_command_and_the_other_backends_work(site: Path) -> None:
    done = python(site, "-c", COMMANDS)
    assert done.returncode == 0, done.stderr
    said = {name: (code, text) for name, code, text in map(json.loads, done.stdout.splitlines())}
    status = {one["name"]: one["status"] for one in json.loads(said["backends"][1])}
    assert said["backends"][0] == 0 and (status["cpu"], status["ascend"]) == ("ok", "unavailable")
    report = json.loads(said["doctor"][1])
    assert said["doctor"][0] < 2 and report["torch"]["error"] == [] and report["packages"]["torch-npu"] == "2.13.0"
    assert report["environment"][VARIABLE] == "0"
    assert said["generate"][0] == 0 and said["generate"][1].strip()


def test_u108_the_users_own_wish_ends_in_torchs_words_and_doctor_names_the_first_cause(site: Path) -> None:
    done = python(site, "-m", "pagedkv.cli.main", "doctor", "--backend", "cpu", "--json", **{VARIABLE: "1"})
    first = json.loads(done.stdout)["findings"][0]
    assert done.returncode == 2 and first["what"] == "torch does not load"
    assert TORCHS in first["why"] and CAUSE in first["why"]
    assert first["command"] == "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


def test_what_the_user_set_stays() -> None:
    code = f"import os, pagedkv; print(os.environ[{VARIABLE!r}])"
    for given in ("1", "0"):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {VARIABLE: given}, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == f"{given}\n"
