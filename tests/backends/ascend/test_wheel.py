"""The wheel of torch-npu itself, imported over stub libraries in a process of its own: names, schemas, shapes.

Nothing is computed: numbers are those of no NPU, and there are none. Skipped where the wheel cannot be had.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[3] / "ci" / "ascend.py"
DOWNLOAD = 60
"""Seconds that fetching the wheel, 43 MB, may take."""
WHERE = ("meta", "npu:0")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """ci/ascend.py, with the wheel in its folder."""
    spec = importlib.util.spec_from_file_location("ci_ascend", SCRIPT)
    if spec is None or spec.loader is None:
        raise ImportError(SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if sys.platform != "linux" or not shutil.which("gcc") or not shutil.which("nm"):
        pytest.skip("stub libraries need Linux, gcc and nm")
    if not torch.__version__.startswith(module.IMPORTED):
        pytest.skip(f"torch-npu {module.IMPORTED} runs with that torch, this is {torch.__version__}")
    try:
        module.unpacked(module.IMPORTED, DOWNLOAD)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"the wheel of torch-npu {module.IMPORTED} cannot be had: {error}")
    return module


@pytest.fixture(scope="module")
def said(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the probe says, given a fixture with one wrong line besides the right ones."""
    fixture = tmp_path_factory.mktemp("schemas") / f"{script.IMPORTED}.txt"
    right = (script.FIXTURES / fixture.name).read_text("utf-8")
    fixture.write_text(right + "npu::npu_swiglu(Tensor input, int dim=-2) -> Tensor\n")
    found: dict[str, Any] = script.probed(script.IMPORTED, fixture)
    return found


def test_the_wheel_agrees_with_everything_but_a_wrong_line(said: dict[str, Any]) -> None:
    """U109: schemas, names in torch.npu, and shapes of our calls by the wheel's own functions."""
    assert "failed" not in said, said["failed"]
    assert [line.split(":")[0] for line in said["wrong"]] == ["schemas"], said["wrong"]
    assert "int dim=-2" in said["wrong"][0]


def test_every_kind_of_call_was_looked_at(said: dict[str, Any]) -> None:
    """Both versions of attention, one query and several, as meta tensors and as fake ones on npu:0."""
    attention = [f"{what} {version}" for what in ("decode", "prefill") for version in ("v1", "v2")]
    kinds = {f"{what} on {where}" for what in attention for where in WHERE}
    kinds |= {f"{what} on {where}" for what in ("append", "rms_norm", "silu_mul") for where in WHERE}
    assert kinds | {"rope on meta", "schemas", "torch.npu names", "version"} == said["checked"].keys()
    assert said["checked"]["schemas"] == 27
    assert said["checked"]["torch.npu names"] > 30
