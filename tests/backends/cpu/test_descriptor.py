"""What the CPU backend says about itself before anything is loaded, and its memory answers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from pagedkv.api import BackendUnavailable, World
from pagedkv.api.errors import ConfigError
from pagedkv_cpu import backend as backend_module
from pagedkv_cpu import host
from pagedkv_cpu.descriptor import CpuDescriptor
from tests.backends.cpu.rig import shared_backend

GIB = 1 << 30


def test_the_entry_point_names_it():
    (entry,) = importlib.metadata.entry_points(group="pagedkv.backends", name="cpu")
    assert entry.load() is CpuDescriptor and CpuDescriptor.name == "cpu"


def test_u87_probing_imports_no_framework():
    code = (
        "import sys, json\nfrom pagedkv_cpu.descriptor import CpuDescriptor\nd = CpuDescriptor()\n"
        "d.describe(d.probe()[0]); d.diagnose()\n"
        "print(json.dumps([m for m in ('torch', 'psutil', 'transformers') if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(out.stdout) == []


def test_probe_gives_one_portable_device():
    (device,) = CpuDescriptor().probe()
    assert (device.index, device.score, device.reason, device.unified) == (0, 10, "portable", True)
    memory, cores = host.memory(), host.cores()
    assert device.total == memory.total
    assert f"{cores.usable} of {cores.present} cores" in device.kind


def test_without_torch_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (device,) = CpuDescriptor().probe()
    assert (device.score, device.reason) == (0, "torch is not installed: pip install torch")
    with pytest.raises(BackendUnavailable, match="pip install torch"):
        CpuDescriptor().create(0, {}, World())


def test_the_number_of_threads_is_obeyed_or_refused():
    before = torch.get_num_threads()
    try:
        for asked, used in ((1, 1), (2, 2), (0, host.cores().usable)):
            CpuDescriptor().create(0, {"threads": asked}, World())
            assert torch.get_num_threads() == used
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ConfigError, match="threads=-1"):
        CpuDescriptor().create(0, {"threads": -1}, World())


def test_another_device_is_refused():
    with pytest.raises(BackendUnavailable, match="index 0"):
        CpuDescriptor().create(1, {}, World())


def test_u93_describe_follows_the_processor(monkeypatch):
    descriptor = CpuDescriptor()
    (device,) = descriptor.probe()
    for flags, native in ((frozenset(), ("fp32",)), (frozenset({"amx_bf16"}), ("fp32", "bf16"))):
        monkeypatch.setattr(host, "isa_flags", lambda flags=flags: flags)
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        assert descriptor.describe(device).native_dtypes == native
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert descriptor.describe(device).native_dtypes == ("fp32",)


def test_an_instance_declares_at_most_what_was_described():
    descriptor = CpuDescriptor()
    said, does = descriptor.describe(descriptor.probe()[0]), shared_backend().capabilities()
    assert does.features <= said.features
    assert set(does.native_dtypes) <= set(said.native_dtypes) and does.dtypes == said.dtypes


def test_diagnose_shows_instructions_cores_and_memory():
    shown = CpuDescriptor().diagnose()
    assert {"model", "instructions", "native dtypes", "cores", "memory", "kernels", "torch"} == set(shown)
    assert "fp32" in shown["native dtypes"] and "GiB" in shown["memory"]


def say(monkeypatch, total: int | None, available: int | None) -> None:
    memory = host.Memory(total=total, available=available, source="test")
    monkeypatch.setattr(backend_module.host, "memory", lambda: memory)


@pytest.mark.parametrize(
    ("available", "reserved", "budget"),
    [
        (100 * GIB, GIB, 4 * GIB),  # the cap
        (5 * GIB, GIB, 2 * GIB),  # 40 %
        (5 * GIB, 4 * GIB, 1 * GIB),  # what the weights leave
        (5 * GIB, 6 * GIB, 0),
        (0, 0, 0),
    ],
)
def test_the_default_budget(monkeypatch, available, reserved, budget):
    say(monkeypatch, 200 * GIB, available)
    assert shared_backend().kv_budget(None, reserved) == budget


def test_an_explicit_fraction_is_of_the_total(monkeypatch):
    say(monkeypatch, 16 * GIB, 10 * GIB)
    assert shared_backend().kv_budget(0.5, GIB) == (8 - 6 - 1) * GIB
    assert shared_backend().kv_budget(0.1, GIB) == 0


def test_u96_unknown_memory_is_an_answer(monkeypatch):
    say(monkeypatch, None, None)
    made = shared_backend()
    memory = made.memory()
    assert (memory.free, memory.total, memory.unified) == (None, None, True)
    assert made.kv_budget(None, 0) is None and made.kv_budget(0.5, 0) is None


def test_u101_answers_that_jump_about_give_a_budget_each_time(monkeypatch):
    made = shared_backend()
    for available, budget in ((8, 3.2), (10, 4), (6, 2.4), (8, 3.2)):
        say(monkeypatch, 16 * GIB, available * GIB)
        assert made.kv_budget(None, GIB) == int(budget * GIB)
