"""U30: small requests may pass one that does not fit yet, but only `max_overtakes` of them."""

from __future__ import annotations

import pytest

from tests.helpers.core_rig import Rig, solo


@pytest.mark.parametrize("bound", [0, 2, 5, 16])
def test_u30_the_large_one_starts_within_the_bound(bound: int) -> None:
    rig = Rig(num_blocks=11, max_num_seqs=8, max_num_batched_tokens=40, max_overtakes=bound, prefix_caching=False)
    a = rig.add([1] * 17, 20)  # five blocks and more, for a while
    rig.step()
    b = rig.add([2] * 29, 3)  # eight blocks
    small = [rig.add([3, n % 5], 1) for n in range(8)]
    started, ended_a = [], None
    for at in range(200):
        step = rig.step()
        if step is None:
            break
        started += step.admitted
        if a in rig.finished and ended_a is None:
            ended_a = at
            behind = [s for s in small if s not in started]
    before_b = started.index(b)
    assert before_b == min(bound, 8), "exactly the documented number passed, or all there were"
    assert b.overtaken == min(bound, 8)
    if bound < 8:
        assert ended_a is not None and len(behind) == 8 - bound
        assert started[before_b] is b, "the next to start after A ended is B"
    rig.drain()
    assert b.output_ids == solo([2] * 29, 3)
    assert all(len(s.output_ids) == 1 for s in small)
