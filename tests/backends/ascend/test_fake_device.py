"""The backend on a device that refuses tensors of the processor, as an NPU does; operators emulated.

In a process of its own, as torch has room for one such device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("fake_device.py")


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """What the process found."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("layer", ["plain", "window", "sinks"])
@pytest.mark.parametrize("size", [32, 128])
def test_append_prompts_copies_and_decode_leave_no_tensor_on_the_processor(
    said: dict[str, Any], layer: str, size: int
) -> None:
    assert said["device"] == "npu:0"
    steps = {name: text for name, text in said["right"].items() if name.startswith(f"{layer}, {size}:")}
    assert len(steps) == 4 and set(steps.values()) == {""}, "float64 agrees"


@pytest.mark.parametrize("what", ["slots", "table", "mask"])
def test_a_tensor_that_was_forgotten_on_the_processor_is_refused(said: dict[str, Any], what: str) -> None:
    refusal = said["forgotten"][what]
    assert refusal.startswith("npu.npu_") and refusal.endswith("expected all tensors to be on npu:0, found one on cpu")
    assert said["forgotten"]["nothing"] == "", "the same step with all tensors there"


def test_fused_ops_leave_none_there_either(said: dict[str, Any]) -> None:
    forgotten = said["ops"].pop("rms_norm, forgotten weight")
    assert forgotten.startswith("npu.npu_rms_norm") and forgotten.endswith("found one on cpu")
    assert set(said["ops"].values()) == {""} and len(said["ops"]) == 4
