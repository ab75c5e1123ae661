"""The real binding over a library of our own: four H100 in two NVLink pairs, one of them also used by a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml.c")
CODE = """
import json
from pagedkv_cuda.descriptor import CudaDescriptor
found = CudaDescriptor()
devices = [[one.index, one.kind, one.total, one.free, one.score, one.reason] for one in found.probe()]
print(json.dumps({"devices": devices, "said": dict(found.diagnose())}))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.fail("no C compiler: the stand-in for NVML cannot be built")
    folder = tmp_path_factory.mktemp("nvml")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(target), str(SOURCE)], check=True)
    return folder


def answer(library, **changes):
    """What probe and diagnose say in a process of their own."""
    own = {"LD_LIBRARY_PATH": str(library), **changes}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=os.environ | own, capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def test_devices_memory_and_capability(library):
    devices = answer(library)["devices"]
    assert [device[0] for device in devices] == [0, 1, 2, 3]
    assert devices[0][1] == "NVIDIA H100 80GB HBM3, compute capability 9.0"
    assert devices[0][2:4] == [80 << 30, 70 << 30]


def test_the_variable_chooses_by_number_and_by_uuid(library):
    said = answer(library, CUDA_VISIBLE_DEVICES="3,GPU-00000001")
    assert len(said["devices"]) == 2
    assert "leaves GPU-00000003-test, GPU-00000001-test" in said["said"]["CUDA_VISIBLE_DEVICES"]


def test_the_report(library):
    said = answer(library)["said"]
    assert said["driver"] == "580.65.06, CUDA up to 13.0"
    assert said["topology"] == "0: X NV4 SYS SYS | 1: NV4 X SYS SYS | 2: SYS SYS X NV4 | 3: SYS SYS NV4 X"
    assert said["topology means"] == "NV: NVLink, by number of links, SYS: between sockets"
    assert said["peer access"].startswith("none between 0-2, 0-3, 1-2, 1-3")
    assert "also used by process 4242 (9.0 GiB)" in said["GPU 0 GPU-00000000-test"]
    assert "process" not in said["GPU 1 GPU-00000001-test"]
    assert "block sizes from 64" in said["advice for Hopper 9.0"]
    assert "not yet run on hardware" in said["state"]


def test_a_driver_too_old_for_torch_is_said(library, tmp_path):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('probing imports no framework')")
    (folder / "version.py").write_text("cuda = '13.0'\n")
    said = answer(library, FAKE_CUDA="12040", PYTHONPATH=str(tmp_path))
    assert "the driver knows CUDA up to 12.4" in said["devices"][0][5] and "is built for 13.0" in said["said"]["change"]


@pytest.mark.parametrize(("changes", "words"), [({"FAKE_INIT": "9"}, "Driver Not Loaded"), ({"FAKE_COUNT": "0"}, "")])
def test_no_driver_and_no_gpu_are_no_exceptions(library, changes, words):
    said = answer(library, **changes)
    assert [device[4] for device in said["devices"]] == [0] and said["devices"][0][5]
    assert words in said["said"]["driver"]
