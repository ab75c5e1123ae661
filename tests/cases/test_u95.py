"""U95: what Triton's interpreter computes wrongly is skipped with the reason, and never passes."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "tests/backends/cuda/interpreted"
SOME = "rms_norm_of_slices or (equals_float64 and (prefix or int8)) or u95_bfloat16"
"""Tests of kernels in every dtype, a few seconds in all."""
BFLOAT16 = ("bfloat16", "bf16", "int8 by token", "-dtype1")
"""What the names of those over bfloat16 hold."""

WITHOUT_A_HOOK = """
from triton.runtime.interpreter import InterpreterBuilder as Builder
plain = Builder.cast_impl
del Builder.cast_impl
Builder.__getattr__ = lambda self, name: {"cast_impl": plain.__get__(self)}[name]
"""
"""An interpreter as another version might bring it: it computes as before, and what the repair replaces has gone."""

THAT_DOES_NOT_HOLD = """
from tests.backends.cuda.interpreted import interpreter
interpreter.narrowed = lambda numbers: (numbers.view("uint32") >> 16).astype("uint16")
"""
"""A repair that can be installed and truncates as the interpreter did before."""

TOO_LATE = """
import os
del os.environ["TRITON_INTERPRET"]
import triton
os.environ["TRITON_INTERPRET"] = "1"
"""


def interpreted(before: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that runs `before`, then the tests of the kernels."""
    command = ["-x", "-rs", "-p", "no:cacheprovider", FOLDER, *arguments]
    script = f"{before}\nimport sys, pytest\nsys.exit(pytest.main({command!r}))"
    own = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}"}
    own |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-c", script], env=os.environ | own, cwd=ROOT, capture_output=True, text=True
    )


def outcomes(report: Path) -> tuple[set[str], set[str]]:
    """Names of tests that passed, and of those that were skipped."""
    cases = list(xml.parse(report).getroot().iter("testcase"))
    skipped = {case.get("name", "") for case in cases if case.find("skipped") is not None}
    return {case.get("name", "") for case in cases} - skipped, skipped


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (WITHOUT_A_HOOK, "this interpreter has no cast_impl to repair"),
        (THAT_DOES_NOT_HOLD, "the interpreter computes bfloat16 wrongly in spite"),
    ],
    ids=["no hook", "still wrong"],
)
def test_u95_bfloat16_is_skipped_where_it_cannot_be_repaired(before: str, reason: str, tmp_path: Path) -> None:
    done = interpreted(before, "-k", SOME, f"--junitxml={tmp_path / 'report.xml'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SKIPPED" in done.stdout and f"bfloat16 under the interpreter: {reason}" in done.stdout
    passed, skipped = outcomes(tmp_path / "report.xml")
    assert skipped == {name for name in passed | skipped if any(word in name for word in BFLOAT16)} != set()
    assert {"test_attention_equals_float64[prefix]", "test_rms_norm_of_slices[False-dtype0]"} <= passed


def test_u95_a_choice_after_the_import_is_refused() -> None:
    done = interpreted(TOO_LATE, "-k", SOME)
    assert done.returncode == 4
    assert "before TRITON_INTERPRET=1 was set: start a process with it set" in done.stdout + done.stderr
