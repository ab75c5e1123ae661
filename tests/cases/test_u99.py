"""U99: where device and host share memory, what counts is what is available, not what the kernel calls free."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedkv.api import MemoryInfo
from pagedkv.errors import OutOfDeviceMemory
from pagedkv_cpu import host
from pagedkv_cpu.backend import CpuBackend
from pagedkv_cpu.descriptor import CpuDescriptor
from tests.backends.jetson import trees
from tests.backends.jetson.double import double
from tests.helpers.memory_rig import GIB, Telling, planned

KIB = GIB >> 10


def meminfo(tmp_path: Path) -> Path:
    """1 GiB free, 40 GiB available: the rest of it holds file pages that the kernel gives up when asked."""
    (tmp_path / "proc").mkdir()
    lines = {"MemTotal": 64 * KIB, "MemFree": KIB, "MemAvailable": 40 * KIB, "Cached": 39 * KIB}
    (tmp_path / "proc/meminfo").write_text("".join(f"{name}: {size} kB\n" for name, size in lines.items()))
    return tmp_path


def test_u99_the_shared_memory_of_this_machine_is_what_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = host.memory(meminfo(tmp_path))
    assert (told.available, told.total) == (40 * GIB, 64 * GIB)
    monkeypatch.setattr(host, "memory", lambda: told)
    (device,) = CpuDescriptor().probe()
    assert (device.free, device.total, device.unified) == (40 * GIB, 64 * GIB, True)
    backend = CpuBackend(CpuDescriptor().describe(device), threads=1)
    try:
        assert backend.memory() == MemoryInfo(free=40 * GIB, total=64 * GIB, reclaimable=0, unified=True)
        assert backend.kv_budget(0.9, 2 * GIB) == int(0.9 * 64 * GIB) - 24 * GIB - 2 * GIB
        assert backend.kv_budget(None, 2 * GIB) == 4 * GIB
    finally:
        backend.close()


@pytest.mark.parametrize("unified", [True, False])
def test_u99_page_cache_that_can_be_reclaimed_is_room_whatever_the_device_is_called(unified: bool) -> None:
    memory = MemoryInfo(free=GIB, reclaimable=39 * GIB if unified else 0, total=64 * GIB, unified=unified)
    if not unified:  # memory of its own, and 63 GiB of it in use by others: nothing else can be done
        with pytest.raises(OutOfDeviceMemory):
            planned(Telling(memory))
        return
    plan = planned(Telling(memory))
    assert plan.room == int(0.9 * 64 * GIB) - 24 * GIB - plan.weights - plan.workspace
    assert plan.cache <= plan.room < plan.cache + plan.cost.per_block
    assert "40.0 GiB available (shared with the host)" in plan.table()


@pytest.mark.parametrize("board", ["agx-orin-64", "thor"])
@pytest.mark.parametrize("inside", [False, True])
def test_u99_a_board_with_shared_memory_plans_with_what_is_available(tmp_path: Path, board: str, inside: bool) -> None:
    root = (trees.container if inside else trees.board)(tmp_path, board)
    trees.meminfo(root, total=64 * GIB, available=40 * GIB, free=GIB)
    backend = double(root)
    plan = planned(backend)
    assert plan.room == int(0.85 * 40 * GIB) - 4 * GIB - plan.weights - plan.workspace, "a sixteenth stays free"
    assert plan.cache <= plan.room < plan.cache + plan.cost.per_block
    assert "64.0 GiB, 40.0 GiB available (shared with the host)" in plan.table()
    trees.meminfo(root, total=64 * GIB, available=GIB, free=GIB)
    with pytest.raises(OutOfDeviceMemory):
        planned(backend)
    backend.close()
