"""Everything that can be wrong with a machine for the CUDA backend: what is said of it, through each public way.

The machine is a process of its own with the stand-in for NVML of nvml.c under NVIDIA's binding; which packages it has
is told to `pagedkv_cuda.packages`, where the real ones would be looked up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.backends.cuda.test_nvml import built

TORCH = {"torch": "2.13.0", "cuda": "13.0"}
TRITON = {"triton": "3.7.1"}
GOOD = {**TORCH, **TRITON}
OFFER = 'backend_options={"kernels": "torch"} runs attention by torch\'s operators instead, slower'
CARD = "NVIDIA H100 80GB HBM3, compute capability"

SITE = """
import json, os, sys
from pagedkv_cuda import devices, packages
def has(name):
    return json.loads(os.environ.get("FAKE_PACKAGES", "{}")).get(name)
real = devices.has_driver
packages.version = has
packages.torch_cuda = lambda: has("cuda")
devices.has_driver = lambda: bool(os.environ.get("FAKE_DRIVER_FILES")) or real()
"""
ROWS_AT_ONCE = """
import json, os, sys
from pagedkv import plugins
for variables, without in json.loads(sys.argv[1]):
    os.environ |= variables
    sys.modules.pop("pynvml", None)
    if without:
        sys.modules["pynvml"] = None
    try:
        said = f"selected {plugins.select('cuda').device}"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps(said))
    for name in variables:
        del os.environ[name]
"""
ENGINE = """
import json, sys
from pagedkv import LLM
for settings in json.loads(sys.argv[1]):
    try:
        LLM("nowhere", backend="cuda", skip_tokenizer_init=True, **settings)
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""
CREATE = """
import json, sys
import pagedkv.logs
from pagedkv import plugins
for options in json.loads(sys.argv[1]):
    try:
        plugins.create(plugins.select("cuda"), options)
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A machine, and the one line that is said of it."""

    said: str = ""
    packages: dict = field(default_factory=lambda: GOOD)
    variables: dict = field(default_factory=dict)
    binding: bool = True

    @property
    def environment(self):
        return {"FAKE_COUNT": "1", "FAKE_PACKAGES": json.dumps(self.packages), **self.variables}


ROWS = {
    "no-binding": Row(
        said="nvidia-ml-py is not installed: pip install 'pagedkv[cuda]'",
        binding=False,
        variables={"FAKE_DRIVER_FILES": "1"},
    ),
    "driver-does-not-answer": Row(
        said="NVIDIA's driver does not answer (Driver Not Loaded): install it, or start the container with the GPUs in "
        "it (docker run --gpus all)",
        variables={"FAKE_INIT": "9", "FAKE_DRIVER_FILES": "1"},
    ),
    "driver-updated": Row(
        said="NVIDIA's driver does not answer (RM has detected an NVML/RM version mismatch.): its library and its "
        "kernel module are of different versions, as after an update: restart the machine",
        variables={"FAKE_INIT": "18", "FAKE_DRIVER_FILES": "1"},
    ),
    "driver-too-old": Row(
        said="the driver knows CUDA up to 12.4, torch 2.13.0 is built for 13.0: update the driver, or install a torch "
        "built for CUDA 12",
        variables={"FAKE_CUDA": "12040"},
    ),
    "torch-missing": Row(said="torch is not installed: pip install torch", packages=TRITON),
    "torch-without-cuda": Row(
        said="torch 2.13.0+cpu is built without CUDA: install a CUDA build of torch in its place",
        packages={"torch": "2.13.0+cpu", **TRITON},
    ),
    "torch-older-than-the-gpu": Row(
        said="torch 2.11.0 is built for CUDA 12.6, which knows no Blackwell: install a torch built for CUDA 12.8 or "
        "later",
        packages={"torch": "2.11.0", "cuda": "12.6", **TRITON},
        variables={"FAKE_CAPABILITY": "120"},
    ),
    "triton-missing": Row(said="triton is not installed: pip install 'pagedkv[cuda]'", packages=TORCH),
    "triton-too-old": Row(
        said="triton 3.5.1 is too old, 3.6 is the least: pip install -U triton", packages={**TORCH, "triton": "3.5.1"}
    ),
    "both-tritons": Row(
        said="triton and triton-ascend overwrite each other's files: pip uninstall triton-ascend, then pip install "
        "--force-reinstall triton",
        packages={**GOOD, "triton-ascend": "3.2.0"},
    ),
    "capability-too-old": Row(
        said="compute capability 6.1 is below 7.5, today's torch has no code for it: choose another GPU",
        variables={"FAKE_CAPABILITY": "61"},
    ),
    "capability-unknown": Row(
        said="the driver does not tell its compute capability: update the driver", variables={"FAKE_CAPABILITY": "0"}
    ),
    "none-visible": Row(
        said="CUDA_VISIBLE_DEVICES='NoDevFiles' leaves none: unset it, or name a GPU that nvidia-smi -L lists",
        variables={"CUDA_VISIBLE_DEVICES": "NoDevFiles"},
    ),
    "no-gpu": Row(said="the driver lists no GPU: look at nvidia-smi", variables={"FAKE_COUNT": "0"}),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITE)
    return folder


@pytest.fixture
def machine(library, site):
    """Runs Python there: (row, arguments) -> the process that has ended."""

    def run(row, *arguments, driver=True):
        own = {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", **row.environment}
        own["LD_LIBRARY_PATH"] = str(library) if driver else ""
        dropped = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PAGEDKV_BACKEND", "PAGEDKV_LOG_LEVEL")
        there = {name: value for name, value in os.environ.items() if name not in dropped}
        return subprocess.run(
            [sys.executable, *arguments], env=there | own, capture_output=True, text=True, timeout=120
        )

    return run


def lines(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def listed(machine, row, **more):
    done = machine(row, "-m", "pagedkv.cli.main", "backends", "--json", **more)
    (found,) = [one for one in json.loads(done.stdout) if one["name"] == "cuda"]
    return found


def test_each_has_its_line(machine):
    asked = [[row.environment, not row.binding] for row in ROWS.values()]
    answers = lines(machine(Row(), "-c", ROWS_AT_ONCE, json.dumps([*asked, [Row().environment, False]])))
    assert answers.pop().startswith(f"selected DeviceInfo(index=0, kind='{CARD} 9.0'"), "nothing is wrong with the last"
    head = "BackendUnavailable: backend 'cuda' (pagedkv 0.1.0), chosen by argument, cannot be used: device 0 ("
    assert all(answer.startswith(head) for answer in answers)
    assert {
        name: a.partition("): ")[2] for name, a in zip(ROWS, (a.partition(head)[2] for a in answers), strict=True)
    } == {name: row.said for name, row in ROWS.items()}


def test_no_driver(machine):
    found = listed(machine, Row(), driver=False)
    assert (found["status"], found["score"]) == ("unavailable", 0)
    assert found["reasons"] == [
        "device 0 (no GPU): no driver of NVIDIA's is loaded: install it, or choose another backend"
    ]


def test_every_public_way_says_the_line(machine):
    row = ROWS["driver-too-old"]
    found = listed(machine, row)
    assert (found["status"], found["reasons"]) == ("unavailable", [f"device 0 ({CARD} 9.0): {row.said}"])
    ((kind, text),) = lines(machine(row, "-c", ENGINE, "[{}]"))
    assert kind == "BackendUnavailable" and text.endswith(f": {row.said}")
    doctor = json.loads(machine(row, "-m", "pagedkv.cli.main", "doctor", "--backend", "cuda", "--json").stdout)
    assert row.said in doctor["choice"]["why"] and doctor["choice"]["backend"] is None
    refused = machine(row, "-m", "pagedkv.cli.main", "certify", "cuda")
    assert refused.returncode != 0 and f"{row.said}. So nothing can be certified here" in refused.stderr
    assert "It says of itself: not run on hardware: kernels were tested under" in refused.stderr


def test_turing_is_listed_refused_for_triton_and_offered_torch(machine):
    row = Row(packages=TORCH, variables={"FAKE_CAPABILITY": "75"})  # without Triton, which it does not need
    found = listed(machine, row)
    assert (found["status"], found["score"], found["devices"][0]["kind"]) == ("ok", 10, f"{CARD} 7.5")
    why = "Triton builds no tensor-core code for 7.5, only code that spills registers"
    assert found["devices"][0]["reason"] == f"portable: {why}; {OFFER}"
    refused, opened = lines(machine(row, "-c", CREATE, '[{}, {"kernels": "torch"}]'))
    assert refused == [
        "BackendUnavailable",
        f"{CARD} 7.5: Triton's kernels need compute capability 8.0, this is 7.5: {why}; {OFFER}",
    ]
    assert (
        opened[1].startswith("torch ")
        and "sees no GPU although the driver lists some: see `pagedkv doctor`" in opened[1]
    )


def test_what_others_hold_is_told_with_process_and_way_out(machine):
    row = Row(variables={"FAKE_USED": "70"})
    assert (
        "CUDA device 0: 70.0 GiB of 80.0 GiB are taken (process 4242 (9.0 GiB)) and the cache gets what is left: end "
        "what is not needed, or choose another GPU with device=N"
    ) in machine(row, "-c", CREATE, "[{}]").stderr
    doctor = json.loads(machine(row, "-m", "pagedkv.cli.main", "doctor", "--backend", "cuda", "--json").stdout)
    (said,) = [one["diagnose"] for one in doctor["backends"]]
    assert "10.0 GiB free of 80.0 GiB, also used by process 4242 (9.0 GiB)" in said["GPU 0 GPU-00000000-test"]


def test_sizes_and_dtypes_are_refused_before_a_file_is_opened(machine):
    row = Row(variables={"FAKE_CAPABILITY": "75"})
    settings = [{"block_size": 2048}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "bfloat16"}]
    size, dtype, kv_dtype = lines(machine(row, "-c", ENGINE, json.dumps(settings)))
    head = "backend cuda does not support"
    assert size == ["UnsupportedError", f"{head} block_size=2048; accepted: 1 to 1024; leave it unset for 16"]
    assert dtype == ["UnsupportedError", f"{head} dtype='bf16'; accepted: fp16, fp32"]
    assert kv_dtype[1].startswith(f"{head} kv_dtype='bf16'; accepted: fp16, fp32")
