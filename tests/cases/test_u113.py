"""U113 and U101 at a backend's level: what others hold counts once, and a budget is never negative nor wild."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.api import AttentionBackend, MemoryInfo
from pagedkv.errors import OutOfDeviceMemory
from tests.backends.cuda.double import DelayingRuntime, double
from tests.helpers.memory_rig import GIB, Telling, planned

TOTAL = 80 * GIB
SIZES = st.integers(0, TOTAL)


class Answers(DelayingRuntime):
    """A device that says of its memory what comes next; the last answer stands."""

    def __init__(self, *free: int, reclaimable: int = 0) -> None:
        super().__init__()
        self._free, self._reclaimable = list(free), reclaimable

    def memory(self) -> MemoryInfo:
        free = self._free.pop(0) if len(self._free) > 1 else self._free[0]
        return MemoryInfo(free=free, total=TOTAL, reclaimable=min(self._reclaimable, TOTAL - free))

    def holders(self) -> str:
        return "process 4242 (40.0 GiB)"


def test_u113_half_is_held_by_another_process_and_counts_once() -> None:
    backend = double(runtime=Answers(40 * GIB))
    # by hand: 0.9 x 80 may be in use, 40 are already, 16 are for the weights
    assert backend.kv_budget(0.9, 16 * GIB) == 72 * GIB - 40 * GIB - 16 * GIB == 16 * GIB
    assert backend.kv_budget(None, 16 * GIB) == 16 * GIB, "0.9 is the default"


def test_u113_what_torch_keeps_of_its_own_freed_tensors_is_no_other_process() -> None:
    backend = double(runtime=Answers(34 * GIB, reclaimable=6 * GIB))
    assert backend.kv_budget(0.9, 16 * GIB) == 16 * GIB


@given(SIZES, SIZES, st.none() | st.floats(0.01, 1.0), st.integers(0, 200 * GIB))
def test_u113_no_budget_is_negative_or_more_than_is_there(free, reclaimable, fraction, reserved) -> None:
    class Base(Telling):
        kv_budget = AttentionBackend.kv_budget

    memory = MemoryInfo(free=free, total=TOTAL, reclaimable=min(reclaimable, TOTAL - free))
    budget = Base(memory).kv_budget(fraction, reserved)
    share = 0.9 if fraction is None else fraction
    assert budget is not None and 0 <= budget <= max(0, free + memory.reclaimable - reserved)
    assert budget <= share * TOTAL


def test_u113_weights_larger_than_the_budget_end_with_numbers_and_options() -> None:
    backend = double(runtime=Answers(40 * GIB))
    assert backend.kv_budget(0.9, 60 * GIB) == 0, "never negative"
    with pytest.raises(OutOfDeviceMemory) as raised:
        planned(Telling(MemoryInfo(free=40 * GIB, total=TOTAL)), weights=60 * GIB)
    text = str(raised.value)
    assert "60.0 GiB" in text and "40.0 GiB" in text and " -" not in text, "the parts, and no negative size"
    assert raised.value.free == 0 and raised.value.requested == 3 << 20, "two blocks and what is fixed"


@pytest.mark.parametrize(("first", "second"), [(40, 42), (42, 40)])
def test_u101_answers_that_jump_by_two_gib_move_the_budget_by_two(first: int, second: int) -> None:
    backend = double(runtime=Answers(first * GIB, second * GIB))
    budgets = [backend.kv_budget(0.9, 16 * GIB) for _ in range(3)]
    assert budgets == [(first - 24) * GIB, (second - 24) * GIB, (second - 24) * GIB]


def test_u101_memory_that_was_taken_since_it_was_planned_is_refused_with_who_took_it() -> None:
    from tests.backends.cuda.test_pool import spec

    backend = double(runtime=Answers(40 * GIB, 1 << 20))
    assert backend.kv_budget(0.9, 0) == 32 * GIB
    with pytest.raises(OutOfDeviceMemory, match=r"the rest is held by process 4242 \(40.0 GiB\)") as raised:
        backend.alloc_pool(spec())
    assert raised.value.free == 1 << 20
