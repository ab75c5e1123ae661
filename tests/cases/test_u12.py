"""U12: ten thousand random adds, steps, aborts and preemptions leave nothing behind; a leak is named."""

from __future__ import annotations

import random

import pytest

from pagedkv.api.errors import InternalError, RequestTooLong
from pagedkv.core.request import Reason
from tests.helpers.core_rig import Rig, solo


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_u12_2500_random_operations_then_drain(block_size: int) -> None:
    rng = random.Random(block_size)
    rig = Rig(block_size=block_size, num_blocks=1 + 48 // block_size, max_num_seqs=4, max_model_len=44)
    expected = {}
    for _ in range(2500):
        what = rng.random()
        if what < 0.25 and len(rig.scheduler.waiting) < 6:
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
            count = rng.randrange(1, 20)
            try:
                request = rig.add(prompt, count, priority=rng.randrange(2))
            except RequestTooLong as error:
                assert error.needed > error.available
            else:
                expected[request] = solo(prompt, count)
        elif what < 0.3 and rig.scheduler.running:
            rig.scheduler.abort(rng.choice(rig.scheduler.running))
        elif what < 0.32 and rig.scheduler.waiting:
            rig.scheduler.abort(rng.choice(rig.scheduler.waiting))
        elif what < 0.33:
            rig.scheduler.restart()
        else:
            rig.step()
    half_filled = any(rig.scheduler.rows.computed[r.row] % block_size for r in rig.scheduler.running)
    assert half_filled or block_size == 1 or not rig.scheduler.running
    rig.drain()
    assert rig.scheduler.num_preemptions > 10
    assert len(expected) > 300
    for request, tokens in expected.items():
        assert request.output_ids == (tokens[: len(request.output_ids)] if request.reason is Reason.ABORT else tokens)


def test_u12_the_idle_check_names_the_request_that_leaks() -> None:
    rig = Rig()
    rig.run([1, 2, 3])
    rig.scheduler.pool.allocate(1, "request 17")
    with pytest.raises(InternalError, match="request 17"):
        rig.scheduler.check_idle()
