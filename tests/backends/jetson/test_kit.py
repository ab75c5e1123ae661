"""The conformance kit on the Jetson backend's double, where it differs from the CUDA backend: memory, pools, promises.

The rest is the CUDA backend's own code, which its own double runs the whole kit on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SECTIONS = "(pool or honesty or loading or costs) and not test_import_is_light"
"""The last: the double's own package is another one than the backend's; the real descriptor is looked at elsewhere."""


def test_the_kit_passes(tmp_path: Path) -> None:
    info = tmp_path / "jetson_double-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jetson-double\nVersion: 1.0\n")
    target = "tests.backends.jetson.double_descriptor:DoubleDescriptor"
    (info / "entry_points.txt").write_text(f"[pagedkv.backends]\njetson-double = {target}\n")
    certify = ["certify", "jetson-double", "-k", SECTIONS, "--json", str(tmp_path / "told.json"), "-q"]
    own = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pagedkv.cli.main", *certify]
    done = subprocess.run(command, env=os.environ | own, cwd=ROOT, capture_output=True, text=True, timeout=300)
    told = json.loads((tmp_path / "told.json").read_text())
    outcomes = {case["id"]: case["outcome"] for law in told["laws"] for case in law["cases"]}
    assert {key: value for key, value in outcomes.items() if value != "passed"} == {}, done.stdout[-3000:]
    assert len(outcomes) > 60, "sections are missing"
