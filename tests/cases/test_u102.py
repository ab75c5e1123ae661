"""U102: weights, workspace and cache come from one budget that nothing exceeds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagedkv.api import MemoryInfo, PoolCost
from pagedkv.errors import OutOfDeviceMemory
from tests.helpers.engine_rig import engine
from tests.helpers.memory_rig import GIB, Telling, planned
from tests.helpers.tiny_models import FAMILIES

SIZES = st.integers(0, 64 * GIB)


@st.composite
def situations(draw: st.DrawFn) -> tuple[MemoryInfo, PoolCost, dict[str, Any]]:
    total = draw(SIZES)
    free = draw(st.integers(0, total))
    memory = MemoryInfo(
        total=total, free=free, reclaimable=draw(st.integers(0, total - free)), unified=draw(st.booleans())
    )
    cost = PoolCost(per_block=draw(st.integers(1, 64 << 20)), fixed=draw(st.integers(0, GIB)))
    names = {
        "weights": draw(st.integers(0, 16 * GIB)),
        "workspace": draw(st.integers(0, 2 * GIB)),
        "fraction": draw(st.none() | st.floats(0.01, 1.0)),
        "block_size": draw(st.integers(1, 256)),
        "max_num_seqs": draw(st.integers(1, 1000)),
        "max_model_len": draw(st.integers(1, 200_000)),
    }
    return memory, cost, names


@settings(max_examples=400, deadline=None)
@given(situations())
def test_u102_the_sum_never_exceeds_the_budget(situation) -> None:
    memory, cost, names = situation
    available = memory.free + memory.reclaimable
    share = 0.9 if names["fraction"] is None else names["fraction"]
    budget = min(int(share * memory.total) - (memory.total - available), available)
    least = names["weights"] + names["workspace"] + cost.fixed + 2 * cost.per_block
    try:
        plan = planned(Telling(memory), cost, **names)
    except OutOfDeviceMemory as error:
        assert least > budget, "refused only if not even one block fits"
        assert error.requested is not None and error.free is not None and error.requested > error.free
        assert "weights" in str(error) and "workspace" in str(error)
    else:
        assert plan.total == names["weights"] + names["workspace"] + cost.fixed + plan.num_blocks * cost.per_block
        assert least <= plan.total <= budget
        useful = names["max_num_seqs"] * -(-names["max_model_len"] // names["block_size"]) + 1
        assert plan.num_blocks == useful or plan.total + cost.per_block > budget, "and all that is of use is used"


@settings(max_examples=300, deadline=None)
@given(situations(), st.booleans(), st.integers(2, 10_000))
def test_u102_an_explicit_size_is_kept_or_refused_with_the_numbers(situation, in_bytes: bool, blocks: int) -> None:
    memory, cost, names = situation
    asked = cost.fixed + blocks * cost.per_block
    size = {"kv_cache_bytes": asked} if in_bytes else {"num_blocks": blocks}
    left = memory.free + memory.reclaimable - names["weights"] - names["workspace"]
    assume(asked != left)
    if asked > left:
        with pytest.raises(OutOfDeviceMemory) as caught:
            planned(Telling(memory), cost, **names, **size)
        assert caught.value.requested == asked
        assert caught.value.free == max(left, 0)
    else:
        plan = planned(Telling(memory), cost, **names, **size)
        useful = names["max_num_seqs"] * -(-names["max_model_len"] // names["block_size"]) + 1
        assert plan.num_blocks == (min(blocks, useful) if in_bytes else blocks)
        assert plan.total <= memory.free + memory.reclaimable


@pytest.mark.parametrize("family", FAMILIES)
def test_u102_the_planned_weights_cover_what_the_model_holds(family: str) -> None:
    with engine(family) as llm:
        held = llm.engine.parts.runner.model.nbytes
        assert held <= llm.engine.parts.memory.weights <= 1.3 * held
