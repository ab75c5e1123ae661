"""U107: a board whose management library is missing, raises or answers zeros, and whose memory another runtime took."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pagedkv.errors import OutOfDeviceMemory
from pagedkv_cuda import packages
from pagedkv_cuda.backend import CudaBackend
from pagedkv_jetson.descriptor import JetsonDescriptor
from tests.backends.cuda.test_pool import spec
from tests.backends.jetson import trees
from tests.backends.jetson.double import double
from tests.helpers.memory_rig import GIB, planned

ASSERTION = (
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/opt/pytorch/c10/cuda/CUDACachingAllocator.cpp":1131, please report '
    "a bug to PyTorch."
)
"""What torch's allocator raises on such a board where memory is short."""


def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pynvml" else find(name, *rest)
    )


def library(monkeypatch: pytest.MonkeyPatch, initialise: Callable[[], None]) -> None:
    fake = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def init() -> None:
        initialise()

    told = {
        "NVMLError": NVMLError,
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=0, free=0, used=0),
    }
    for name, value in told.items():
        setattr(fake, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", fake)


def raising(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Not Supported")

    library(monkeypatch, fail)


def zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, lambda: None)


@pytest.mark.parametrize("state", [missing, raising, zeros])
def test_u107_no_figure_comes_from_the_management_library(
    state: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "why_no_torch", lambda driver: None)
    monkeypatch.setattr(packages, "why_no_triton", lambda extra: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    state(monkeypatch)
    trees.board(tmp_path, "orin-nano-8")
    trees.meminfo(tmp_path, total=8 * GIB, available=4 * GIB, free=GIB)
    (device,) = JetsonDescriptor(tmp_path).probe()
    assert (device.score, device.total, device.free) == (80, 8 * GIB, 4 * GIB)
    assert JetsonDescriptor(tmp_path).diagnose()["memory"].startswith("4.0 GiB available of 8.0 GiB")
    backend = double(tmp_path)
    assert backend.kv_budget(None, GIB) == int(0.85 * 4 * GIB) - GIB // 2 - GIB
    backend.close()


def test_u107_what_another_process_has_taken_is_not_planned_with(tmp_path: Path) -> None:
    backend = double(tmp_path)
    trees.meminfo(tmp_path, total=8 * GIB, available=7 * GIB, free=6 * GIB)
    alone = planned(backend)
    trees.meminfo(tmp_path, total=8 * GIB, available=7 * GIB // 2, free=GIB)
    with pytest.raises(OutOfDeviceMemory) as raised:
        planned(backend)
    assert alone.total <= 0.85 * 7 * GIB - GIB // 2
    said = str(raised.value)
    assert "8.0 GiB, 3.5 GiB available" in said and "weights" in said, "a shortage is told with its numbers"
    assert planned(backend, weights=GIB).total <= 0.85 * 3.5 * GIB - GIB // 2
    backend.close()


def test_u107_an_assertion_of_the_allocator_is_told_as_the_shortage_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: CudaBackend, wanted: object) -> None:
        raise RuntimeError(ASSERTION)

    backend = double(tmp_path)
    trees.meminfo(tmp_path, total=8 * GIB, available=2 * GIB, free=GIB)
    with monkeypatch.context() as patched:
        patched.setattr(CudaBackend, "alloc_pool", fail)
        with pytest.raises(OutOfDeviceMemory, match="2048 of 8192 MiB are available") as raised:
            backend.alloc_pool(spec())
    assert str(raised.value.__cause__) == ASSERTION and "end what else uses memory" in str(raised.value)
    assert backend.alloc_pool(dataclasses.replace(spec(), num_blocks=4)).num_blocks == 4, "the instance stays usable"
    backend.close()


def test_u107_another_error_is_not_taken_for_a_shortage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: CudaBackend, wanted: object) -> None:
        raise RuntimeError("something else")

    backend = double(tmp_path)
    monkeypatch.setattr(CudaBackend, "alloc_pool", fail)
    with pytest.raises(RuntimeError, match="something else"):
        backend.alloc_pool(spec())
    backend.close()
