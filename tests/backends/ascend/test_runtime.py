"""Which errors end a device, the order of copies, and which events are waited for, on a stand-in for torch.npu."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from pagedkv.api import DeviceError, OutOfDeviceMemory
from pagedkv_ascend.runtime import WORDS, HostRuntime, NpuRuntime
from tests.backends.ascend import fake_npu
from tests.backends.ascend.double import double
from tests.backends.ascend.emulation import operators
from tests.backends.ascend.fake_npu import REFUSED, FakeNpu
from tests.backends.ascend.pools import made_pool, spec
from tests.backends.ascend.sequences import Sequences

ACL = "[ERROR] 2026-01-09-06:14:02 (PID:17148, Device:0, RankID:-1) ERR00100 PTA call acl api failed."
SYNCHRONIZE = "NPU function error: c10_npu::acl::AclrtSynchronizeStreamWithTimeout(copy_stream), error code is"


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    return fake_npu.install(monkeypatch)


@pytest.fixture
def runtime(npu: FakeNpu) -> NpuRuntime:
    return NpuRuntime(0, pooled=True)


# -- what is printed ---------------------------------------------------------------------------------------------------

FAILED = {
    "aicore exception": f"synchronize:compiler_depend.ts:361 {SYNCHRONIZE} 507015\n{ACL}",
    "vector core": f"operator():compiler_depend.ts:25 {SYNCHRONIZE} 507035\n{ACL}\n[Error]: The vector core "
    "execution is abnormal.",
    "an operator": "OpParamMaker.cpp:318 NPU function error: call aclnnSwiGlu failed, error code is 507014\n" + ACL,
    "an aclop": "InnerRun:compiler_depend.ts:194 OPS function error: MaxPoolGradWithArgmaxV1, error code is 500002",
    "the queue": "The Inner error is reported as above. The process exits for this inner error, and the current "
    "working operator name is aclnnMoeGatingTopK.",
    "memory cells": "HBM MULTI BIT ECC ERROR.time is 0",
    "a memory page": "UCE ERROR",
    "a suspect page": "SUSPECT MEM ERROR",
    "a suspect page elsewhere": "SUSPECT REMOTE ERROR",
    "a link": "HCCS LINK ERROR",
    "stopped": "FORCE STOP.",
    "hccl meets": "create_config:HCCLUtils.cpp:140 HCCL function error: hcclCommInitRootInfoConfig(numRanks, "
    "&rootInfo, rank, config, &(comm->hcclComm_)), error code is 4\nERR02200 DIST call hccl api failed.",
    "hccl retries": "HCCL OP RETRY FAILED",
    "hccl out of memory": "HCCL function error: HcclAllReduce(...), error code is 2, out of memory",
    "an hccl operator out of memory": "OPS function error: HcclAllgather, error code is 6: out of memory",
}
SHORT = {
    "allocator": REFUSED,
    "fraction": "NPU out of memory. Allocation was preemptively rejected because it would exceed "
    "per_process_memory_fraction limit. Requested size: 2 GiB",
    "workspace": f"NPU function error: call aclnnBatchMatMul failed, error code is 207001\n{ACL}\n[Error]: Failed to "
    "apply for memory.",
    "pinned": "CachingHostAllocator.cpp:252 NPU function error: aclrtMallocHostWithCfg, error code is 207001",
}
NEITHER = {
    "capture": "capture_begin:NPUGraph.cpp:156 NPU function error: c10_npu::acl::AclmdlRICaptureBegin(capture_stream_, "
    "capture_mode), error code is 207008\n[Error]: Stream resources are insufficient.",
    "captured stream": f"LocalScalarDenseNpu.cpp:23 {SYNCHRONIZE} 107027\n{ACL}\nNot allow to synchronize "
    "captured-stream, stream_id=262.",
    "joined": "capture_end:NPUGraph.cpp:240 NPU function error: c10_npu::acl::AclmdlRICaptureEnd(capture_stream_, "
    "&model_ri), error code is 107025",
    "our own": "shape '[2]' is invalid for input of size 3",
    "a wrong argument": "Invalid device id\n[ERROR] (PID:1, Device:0, RankID:-1) ERR00003 PTA invalid value",
}


@pytest.mark.parametrize("name", FAILED)
def test_what_ends_the_device(name: str) -> None:
    assert WORDS.failure(RuntimeError(FAILED[name]))


@pytest.mark.parametrize("name", SHORT)
def test_what_refuses_memory_and_ends_nothing(name: str) -> None:
    error = torch.OutOfMemoryError(SHORT[name])
    assert WORDS.shortage(error) and not WORDS.failure(error)


@pytest.mark.parametrize("name", NEITHER)
def test_what_is_neither(name: str) -> None:
    error = RuntimeError(NEITHER[name])
    assert not WORDS.failure(error) and not WORDS.shortage(error)
    assert not WORDS.failure(ValueError(FAILED["a link"])), "and no other kind of error"


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failure_ends_the_device_and_says_what_to_do(npu: FakeNpu, runtime: NpuRuntime) -> None:
    event = runtime.record()
    npu.failure = RuntimeError(FAILED["aicore exception"])
    with pytest.raises(DeviceError, match=r"(?s)npu:0 failed.*507015.*ASCEND_LAUNCH_BLOCKING=1.*~/ascend/log") as first:
        event.join()
    npu.failure = None
    with pytest.raises(DeviceError, match=re.escape(str(first.value))):
        runtime.check()


def test_a_failed_device_is_not_waited_for_when_a_cache_is_closed(npu: FakeNpu, runtime: NpuRuntime) -> None:
    pool = made_pool(runtime, spec())
    npu.failure = RuntimeError(FAILED["a link"])
    with pytest.raises(DeviceError), runtime.here():
        runtime.synchronize()
    pool.close()
    assert npu.memory_allocated(0) == 0


def test_refused_memory_leaves_the_device_usable(npu: FakeNpu, runtime: NpuRuntime) -> None:
    npu.failure = torch.OutOfMemoryError(SHORT["workspace"])
    with pytest.raises(OutOfDeviceMemory, match="fewer blocks, a smaller context or a lower memory fraction"):
        runtime.record().join()
    npu.failure = None
    runtime.check()
    assert made_pool(runtime, spec()).num_blocks == 8


def test_an_operator_that_fails_ends_the_backend_and_its_end_is_still_orderly() -> None:
    backend = double(runtime=HostRuntime())
    rows = Sequences(backend, spec(), [12])
    rows.step([0], [8])
    with operators.emulated(fail_after=1, failure=FAILED["aicore exception"]), pytest.raises(DeviceError) as first:
        rows.step([8], [1])
    assert "507015" in str(first.value) and "ASCEND_LAUNCH_BLOCKING=1" in str(first.value)
    for call in (backend.memory, backend.synchronize, lambda: backend.alloc_pool(spec())):
        with pytest.raises(DeviceError, match="507015"):
            call()
    backend.close()
    backend.close()


@pytest.mark.parametrize("name", ["allocator", "workspace"])
def test_an_operator_without_memory_ends_nothing(name: str) -> None:
    backend = double(runtime=HostRuntime())
    rows = Sequences(backend, spec(), [12])
    rows.step([0], [8])
    with operators.emulated(fail_after=1, failure=SHORT[name]), pytest.raises(OutOfDeviceMemory, match="fewer blocks"):
        rows.step([8], [1])
    rows.check(rows.step([8], [1]), [8])


# -- order -------------------------------------------------------------------------------------------------------------


def test_a_copy_runs_on_a_stream_of_its_own_after_the_compute_before_it(npu: FakeNpu, runtime: NpuRuntime) -> None:
    npu.work("append")
    event = runtime.copy(lambda: npu.work("save"), None)
    npu.work("decode")
    assert npu.before("save") == {"append"} and npu.ran["save"][0] != "compute"
    assert "save" not in npu.before("decode"), "compute goes on beside the copy"
    runtime.wait(event)
    npu.work("next")
    assert npu.before("next") == {"append", "decode", "save"}


def test_a_copy_after_an_event_waits_for_no_more_than_that(npu: FakeNpu, runtime: NpuRuntime) -> None:
    npu.work("append")
    event = runtime.record()
    npu.work("decode")
    runtime.copy(lambda: npu.work("save"), event)
    assert npu.before("save") == {"append"}


def test_copies_that_follow_one_another_do_so_on_the_device(npu: FakeNpu, runtime: NpuRuntime) -> None:
    saved = runtime.copy(lambda: npu.work("save"), None)
    runtime.copy(lambda: npu.work("fetch"), saved)
    assert npu.before("fetch") == {"save"} and npu.current is npu.compute


def test_an_event_is_done_once_the_device_says_so(runtime: NpuRuntime) -> None:
    event = runtime.record()
    assert [event.done() for _ in range(3)] == [False, False, True]
    event = runtime.record()
    event.join(timeout=60)
    assert event.done()


def test_the_processor_in_an_npus_place_knows_the_same_words() -> None:
    host: Any = HostRuntime()
    with pytest.raises(DeviceError, match="ASCEND_LAUNCH_BLOCKING=1"), host.here():
        raise RuntimeError(FAILED["an operator"])
    assert host.failure is not None and not host.recording
