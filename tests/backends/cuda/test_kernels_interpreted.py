"""The kernels under Triton's interpreter, in a process of its own: the choice falls when Triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_kernels_under_the_interpreter():
    own = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "backends")}
    own |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "tests/backends/cuda/interpreted"]
    done = subprocess.run(command, env=os.environ | own, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 50, "files of tests are missing"
    assert "skipped" not in done.stdout
