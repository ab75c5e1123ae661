"""U113: recorded steps are in the budget, others are counted once, and a plan that cannot be ends with numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from pagedkv.api import AttentionBackend, MemoryInfo, PoolCost
from pagedkv.engine.memory import MemoryPlan, MemoryRequest, plan_memory
from pagedkv.errors import OutOfDeviceMemory

GIB = 1 << 30
COST = PoolCost(per_block=1 << 20, fixed=64 << 20)


def budget(memory: MemoryInfo) -> Callable[[float | None, int], int | None]:
    """The contract's own rule for this memory."""

    class Told:
        kv_budget = AttentionBackend.kv_budget

        def memory(self) -> MemoryInfo:
            return memory

    told: Any = Told()
    return told.kv_budget  # type: ignore[no-any-return]


def plan(memory: MemoryInfo, **wanted: Any) -> MemoryPlan:
    given: dict[str, Any] = {
        "num_blocks": None,
        "kv_cache_bytes": None,
        "fraction": 0.9,
        "weights": 2 * GIB,
        "workspace": GIB,
        "block_size": 16,
        "max_num_seqs": 256,
        "max_model_len": 1 << 20,
    }
    return plan_memory(MemoryRequest(**given | wanted), COST, memory, budget(memory))


@pytest.mark.parametrize("loaded", [False, True])
def test_two_gibibytes_of_graphs_are_two_gibibytes_less_of_cache(loaded: bool) -> None:
    """16 GiB, 90 % of them are 14.4; weights, workspace and graphs take 5, another process nothing: 9.4 are left."""
    memory = MemoryInfo(free=16 * GIB - (2 * GIB if loaded else 0), total=16 * GIB, reclaimable=0)
    with_graphs = plan(memory, graphs=2 * GIB, loaded=loaded)
    without = plan(memory, loaded=loaded)
    assert without.num_blocks - with_graphs.num_blocks == 2 * GIB // COST.per_block
    assert with_graphs.num_blocks == (int(14.4 * GIB) - 5 * GIB - COST.fixed) // COST.per_block
    assert with_graphs.total == 5 * GIB + with_graphs.cache <= int(14.4 * GIB)
    assert "graphs     2.0 GiB (enforce_eager=True leaves them out)" in with_graphs.table()
    assert "graphs" not in without.table()


def test_a_process_that_holds_half_counts_once() -> None:
    memory = MemoryInfo(free=8 * GIB, total=16 * GIB, reclaimable=0)
    found = plan(memory, graphs=2 * GIB)
    assert found.num_blocks == (int(14.4 * GIB) - 8 * GIB - 5 * GIB - COST.fixed) // COST.per_block
    assert "memory     16.0 GiB, 8.0 GiB available" in found.table()


@pytest.mark.parametrize("wanted", [{"weights": 20 * GIB}, {"graphs": 20 * GIB}, {"graphs": 13 * GIB, "loaded": True}])
def test_what_cannot_be_ends_with_all_parts_and_three_ways_out(wanted: dict[str, Any]) -> None:
    with pytest.raises(OutOfDeviceMemory) as refused:
        plan(MemoryInfo(free=14 * GIB, total=16 * GIB, reclaimable=0), **wanted)
    said = str(refused.value)
    assert not re.search(r"-\d", said), "a negative size helps nobody"
    for part in ("weights", "workspace", "cache", "together", "available"):
        assert part in said
    for way in ("max_num_batched_tokens or max_model_len", "smaller model or dtype", "gpu_memory_utilization"):
        assert way in said
    assert ("enforce_eager=True" in said) == ("graphs" in wanted)
    assert refused.value.free == 0


def test_what_others_gave_back_meanwhile_is_not_taken() -> None:
    """3 GiB were free beside the weights when it was first asked; 9 are free now."""
    memory = MemoryInfo(free=9 * GIB, total=16 * GIB, reclaimable=0)
    found = plan(memory, loaded=True, most_available=3 * GIB)
    assert found.workspace + found.cache <= 3 * GIB
    assert found.num_blocks == (2 * GIB - COST.fixed) // COST.per_block
