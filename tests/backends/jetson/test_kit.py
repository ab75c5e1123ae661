"""The conformance kit on the Jetson backend's double, where it differs from the CUDA backend: memory, pools, promises.

`make certify` runs the whole kit on it; the CUDA backend's own double runs all of it in every test run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_kit_passes() -> None:
    script = ROOT / "tests" / "helpers" / "kit_run.py"
    command = [sys.executable, str(script), "jetson-double", "-k", "pool or honesty or loading or costs"]
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=os.environ | own, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["others"] == []
    assert said["passed"] > 60, "sections are missing"
