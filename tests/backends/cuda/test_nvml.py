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


def built(folder: Path, *flags: str) -> Path:
    """A folder with the stand-in for NVML."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.fail("no C compiler: the stand-in for NVML cannot be built")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", *flags, "-o", str(target), str(SOURCE)], check=True)
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("nvml"))


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
    said = answer(library, CUDA_VISIBLE_DEVICES="GPU-00000003,GPU-00000001")
    assert len(said["devices"]) == 2
    assert len(answer(library, CUDA_VISIBLE_DEVICES="3,1,0")["devices"]) == 3
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
    assert said["state"].startswith("not run on hardware: kernels were tested under Triton's interpreter")


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


# -- drivers and devices that answer little or nonsense ----------------------------------------------------------------


def test_an_old_driver_without_todays_functions_names_processes_all_the_same(tmp_path):
    said = answer(built(tmp_path, "-DOLD"))["said"]
    assert "also used by process 4242 (9.0 GiB)" in said["GPU 0 GPU-00000000-test"]
    assert said["topology"].startswith("0: X NV4")


def test_u107_zeros_are_unknown(library):
    said = answer(library, FAKE_TOTAL="0", FAKE_CAPABILITY="0", FAKE_CUDA="0")
    first = said["devices"][0]
    assert first[1:4] == ["NVIDIA H100 80GB HBM3, compute capability unknown", None, None]
    assert first[4] == 0 and "update the driver" in first[5]
    assert "capability unknown, memory unknown" in said["said"]["GPU 0 GPU-00000000-test"]
    assert said["said"]["driver"] == "580.65.06"


def test_u107_a_library_that_answers_errors_is_no_exception(library):
    said = answer(library, FAKE_RAISES="3")
    assert said["devices"][0][2:5] == [None, None, 0]
    assert said["said"]["topology"] == "0: X PIX SYS SYS | 1: PIX X SYS SYS | 2: SYS SYS X PIX | 3: SYS SYS PIX X", (
        "links whose far end is unknown count for no pair"
    )


def test_a_gpu_that_is_lost_is_left_out(library):
    said = answer(library, FAKE_LOST="1")
    assert len(said["devices"]) == 3 and "GPU 2 GPU-00000002-test" in said["said"]


def test_links_to_a_switch_join_all_pairs(library):
    assert answer(library, FAKE_FAR_END="2")["said"]["topology"].startswith("0: X NV4 NV4 NV4 | 1: NV4 X NV4 NV4")


def test_screens_count_as_others_and_may_have_no_size(library):
    said = answer(library, FAKE_SCREEN="1")["said"]["GPU 0 GPU-00000000-test"]
    assert "also used by process 77 (unknown), process 4242 (9.0 GiB)" in said


def test_a_gpu_in_mig_mode_gives_its_first_slice(library):
    said = answer(library, FAKE_MIG="1")
    assert [device[1:4] for device in said["devices"]] == [
        ["NVIDIA H100 MIG 1g.10gb, compute capability 9.0", 10 << 30, 0]
    ]
    assert "in MIG mode: a process sees one slice" in said["said"]["GPU 1 GPU-00000001-test"]
    chosen = answer(library, FAKE_MIG="1", CUDA_VISIBLE_DEVICES="MIG-00000001-test")
    assert "leaves MIG-00000001-test" in chosen["said"]["CUDA_VISIBLE_DEVICES"]


def test_unequal_gpus_are_told_that_cuda_may_number_them_otherwise(library):
    assert "GPUs by UUID" in answer(library, FAKE_FIRST="80")["said"]["CUDA_DEVICE_ORDER"]
    assert "CUDA_DEVICE_ORDER" not in answer(library, FAKE_FIRST="80", CUDA_DEVICE_ORDER="PCI_BUS_ID")["said"]
    assert "CUDA_DEVICE_ORDER" not in answer(library)["said"]


@pytest.mark.parametrize(
    ("tens", "row"), [("121", "Blackwell 12.1"), ("130", "Blackwell 13.0"), ("103", "Blackwell 10.3")]
)
def test_capabilities_from_the_future_use_the_nearest_row_and_say_so(library, tens, row):
    said = answer(library, FAKE_CAPABILITY=tens)
    assert f"compute capability {row.split()[1]}" in said["devices"][0][1]
    assert said["said"][f"advice for {row}"].startswith("not in the table, what follows is of 1")


@pytest.mark.parametrize(
    ("code", "words"),
    [("4", "may not open /dev/nvidia*"), ("9", "docker run --gpus all"), ("18", "restart the machine")],
)
def test_each_refusal_of_the_driver_has_its_way_out(library, code, words):
    assert words in answer(library, FAKE_INIT=code)["said"]["driver"]
