"""The cache's memory on a stand-in for torch.npu: its pool, what is free, and what is told where that is too little."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.api import DeviceError, OutOfDeviceMemory
from pagedkv_ascend import opening
from pagedkv_ascend.pool import AscendPool, pool_cost
from pagedkv_ascend.runtime import NpuRuntime
from tests.backends.ascend import fake_npu
from tests.backends.ascend.fake_npu import FakeNpu
from tests.backends.ascend.pools import layer, made_pool, spec

GIB = 1 << 30
CACHE = 9 * 2 * 32 * 2 * 32 * 2
"""Bytes of spec()'s cache: 8 blocks and one for discards x keys and values x tokens x heads x dim x bytes."""


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    return fake_npu.install(monkeypatch)


# -- the pool ----------------------------------------------------------------------------------------------------------


def test_the_cache_lies_in_a_pool_of_its_own_and_nothing_else_does(npu: FakeNpu) -> None:
    pool = made_pool(NpuRuntime(0, pooled=opening.pooled({})), spec())
    torch.empty(100, device="npu:0")
    assert npu.pools == {"common": {"held": 4 * 4, "left": 100 * 4}, "pool 1": {"held": CACHE, "left": 0}}
    assert (pool.layers[0].parts[0].keys.shape, npu.memory_allocated(0)) == ((9, 32, 64), CACHE + 16)


def test_with_the_option_off_it_lies_in_torch_npus_common_memory(npu: FakeNpu) -> None:
    pool = made_pool(NpuRuntime(0, pooled=opening.pooled({"use_ascend_memory_pool": False})), spec())
    assert list(npu.pools) == ["common"] and npu.pools["common"]["held"] == CACHE + 16
    pool.close()
    assert npu.memory_allocated(0) == 0


def test_expandable_segments_and_a_pool_are_not_tried_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")
    assert opening.pooled({}) is False
    assert "use_ascend_memory_pool is off" in caplog.text and "leave one of them out" in caplog.text
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False")
    assert opening.pooled({}) is True


def test_closing_gives_the_memory_back_to_the_driver(npu: FakeNpu) -> None:
    runtime = NpuRuntime(0, pooled=True)
    first, second = made_pool(runtime, spec()), made_pool(runtime, spec(layer(0), layer(1)))
    assert npu.pools["pool 2"]["held"] == 2 * CACHE
    first.close()
    assert npu.pools["pool 1"] == {"held": 0, "left": 0}, "a pool goes with its cache, whatever else is open"
    assert npu.pools["pool 2"]["held"] == 2 * CACHE
    second.close()
    second.close()
    npu.empty_cache()
    assert npu.mem_get_info(0) == (64 * GIB, 64 * GIB)


@pytest.mark.parametrize("refused", [0, 1, 2, 3])
def test_a_refusal_half_way_gives_back_what_was_had_and_leaves_the_instance_usable(npu: FakeNpu, refused: int) -> None:
    runtime, wanted = NpuRuntime(0, pooled=True), spec(layer(0), layer(1))
    npu.refuse_from = refused
    with pytest.raises(OutOfDeviceMemory) as raised:
        made_pool(runtime, wanted)
    assert npu.mem_get_info(0) == (64 * GIB, 64 * GIB), "while the error is still held"
    said, cost = str(raised.value), pool_cost(wanted, 0)
    needed = 8 * cost.per_block + cost.fixed
    assert f"the cache needs {needed} bytes" in said and f"of {64 * GIB} are free on npu:0" in said
    for way in ("num_blocks", "max_model_len", "end what else uses the device"):
        assert way in said
    assert raised.value.requested == needed and runtime.failure is None
    npu.refuse_from = 1 << 60
    assert made_pool(runtime, wanted).num_blocks == 8


def test_a_cache_larger_than_what_is_free_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = fake_npu.install(monkeypatch, total=CACHE)
    npu.others = CACHE // 2
    with pytest.raises(OutOfDeviceMemory, match=rf"{CACHE // 2} of {CACHE} are free") as raised:
        made_pool(NpuRuntime(0, pooled=True), spec())
    assert raised.value.free == CACHE // 2


def test_a_failure_is_not_taken_for_a_lack_of_memory(npu: FakeNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*size: Any, **more: Any) -> torch.Tensor:
        raise RuntimeError("NPU function error: c10_npu::acl::AclrtSynchronizeDevice, error code is 507899")

    runtime = NpuRuntime(0, pooled=True)
    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(DeviceError, match="507899"), runtime.here():
        made_pool(runtime, spec())


def test_no_plane_is_kept_by_anything_but_the_pool(npu: FakeNpu) -> None:
    pool: AscendPool = made_pool(NpuRuntime(0, pooled=False), spec(layer(0), layer(1, kv_of=0)))
    keys = pool.layers[1].parts[0].keys
    pool.close()
    assert npu.memory_allocated(0) == CACHE // 2, "the keys that the test itself holds"
    del keys
    assert npu.memory_allocated(0) == 0


# -- host memory -------------------------------------------------------------------------------------------------------


def test_host_pools_are_pinned_and_take_nothing_of_the_device(npu: FakeNpu) -> None:
    runtime = NpuRuntime(0, pooled=True)
    pool = made_pool(runtime, spec(placement="host"))
    assert npu.memory_reserved(0) == 0 and pool.num_blocks == 8
    npu.unpinnable = RuntimeError(
        "allocate_host_memory_slowpath:../torch_npu/csrc/core/npu/CachingHostAllocator.cpp:252 NPU function error: "
        "aclrtMallocHostWithCfg, error code is 207001\n[ERROR] ERR00100 PTA call acl api failed\n"
        "rtsMallocHost execution failed, reason=driver error:out of memory"
    )
    with pytest.raises(OutOfDeviceMemory, match=r"(?s)could not be pinned.*lower swap_space.*ulimit -l") as raised:
        made_pool(runtime, spec(placement="host"))
    assert raised.value.requested == 8 * pool.cost.per_block
    assert runtime.failure is None and pool.num_blocks == 8


@pytest.mark.parametrize(
    "said",
    [
        "Malloc pin memory failed, host out of memory, Rried to allocate size: 64, total_allocated_memory: 0",
        "cannot pin memory here",
    ],
)
def test_whatever_keeps_memory_from_being_pinned_is_told_with_a_way_out(npu: FakeNpu, said: str) -> None:
    npu.unpinnable = RuntimeError(said)
    with pytest.raises(OutOfDeviceMemory, match="64 bytes of host memory could not be pinned") as raised:
        NpuRuntime(0, pooled=True).staging(64)
    assert said in str(raised.value)


def test_a_failure_while_pinning_is_a_failure(npu: FakeNpu) -> None:
    runtime = NpuRuntime(0, pooled=True)
    npu.unpinnable = RuntimeError("NPU function error: aclrtMallocHostWithCfg, error code is 507899")
    with pytest.raises(DeviceError, match="ASCEND_LAUNCH_BLOCKING=1"), runtime.here():
        runtime.staging(64)


# -- what is free ------------------------------------------------------------------------------------------------------


def test_u113_other_processes_count_once_as_not_free(npu: FakeNpu) -> None:
    runtime = NpuRuntime(0, pooled=True)
    npu.others = 30 * GIB
    npu.pools["common"].update(held=5 * GIB, left=7 * GIB)
    memory = runtime.memory()
    assert (memory.free, memory.total, memory.reclaimable) == (22 * GIB, 64 * GIB, 7 * GIB)
    assert (memory.allocated, memory.unified) == (5 * GIB, False)


@settings(max_examples=60, deadline=None)
@given(
    free=st.integers(-(1 << 40), 1 << 40),
    total=st.integers(-(1 << 40), 1 << 40),
    held=st.integers(0, 1 << 38),
    left=st.integers(-(1 << 36), 1 << 38),
)
def test_u113_no_size_is_negative_and_none_above_the_whole_whatever_the_driver_says(
    free: int, total: int, held: int, left: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        npu = fake_npu.install(patched)
        npu.told = (free, total)
        npu.pools["common"].update(held=held, left=left)
        memory = NpuRuntime(0, pooled=True).memory()
        npu.pools["common"].update(held=0, left=0)
    assert memory.reclaimable is not None and memory.reclaimable >= 0
    if total <= 0:
        assert memory.free is None and memory.total is None
    else:
        assert memory.total == total and memory.free is not None and 0 <= memory.free <= total
        assert memory.free + memory.reclaimable <= total, "no more can be had again than is taken"


def test_the_peak_begins_again_where_it_is_asked_to(npu: FakeNpu) -> None:
    runtime = NpuRuntime(0, pooled=True)
    torch.empty(1 << 20, dtype=torch.uint8, device="npu:0")
    assert (runtime.memory().allocated, runtime.memory().peak) == (0, 1 << 20)
    runtime.reset_peak()
    assert runtime.memory().peak == 0
