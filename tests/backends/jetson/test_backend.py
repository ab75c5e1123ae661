"""The budget of a memory that everything shares: a ceiling that neither settings nor other processes lift."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.api import BackendUnavailable, MemoryInfo, OutOfDeviceMemory, PoolCost, UnsupportedError, World
from pagedkv.engine.memory import plan_memory
from pagedkv_cuda import devices, opening
from pagedkv_jetson import backend as module
from pagedkv_jetson.backend import JetsonBackend, JetsonRuntime, open_backend
from tests.backends.cuda.test_pool import spec
from tests.backends.jetson import trees
from tests.backends.jetson.double import Holding, double
from tests.backends.jetson.trees import GIB
from tests.helpers.memory_rig import request

MIB = 1 << 20
COST = PoolCost(per_block=MIB, fixed=MIB)
RESERVE = {4: 512 * MIB, 8: 512 * MIB, 16: GIB, 64: 4 * GIB}
"""What stays free, by the board's memory in GiB."""


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[JetsonBackend]:
    trees.meminfo(tmp_path, total=16 * GIB, available=12 * GIB, free=GIB)
    made = double(tmp_path)
    yield made
    made.close()


def test_what_counts_is_what_is_available(backend: JetsonBackend) -> None:
    told = backend.memory()
    assert (told.free, told.total, told.unified) == (12 * GIB, 16 * GIB, True)


@pytest.mark.parametrize("total", RESERVE)
def test_the_budget_by_hand(tmp_path: Path, total: int) -> None:
    trees.meminfo(tmp_path, total=total * GIB, available=total * GIB // 2, free=0)
    backend = double(tmp_path)
    assert backend.kv_budget(None, GIB // 4) == int(0.85 * total * GIB / 2) - RESERVE[total] - GIB // 4
    assert backend.kv_budget(0.5, 0) == max(0, total * GIB // 4 - RESERVE[total])
    assert backend.kv_budget(1.0, 0) == total * GIB // 2 - RESERVE[total], "not even all of it reaches the reserve"
    assert backend.kv_budget(0.01, GIB) == 0
    backend.close()


def test_it_is_the_same_before_and_after_the_weights_are_there(tmp_path: Path) -> None:
    runtime, weights = Holding(), 3 * GIB
    backend = double(tmp_path, runtime)
    trees.meminfo(tmp_path, total=16 * GIB, available=12 * GIB, free=GIB)
    before = backend.kv_budget(None, weights + GIB)
    trees.meminfo(tmp_path, total=16 * GIB, available=12 * GIB - weights - 256 * MIB, free=0)
    runtime.allocated, runtime.kept = weights, 256 * MIB
    assert backend.kv_budget(None, GIB) == before
    assert backend.memory().reclaimable == 256 * MIB


def test_memory_that_the_system_does_not_tell_is_unknown(tmp_path: Path) -> None:
    backend = double(tmp_path)
    assert backend.kv_budget(None, 0) is None
    assert (backend.memory().free, backend.memory().total) == (None, None)
    assert backend.alloc_pool(spec()).num_blocks == 8


@settings(max_examples=200, deadline=None)
@given(
    total=st.integers(2 * GIB, 128 * GIB),
    available=st.floats(0, 1.2),
    allocated=st.integers(0, 64 * GIB),
    kept=st.integers(0, 4 * GIB),
    fraction=st.none() | st.floats(0.01, 1.0),
    reserved=st.integers(0, 64 * GIB),
)
def test_u102_no_figure_lifts_the_ceiling(
    tmp_path_factory: pytest.TempPathFactory,
    total: int,
    available: float,
    allocated: int,
    kept: int,
    fraction: float | None,
    reserved: int,
) -> None:
    root, runtime = tmp_path_factory.mktemp("tree"), Holding()
    runtime.allocated, runtime.kept = allocated, kept
    trees.meminfo(root, total=total, available=int(total * available), free=0)
    backend = double(root, runtime)
    size = backend.kv_budget(fraction, reserved)
    told = backend.memory()
    assert size is not None and size >= 0
    reserve = max(512 * MIB, told.total // 16)
    reach = min(told.total, told.free + kept + allocated)
    if size:
        assert size + reserved + allocated + reserve <= reach, "the host's reserve stays"
        assert size + reserved + allocated <= (0.85 if fraction is None else fraction) * reach, "and so does the share"
    assert backend.kv_budget(fraction, reserved + GIB) <= size


@given(st.lists(st.integers(-2 * GIB, 2 * GIB), min_size=2, max_size=2), st.none() | st.floats(0.5, 1.0))
@settings(max_examples=50, deadline=None)
def test_u101_answers_that_jump_end_no_start_and_lift_no_ceiling(
    tmp_path_factory: pytest.TempPathFactory, jumps: list[int], fraction: float | None
) -> None:
    root = tmp_path_factory.mktemp("tree")
    backend = double(root)
    answers = [40 * GIB + jump for jump in jumps]

    def jump(available: int) -> None:
        trees.meminfo(root, total=64 * GIB, available=available, free=GIB)

    jump(answers[0])
    memory = backend.memory()

    def budget(fraction: float | None, reserved: int) -> int | None:
        jump(answers[1])
        return backend.kv_budget(fraction, reserved)

    plan = plan_memory(request(fraction=fraction, max_num_seqs=10_000), COST, memory, budget)
    share = 0.85 if fraction is None else fraction
    assert plan.num_blocks > 1000
    assert plan.total <= min(answers[0], share * answers[1] - 4 * GIB)
    backend.close()


# -- the last guard ----------------------------------------------------------------------------------------------------


def test_u102_an_explicit_size_that_would_take_the_hosts_reserve_is_refused(tmp_path: Path) -> None:
    backend = double(tmp_path)
    trees.meminfo(tmp_path, total=8 * GIB, available=GIB, free=0)
    blocks = -(-512 * MIB // backend.pool_cost(spec()).per_block)
    with pytest.raises(OutOfDeviceMemory) as raised:
        backend.alloc_pool(dataclasses.replace(spec(), num_blocks=blocks + 1))
    said = str(raised.value)
    assert "1024 of 8192 MiB are available, and 512 stay free for the system" in said
    assert raised.value.free == 512 * MIB and raised.value.requested > 512 * MIB
    assert backend.alloc_pool(spec()).num_blocks == 8, "the instance stays usable"


def test_u102_torch_stops_where_the_reserve_begins(tmp_path: Path) -> None:
    runtime = Holding()
    backend = double(tmp_path, runtime)
    runtime.allocated, runtime.kept = 3 * GIB, GIB
    trees.meminfo(tmp_path, total=16 * GIB, available=8 * GIB, free=0)
    backend.kv_budget(0.5, 0)
    assert runtime.most == 8 * GIB + GIB + 3 * GIB - GIB, "available, kept and held, the reserve taken off"
    trees.meminfo(tmp_path, total=16 * GIB, available=6 * GIB, free=0)
    backend.alloc_pool(spec())
    assert runtime.most == 6 * GIB + GIB + 3 * GIB - GIB, "an explicit size asks for no budget, and is capped too"


@pytest.mark.parametrize(("nbytes", "fraction"), [(12 * GIB, 0.75), (20 * GIB, 1.0), (-GIB, 0.0)])
def test_u102_the_cap_is_torchs_own(monkeypatch: pytest.MonkeyPatch, nbytes: int, fraction: float) -> None:
    told: list[tuple[float, int]] = []
    fake_cuda(monkeypatch)
    monkeypatch.setattr(
        module.torch.cuda, "set_per_process_memory_fraction", lambda share, index: told.append((share, index)), False
    )
    JetsonRuntime(0).cap(nbytes)
    assert told == [(fraction, 0)]


def test_u106_there_is_no_host_memory_beside_it(backend: JetsonBackend) -> None:
    with pytest.raises(UnsupportedError, match="placement"):
        backend.alloc_pool(dataclasses.replace(spec(), placement="host"))


def test_there_is_nobody_to_reduce_with(backend: JetsonBackend) -> None:
    with pytest.raises(UnsupportedError, match="one GPU: leave tensor_parallel_size at 1"):
        backend.communicator([0])


def test_graphs_are_there_for_who_asks(backend: JetsonBackend) -> None:
    assert backend.extension("graph") is not None
    assert (backend.capabilities().graph_default, backend.capabilities().graph_context) == (False, 1024)


# -- opening -----------------------------------------------------------------------------------------------------------


class FakeCuda(SimpleNamespace):
    """torch.cuda of a board; asking the driver for memory is an error of the test."""

    def mem_get_info(self, index: int) -> tuple[int, int]:
        raise AssertionError("the driver's figures of memory are not to be asked for")


def fake_cuda(monkeypatch: pytest.MonkeyPatch, *, built: tuple[str, ...] = ("sm_87",), integrated: int = 1) -> None:
    cuda = FakeCuda(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_arch_list=lambda: list(built),
        get_device_properties=lambda index: SimpleNamespace(uuid="0", is_integrated=integrated, total_memory=16 * GIB),
        get_device_name=lambda index: "Orin",
        memory_allocated=lambda index: 2 * GIB,
        memory_reserved=lambda index: 3 * GIB,
        max_memory_allocated=lambda index: 5 * GIB,
    )
    monkeypatch.setattr(module.torch, "cuda", cuda)
    monkeypatch.setattr("pagedkv_cuda.runtime._cuda", SimpleNamespace(Stream=lambda index: None))
    monkeypatch.setattr(devices, "is_tegra", lambda: True)


def opened(root: Path) -> JetsonBackend:
    made = open_backend(
        "",
        0,
        (8, 7),
        double(root).capabilities(),
        root=root,
        wheels="a torch for this board comes from the shelf",
        kernels="torch",
        world=World(),
    )
    assert isinstance(made, JetsonBackend)
    return made


@pytest.mark.parametrize("built", [("sm_80", "sm_86", "sm_89"), ("sm_80", "sm_90a", "sm_121a"), ()])
def test_u104_a_torch_without_code_for_the_board_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: tuple[str, ...]
) -> None:
    fake_cuda(monkeypatch, built=built)
    with pytest.raises(BackendUnavailable) as raised:
        opened(tmp_path)
    said = str(raised.value)
    assert "none of that runs on compute capability 8.7" in said and "sm_87" in said and "choose backend cpu" in said
    assert said.endswith("; a torch for this board comes from the shelf")


@pytest.mark.parametrize("built", [("sm_87",), ("sm_80", "sm_87", "sm_90"), ("compute_80",)])
def test_u104_a_torch_with_code_for_it_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: tuple[str, ...]
) -> None:
    fake_cuda(monkeypatch, built=built)
    backend = opened(tmp_path)
    assert isinstance(backend._runtime, JetsonRuntime)


def test_u99_torchs_own_count_is_taken_and_the_driver_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda(monkeypatch)
    told = JetsonRuntime(0).memory()
    assert told == MemoryInfo(reclaimable=GIB, allocated=2 * GIB, peak=5 * GIB, unified=True)


def test_u99_a_gpu_with_memory_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, integrated=0)
    with pytest.raises(BackendUnavailable, match="Orin has memory of its own") as raised:
        opened(tmp_path)
    assert "shelf" not in str(raised.value), "another torch would not help"


def test_a_torch_that_sees_no_gpu_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    monkeypatch.setattr(opening.torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match=r"sees no GPU .*; a torch for this board comes from the shelf"):
        opened(tmp_path)
