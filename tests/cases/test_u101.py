"""U101: other processes take and give memory while the cache is sized; that ends no start and breaks no budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.api import MemoryInfo
from tests.helpers.memory_rig import GIB, Telling, planned


def telling(*free: int) -> Telling:
    return Telling(*(MemoryInfo(free=f, total=16 * GIB, unified=True) for f in free))


@pytest.mark.parametrize("fraction", [None, 0.6, 1.0])
@pytest.mark.parametrize(("first", "second"), [(8, 10), (10, 8), (8, 8)])
def test_u101_up_and_down_by_two_gib(first: int, second: int, fraction: float | None) -> None:
    if fraction == 0.6:
        first, second = first + 5, second + 5
    plan = planned(telling(first * GIB, second * GIB), fraction=fraction, max_num_seqs=10_000)
    assert plan.num_blocks > 1000
    assert plan.total <= first * GIB, "never more than was available at the first look"
    share = 0.9 if fraction is None else fraction
    assert plan.total <= share * 16 * GIB - (16 - second) * GIB, "nor more than the share allows at the second"


@given(st.lists(st.integers(4 * GIB, 16 * GIB), min_size=1, max_size=4), st.floats(0.95, 1.0))
def test_u101_whatever_the_answers_enough_memory_is_enough(free: list[int], fraction: float) -> None:
    plan = planned(telling(*free), fraction=fraction, max_num_seqs=10_000)
    assert plan.num_blocks >= 2
    assert plan.total <= free[0]
