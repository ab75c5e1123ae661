"""Errors of a device, plans' buffers, and the order of copies on a runtime that delays them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.api import ContractViolation, DeviceError, Event, OutOfDeviceMemory
from pagedkv_cuda import copies
from pagedkv_cuda.plans import Buffers
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


def test_out_of_memory_leaves_the_instance_usable():
    backend = raising(double(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    with pytest.raises(OutOfDeviceMemory, match="fewer blocks"):
        backend.record()
    assert backend.alloc_pool(spec()).num_blocks == 8


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), False),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ValueError("CUDA error"), False),
    ],
)
def test_which_errors_are_failures(error, failed):
    assert is_failure(error) is failed


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
    with pytest.raises(ContractViolation, match="larger than the pool's limits"):
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
    assert list(copies._runs(np.array(pairs, np.int64))) == runs


def test_what_a_block_of_another_dtype_holds_arrives_bit_for_bit():
    backend = double()
    pool = backend.alloc_pool(spec(layer(0), layer(1, v_dim=24)))
    pool.rows[2] = torch.randint(0, 256, (pool.rows.shape[1],), dtype=torch.uint8, generator=torch.Generator())
    backend.wait(backend.copy_blocks(pool, pool, np.array([[2, 3]], np.int32)))
    assert torch.equal(pool.rows[2], pool.rows[3]) and bool((pool.rows[4] != pool.rows[3]).any())
