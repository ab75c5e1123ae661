"""What the CUDA backend says before anything is loaded: scores with reasons, and refusals that say what to do."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pagedkv.api import BackendUnavailable, World
from pagedkv.api.errors import ConfigError
from pagedkv.checking.capabilities import exceeds
from pagedkv.plugins import check_options
from pagedkv_cuda import descriptor as module
from pagedkv_cuda import devices, limits, opening, packages
from pagedkv_cuda.capabilities import KERNELS, declared, offered
from pagedkv_cuda.descriptor import CudaDescriptor, device_info
from pagedkv_cuda.devices import DriverMissing, Gpu


def gpu(capability=(9, 0), **changes):
    fields = {"number": 0, "name": "NVIDIA Test", "uuid": "GPU-1", "total": 80 << 30, "free": 70 << 30}
    return Gpu(**{**fields, "capability": capability, **changes})


@pytest.fixture
def machine(monkeypatch):
    """A machine with the GPUs `shown`, and a torch and a Triton that serve them."""
    state = SimpleNamespace(shown=[gpu()], torch=None, triton=None, driver=13000, running=[])
    monkeypatch.setattr(devices, "is_tegra", lambda: False)
    monkeypatch.setattr(devices, "nvml", lambda: contextlib.nullcontext(object()))
    monkeypatch.setattr(devices, "visible_now", lambda _: state.shown)
    said = {"nvmlSystemGetCudaDriverVersion": lambda: state.driver, "nvmlDeviceGetHandleByUUID": lambda: 1}
    said["nvmlDeviceGetComputeRunningProcesses"] = lambda: state.running
    monkeypatch.setattr(devices, "ask", lambda _, name, *rest: said.get(name, lambda: None)())
    monkeypatch.setattr(packages, "why_no_torch", lambda cuda: state.torch)
    monkeypatch.setattr(packages, "why_no_triton", lambda: state.triton)
    return state


def probed():
    (device,) = CudaDescriptor().probe()
    return device


def test_the_entry_point_names_it():
    (entry,) = importlib.metadata.entry_points(group="pagedkv.backends", name="cuda")
    assert entry.load() is CudaDescriptor and CudaDescriptor.name == "cuda"


def test_u87_probing_and_diagnosing_import_no_framework():
    code = (
        "import sys, json\nfrom pagedkv_cuda.descriptor import CudaDescriptor\nd = CudaDescriptor()\n"
        "[d.describe(one) for one in d.probe()]; d.diagnose()\n"
        "print(json.dumps([m for m in ('torch', 'triton', 'psutil') if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(out.stdout) == []


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "score", "words"),
    [
        ((9, 0), 80, "native, Hopper"),
        ((10, 3), 50, "no tile sizes of its own"),
        ((7, 5), 10, 'backend_options={"kernels": "torch"}'),
        ((6, 1), 0, "6.1 is below 7.5"),
        (None, 0, "update the driver"),
    ],
)
def test_scores_have_reasons(machine, capability, score, words):
    machine.shown = [gpu(capability)]
    device = probed()
    assert device.score == score and words in device.reason
    assert (device.total, device.free, device.unified) == (80 << 30, 70 << 30, False)


def test_indices_are_cudas(machine):
    machine.shown = [gpu(number=3), gpu((8, 0), number=1)]
    assert [device.index for device in CudaDescriptor().probe()] == [0, 1]


def test_a_missing_extra_is_score_0_with_the_line_to_run(machine):
    machine.triton = packages.EXTRA
    assert (probed().score, probed().reason) == (0, "pip install 'pagedkv[cuda]'")


def test_turing_needs_no_triton(machine):
    machine.shown, machine.triton = [gpu((7, 5))], packages.EXTRA
    assert probed().score == limits.PORTABLE


def test_a_torch_that_does_not_fit_is_said(machine):
    machine.torch = "torch is not installed: pip install torch"
    assert (probed().score, probed().reason) == (0, machine.torch)


def test_nothing_visible(machine, monkeypatch):
    machine.shown = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert probed().score == 0 and "CUDA_VISIBLE_DEVICES='7' leaves none" in probed().reason
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "nvidia-smi" in probed().reason


def test_a_tegra_board_is_for_another_backend(monkeypatch):
    monkeypatch.setattr(devices, "is_tegra", lambda: True)
    assert probed().score == 0 and "choose backend jetson" in probed().reason


@pytest.mark.parametrize(("driver", "words"), [(True, "NVML says no"), (False, "no driver of NVIDIA's is loaded")])
def test_no_driver_raises_nothing(monkeypatch, driver, words):
    def missing():
        raise DriverMissing("NVML says no: do this")

    monkeypatch.setattr(devices, "is_tegra", lambda: False)
    monkeypatch.setattr(devices, "nvml", missing)
    monkeypatch.setattr(devices, "has_driver", lambda: driver)
    assert probed().score == 0 and words in probed().reason


def test_without_the_binding_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DriverMissing, match="pip install 'pagedkv"):
        devices.binding()


# -- packages ----------------------------------------------------------------------------------------------------------


def versions(monkeypatch, **installed):
    monkeypatch.setattr(packages, "version", lambda name: installed.get(name.replace("-", "_")))


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ({"triton": "3.6.0"}, None),
        ({"triton": "3.9.0"}, None),
        ({"triton": "3.10.1"}, None),
        ({"pytorch_triton": "3.6.0+git1"}, None),
        ({"triton": "3.5.1"}, "3.6 is the least"),
        ({}, "pip install 'pagedkv[cuda]'"),
        ({"triton": "3.9.0", "triton_ascend": "3.2.0"}, "overwrite each other's files"),
    ],
)
def test_triton(monkeypatch, installed, words):
    versions(monkeypatch, **installed)
    reason = packages.why_no_triton()
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize(
    ("built", "driver", "words"),
    [
        ("13.0", (13, 0), None),
        ("12.8", (13, 0), None),
        ("12.8", (12, 4), None),  # minor versions are compatible
        ("13.0", (12, 8), "update the driver, or install a torch built for CUDA 12"),
        ("13.0", None, None),
        (None, (13, 0), "is built without CUDA"),
    ],
)
def test_torch_and_driver(monkeypatch, built, driver, words):
    versions(monkeypatch, torch="2.13.0")
    monkeypatch.setattr(packages, "torch_cuda", lambda: built)
    reason = packages.why_no_torch(driver)
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize(
    ("line", "cuda"), [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.6'", "12.6"), ("cuda: str = None", None)]
)
def test_the_cuda_of_torch_is_read_from_its_version_file(monkeypatch, tmp_path, line, cuda):
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{line}\nhip = None\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert packages.torch_cuda() == cuda
    (tmp_path / "version.py").unlink()
    assert packages.torch_cuda() is None


# -- describe ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("row", limits.generations(), ids=lambda row: limits.spell(row.capabilities[0]))
def test_an_instance_declares_at_most_what_is_described(row, kernels):
    device = device_info(0, gpu(row.capabilities[0]), None)
    offer = CudaDescriptor().describe(device)
    assert offer == offered(row)
    mine = declared(row, kernels)
    assert exceeds(mine, offer) == []
    assert "graph" in mine.extensions and mine.graph == "decode"


def test_turing_is_not_offered_bf16():
    offer = CudaDescriptor().describe(device_info(0, gpu((7, 5)), None))
    assert offer.dtypes == ("fp16", "fp32") and "bf16" not in offer.kv_dtypes


# -- create ------------------------------------------------------------------------------------------------------------


def create(**options):
    descriptor = CudaDescriptor()
    return descriptor.create(0, check_options(descriptor, options), World())


def test_turing_refuses_triton_and_offers_torch(machine, monkeypatch):
    machine.shown = [gpu((7, 5))]
    with pytest.raises(BackendUnavailable, match=r'need compute capability 8.0.*\{"kernels": "torch"\}'):
        create()
    monkeypatch.setattr(opening, "open_backend", lambda *args, **given: given["kernels"])
    assert create(kernels="torch") == "torch"


def test_options_reach_the_instance(machine, monkeypatch, caplog):
    monkeypatch.setattr(opening, "open_backend", lambda *args, **given: (args[3], given))
    caplog.set_level("INFO")
    can, given = create(kernels="torch", disable_custom_all_reduce=True)
    assert (can.graph, given["kernels"]) == ("decode", "torch")
    assert "disable_custom_all_reduce: nothing to disable" in caplog.text


@pytest.mark.parametrize("options", [{"kernels": "cutlass"}, {"enforce_eager": True}])
def test_wrong_options(machine, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        create(**options)


def test_a_device_that_is_not_there(machine):
    with pytest.raises(BackendUnavailable, match="CUDA device 3: there is none"):
        CudaDescriptor().create(3, {}, World())


def test_a_torch_without_gpu_is_said(machine):
    with pytest.raises(BackendUnavailable, match="sees no GPU although the driver lists some"):
        create()  # this machine's torch


@pytest.mark.parametrize(
    ("order", "index"), [(["aa", "bb"], 1), (["bb", "aa"], 0)], ids=["by-address", "fastest-first"]
)
def test_the_gpu_is_found_by_its_uuid(monkeypatch, order, index):
    fake = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(order),
        get_device_properties=lambda i: SimpleNamespace(uuid=order[i]),
    )
    monkeypatch.setattr(opening.torch, "cuda", fake)
    assert opening.torch_index("GPU-bb", 1) == index
    assert opening.torch_index("", 1) == 1  # a MIG slice has another
    with pytest.raises(BackendUnavailable, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        opening.torch_index("GPU-cc", 1)


@pytest.mark.parametrize(("free", "warned"), [(70, True), (73, False), (None, False)])
def test_u113_memory_that_others_hold_is_told_with_their_process_ids(machine, monkeypatch, caplog, free, warned):
    machine.shown = [gpu(free=None if free is None else free << 30)]
    machine.running = [SimpleNamespace(pid=4242, usedGpuMemory=9 << 30), SimpleNamespace(pid=7, usedGpuMemory=None)]
    monkeypatch.setattr(opening, "open_backend", lambda *args, **given: "opened")
    assert create() == "opened"
    said = (
        "10.0 GiB of 80.0 GiB are taken (process 7 (unknown), process 4242 (9.0 GiB)) and the cache gets what is left"
    )
    assert (said in caplog.text) is warned
    machine.running = []
    create()
    assert ("the driver names no process" in caplog.text) is warned


@pytest.mark.parametrize(
    ("capability", "built", "words"),
    [
        ((12, 0), "12.6", "built for CUDA 12.8 or later"),
        ((10, 3), "12.6", "knows no Blackwell"),
        ((12, 0), "12.8", None),
        ((9, 0), "12.6", None),
    ],
)
def test_a_torch_that_is_older_than_the_gpu_is_said(machine, monkeypatch, capability, built, words):
    monkeypatch.setattr(packages, "torch_cuda", lambda: built)
    machine.shown = [gpu(capability)]
    assert (probed().score > 0) is (words is None)
    assert words is None or words in probed().reason


def test_the_module_under_test_reads_the_capability_from_the_kind():
    assert module.capability_of(device_info(0, gpu((12, 0)), None)) == (12, 0)
