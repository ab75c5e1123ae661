"""Errors of a device, plans' buffers, and the order of copies on a runtime that delays them."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pagedkv.api import ContractViolation, DeviceError, Event, OutOfDeviceMemory, torch_streams
from pagedkv.api.torch_streams import Buffers
from pagedkv_cuda import devices
from pagedkv_cuda import runtime as module
from pagedkv_cuda.runtime import HostRuntime, is_failure
from tests.backends.cuda.double import DelayingRuntime, double
from tests.backends.cuda.test_pool import layer, spec

# -- failures ----------------------------------------------------------------------------------------------------------


def raising(backend, error):
    """The backend's next recording of an event raises this."""

    def fail():
        raise error

    backend._runtime.record = fail
    return backend


def test_a_failure_of_the_device_stays():
    backend = raising(double(), RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(DeviceError, match="CUDA_LAUNCH_BLOCKING=1"):
        backend.record()
    with pytest.raises(DeviceError, match="illegal memory access"):
        backend.memory()
    backend.close()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["allocator", "runtime", "library"],
)
def test_out_of_memory_names_who_holds_the_rest_and_leaves_the_instance_usable(error):
    backend = raising(double(), error)
    backend._runtime.holders = lambda: "process 4242 (9.0 GiB)"
    with pytest.raises(OutOfDeviceMemory, match=r"fewer blocks.*end what else holds memory there: process 4242"):
        backend.record()
    assert backend.alloc_pool(spec()).num_blocks == 8


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (RuntimeError("NCCL error: unhandled cuda error, out of memory"), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ValueError("CUDA error"), False),
    ],
)
def test_which_errors_are_failures(error, failed):
    assert is_failure(error) is failed


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    """A runtime over a torch that says of one GPU: 80 GiB, 30 of them free, 12 its own, of which 5 are used."""
    told = SimpleNamespace(free=30, total=80, reserved=12, allocated=5, integrated=False, available=None)
    gib = 1 << 30
    cuda = {
        "mem_get_info": lambda index: (told.free * gib, told.total * gib),
        "memory_reserved": lambda index: told.reserved * gib,
        "memory_allocated": lambda index: told.allocated * gib,
        "max_memory_allocated": lambda index: told.allocated * gib,
        "get_device_properties": lambda index: SimpleNamespace(uuid="aa", is_integrated=told.integrated),
    }
    for name, answer in cuda.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: None)
    monkeypatch.setattr(devices, "available", lambda: None if told.available is None else told.available * gib)
    told.runtime = module.CudaRuntime(0)
    return told


def gibs(memory):
    return [None if size is None else size >> 30 for size in (memory.free, memory.total, memory.reclaimable)]


def test_other_processes_count_once_as_not_free(device):
    memory = device.runtime.memory()
    assert gibs(memory) == [30, 80, 7] and not memory.unified


def test_what_can_be_had_again_is_never_more_than_what_is_taken(device):
    device.free, device.reserved = 79, 12
    assert gibs(device.runtime.memory()) == [79, 80, 1]
    device.reserved = 3  # less than is allocated, as while another thread frees
    assert gibs(device.runtime.memory())[2] == 0


@pytest.fixture
def recording(device, monkeypatch):
    """Recordings that reserve 2 GiB each in the memory of a handle; what torch keeps is given back when one begins."""
    gib = 1 << 30
    handles = iter(range(9))
    device.used = []

    @contextmanager
    def graph(made, *, pool, capture_error_mode):
        device.used.append(pool)
        device.reserved += 2
        yield

    fake = {
        "graph_pool_handle": lambda: next(handles),
        "empty_cache": lambda: setattr(device, "reserved", device.allocated + 2 * len(device.open)),
        "memory_reserved": lambda index: device.reserved * gib,
        "CUDAGraph": lambda: SimpleNamespace(reset=lambda: device.open.pop(), replay=lambda: None),
        "graph": graph,
        "current_stream": lambda index: SimpleNamespace(wait_stream=lambda other: None),
        "stream": lambda stream: nullcontext(),
    }
    for name, answer in fake.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    device.open = []
    side = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: side)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())

    def record():
        made = device.runtime.capture(lambda: None)
        device.open.append(made)
        return made

    return record


def test_a_recording_counts_what_it_reserved_whatever_was_kept_before(device, recording):
    device.reserved = 12  # of which 7 are given back when a recording begins
    first, second = recording(), recording()
    assert (first.nbytes, second.nbytes) == (2 << 30, 2 << 30)
    device.reserved += 3  # freed tensors
    assert gibs(device.runtime.memory())[2] == 3, "what recordings hold is not to be had again"
    first.close()
    assert gibs(device.runtime.memory())[2] == 5


def test_recordings_share_memory_only_with_open_ones(device, recording):
    first, second = recording(), recording()
    first.close()
    third = recording()
    second.close()
    third.close()
    recording()
    assert device.used == [0, 0, 0, 1]


def test_u107_zeros_are_unknown(device):
    device.free = device.total = 0
    assert gibs(device.runtime.memory()) == [None, None, 7]


def test_a_gpu_in_the_machines_memory_has_what_the_system_can_give(device):
    device.integrated, device.available = True, 50
    memory = device.runtime.memory()
    assert gibs(memory)[:2] == [50, 80] and memory.unified
    device.available = None
    assert gibs(device.runtime.memory())[0] == 30


def test_who_holds_memory_is_asked_by_uuid(device, monkeypatch):
    monkeypatch.setattr(devices, "holders_of", lambda uuid: f"somebody on {uuid}")
    assert device.runtime.holders() == "somebody on GPU-aa"


def pinned(monkeypatch, error):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch, "empty", refuse)


def test_staging_that_cannot_be_pinned_is_out_of_memory_and_no_failure(device, monkeypatch):
    pinned(monkeypatch, RuntimeError("CUDA error: out of memory"))
    with pytest.raises(OutOfDeviceMemory, match="64 bytes of host memory could not be pinned"):
        device.runtime.staging(64)
    pinned(monkeypatch, RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        device.runtime.staging(64)


# -- buffers -----------------------------------------------------------------------------------------------------------


class Waiting(Event):
    """Counts how often the host waits for it."""

    joined = 0

    def join(self, timeout=None):
        Waiting.joined += 1


class Counting(HostRuntime):
    def record(self):
        return Waiting()


def test_a_pinned_buffer_is_written_again_only_after_its_last_copy():
    buffers, before = Buffers(Counting(), 64), Waiting.joined
    first = buffers.send({"slots": np.arange(3, dtype=np.int64), "rows": np.arange(2, dtype=np.int32)})
    assert Waiting.joined == before
    second = buffers.send({"slots": np.arange(3, 6, dtype=np.int64), "rows": np.arange(2, dtype=np.int32)})
    assert Waiting.joined == before + 1
    assert [one.data_ptr() for one in first.values()] == [one.data_ptr() for one in second.values()]
    assert second["slots"].tolist() == [3, 4, 5] and second["rows"].tolist() == [0, 1]
    assert all(one.data_ptr() % 8 == 0 for one in second.values())


def test_more_than_a_buffer_holds_is_refused():
    with pytest.raises(ContractViolation, match="the pool's limits allow 16"):
        Buffers(HostRuntime(), 16).send({"slots": np.arange(3, dtype=np.int64)})


# -- copies ------------------------------------------------------------------------------------------------------------


def filled(backend, made):
    """A pool whose block i holds i everywhere."""
    pool = backend.alloc_pool(made)
    pool.rows[: pool.num_blocks] = torch.arange(pool.num_blocks, dtype=torch.uint8)[:, None]
    return pool


def values(pool):
    return pool.rows[: pool.num_blocks, 0].tolist()


def test_copies_run_as_late_as_their_event_is_waited_for():
    backend = double()
    pool = filled(backend, spec())
    first = backend.copy_blocks(pool, pool, np.array([[1, 5], [2, 6]], np.int32))
    second = backend.copy_blocks(pool, pool, np.array([[5, 7]], np.int32), after=first)
    assert values(pool) == [0, 1, 2, 3, 4, 5, 6, 7]
    backend.wait(second)
    assert values(pool) == [0, 1, 2, 3, 4, 1, 2, 1]


@pytest.mark.parametrize("seed", range(4))
def test_independent_copies_may_run_in_any_order(seed):
    backend = double(runtime=DelayingRuntime(seed))
    pool, host = filled(backend, spec()), backend.alloc_pool(spec(placement="host"))
    out = [backend.copy_blocks(pool, host, np.array([[i, i]], np.int32)) for i in range(1, 8)]
    back = [
        backend.copy_blocks(host, pool, np.array([[i, 8 - i]], np.int32), after=event)
        for i, event in enumerate(out, start=1)
        if i == 4 or i > 6
    ]
    backend.synchronize()
    assert all(event.done() for event in (*out, *back))
    assert values(host) == [0, 1, 2, 3, 4, 5, 6, 7] and values(pool)[4] == 4 and values(pool)[1] == 7


@pytest.mark.parametrize(
    ("pairs", "runs"),
    [
        ([[1, 5], [2, 6], [3, 7]], [(1, 5, 3)]),
        ([[1, 5], [2, 7], [3, 8]], [(1, 5, 1), (2, 7, 2)]),
        ([[4, 4]], [(4, 4, 1)]),
        (np.zeros((0, 2)), []),
    ],
)
def test_stretches_that_follow_one_another_are_one_transfer(pairs, runs):
    assert list(torch_streams._runs(np.array(pairs, np.int64))) == runs


def test_what_a_block_of_another_dtype_holds_arrives_bit_for_bit():
    backend = double()
    pool = backend.alloc_pool(spec(layer(0), layer(1, v_dim=24)))
    pool.rows[2] = torch.randint(0, 256, (pool.rows.shape[1],), dtype=torch.uint8, generator=torch.Generator())
    backend.wait(backend.copy_blocks(pool, pool, np.array([[2, 3]], np.int32)))
    assert torch.equal(pool.rows[2], pool.rows[3]) and bool((pool.rows[4] != pool.rows[3]).any())
