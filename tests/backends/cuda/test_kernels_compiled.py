"""A sample of the kernels compiled for real targets, in a process of its own; all of them: `make aot`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = "features|descriptors|append|mul"
SHARED_LIMIT = {87: 163 << 10, 90: 227 << 10}
"""Bytes. Source: CUDA C++ Programming Guide, technical specifications per compute capability."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    """Reports of `ci/aot.py`, nothing taken from a cache."""
    folder = tmp_path_factory.mktemp("aot")
    own = {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "ci/aot.py", "--sample", "--targets", "87,90", "--only", SAMPLE]
    command += ["--json", str(folder / "reports.json")]
    done = subprocess.run(command, env=os.environ | own, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "reports.json").read_text("utf-8"))["kernels"]


def test_u104_orin_and_hopper_take_the_kernels_without_spilling(reports):
    found = {(report["target"], report["kernel"]) for report in reports}
    kernels = {"attend_tile", "merge_splits", "append_tile", "gate_block"}
    assert found == {(target, kernel) for target in SHARED_LIMIT for kernel in kernels}
    for report in reports:
        assert report["spills"] == 0 and report["shared"] <= SHARED_LIMIT[report["target"]]
        assert 0 < report["registers"] <= 255


def test_tiles_of_queries_become_the_instructions_they_were_written_for(reports):
    tall = {(report["target"], "descriptors" in report["name"]): report["instructions"]
            for report in reports if report["name"].startswith("many")}  # fmt: skip
    assert tall[87, False]["HMMA"] and tall[87, False]["LDGSTS"]  # matrix products; loads that run ahead
    assert tall[90, False]["HGMMA"]  # products of four warps
    assert tall[90, True]["HGMMA"] and tall[90, True]["UTMALDG"]  # loads by descriptor


def test_keys_of_several_blocks_come_by_descriptor_and_do_not_pass_through_registers(reports):
    name = "few, bfloat16, dim 128, block 16, descriptors"
    (boxes,) = [report["instructions"] for report in reports if report["name"] == name]
    assert boxes["UTMALDG"] >= 8  # a step of 64 keys and 64 values out of four blocks of 16 each
    assert boxes["STS"] < 64  # put together to one tile they took 132 stores to shared memory


def test_the_small_kernels_are_light(reports):
    small = [report for report in reports if report["kernel"] in ("append_tile", "gate_block")]
    assert max(report["registers"] for report in small) <= 64  # what leaves room for every warp of a multiprocessor
