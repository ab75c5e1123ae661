"""The prepared script for a day with a board: that it parses, asks for its folder, and does its steps in order."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "ci" / "device" / "jetson.sh"


def test_it_parses() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_results_without_a_folder_are_refused() -> None:
    done = subprocess.run(["bash", str(SCRIPT)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode != 0 and "OUT=/tmp/out" in done.stderr


def test_a_step_that_fails_is_told_and_does_not_end_it(tmp_path: Path) -> None:
    """With commands that only note how they were called; certify fails, and everything after it still runs."""
    calls = tmp_path / "calls"
    for name, code in (("pagedkv", '[ "$1" = certify ] && exit 1; exit 0'), ("python3", "exit 0"), ("id", "echo 1000")):
        (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {calls}\n{code}\n')
        (tmp_path / name).chmod(0o755)
    own = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(tmp_path / "out")}
    done = subprocess.run(["bash", str(SCRIPT)], env=os.environ | own, capture_output=True, text=True, timeout=60)
    ran = [line.split()[1] for line in calls.read_text().splitlines() if line.startswith("pagedkv")]
    assert ran == ["doctor", "tune", "certify", "certify", "generate", "generate", "bench"] or ran[1] == "jetson"
    assert done.returncode == 1 and "== certify ended with 1" in done.stdout
    assert "the fastest mode left out: only root may change modes" in done.stdout
