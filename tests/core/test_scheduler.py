"""Policy, numbers and edges of the scheduler, one case at a time."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.api.errors import InternalError, RequestInvalid, RequestTooLong
from pagedkv.core.budget import budget
from pagedkv.core.request import Reason, State, pack
from pagedkv.core.scheduler import SchedulerConfig, victim
from pagedkv.core.step import spread
from tests.helpers.core_rig import Rig, solo


def config(**names: object) -> SchedulerConfig:
    return Rig(**names).config


def test_budget_serves_single_tokens_first_then_chunks_in_order() -> None:
    need = np.array([9, 1, 4, 1, 6], np.int32)
    queries, left = budget(need, 13)
    assert queries.tolist() == [9, 1, 2, 1, 0]
    assert left == 0
    queries, left = budget(need, 30)
    assert queries.tolist() == [9, 1, 4, 1, 6]
    assert left == 9


def test_spread_gives_each_token_its_row_and_position() -> None:
    rows, queries = np.array([7, 3], np.int32), np.array([1, 3], np.int32)
    of_token, positions = spread(rows, queries, np.array([0, 1, 4], np.int32), np.array([5, 3], np.int32))
    assert of_token.tolist() == [7, 3, 3, 3]
    assert positions.tolist() == [4, 0, 1, 2]


def test_victim_is_the_last_in_order_and_never_the_only_one() -> None:
    rig = Rig()
    requests = [rig.add([1, 2], priority=p) for p in (1, 0, 1)]
    rig.step()
    assert victim(rig.scheduler.running) is requests[2]
    with pytest.raises(InternalError):
        victim(requests[:1])


def test_decode_rows_stand_first_and_are_counted() -> None:
    rig = Rig()
    rig.add([1, 2, 3], 5)
    rig.step()
    rig.add([0, 1, 0, 1, 0], 2)
    step = rig.step()
    assert step is not None
    assert step.queries.tolist() == [1, 5]
    assert step.batch.num_decode == 1
    assert step.batch.ctx_len.tolist() == [4, 5]
    assert step.logits_at.tolist() == [0, 5]


def test_a_long_prompt_goes_in_chunks_beside_decoding_rows() -> None:
    rig = Rig(max_num_batched_tokens=6, num_blocks=20)
    short = rig.add([1], 6)
    rig.step()
    long = rig.add(list(range(3)) * 5, 2)
    chunks = []
    while not rig.scheduler.idle:
        step = rig.step()
        assert step is not None
        chunks.append(step.queries.tolist())
    assert chunks[:3] == [[1, 5], [1, 5], [1, 5]]
    assert long.output_ids == solo(list(range(3)) * 5, 2)
    assert short.output_ids == solo([1], 6)


def test_capacity_is_one_formula_and_stands_in_the_error() -> None:
    rig = Rig(num_blocks=4, block_size=4)
    assert rig.scheduler.capacity() == 13  # 3 blocks of 4, and the last token is never stored
    assert rig.run([1] * 10, 3).output_ids == solo([1] * 10, 3)
    with pytest.raises(RequestTooLong, match=r"10 tokens \+ max_tokens=4 .* cache holds 13 \(3 blocks of 4\)"):
        rig.add([1] * 10, 4)
    assert rig.scheduler.limit(10, None) == 13


def test_the_model_limit_is_named_when_it_is_the_smaller_one() -> None:
    with pytest.raises(RequestTooLong, match="max_model_len is 16") as caught:
        Rig(max_model_len=16, num_blocks=20).add([1] * 14, 3)
    assert (caught.value.needed, caught.value.available) == (17, 16)


def test_unlimited_requests_end_at_the_limit_with_reason_length() -> None:
    request = Rig(max_model_len=16, num_blocks=20).run([1] * 10, None)
    assert request.reason is Reason.LENGTH
    assert len(request.tokens) == 16


def test_an_empty_prompt_is_refused_and_nothing_is_queued() -> None:
    rig = Rig()
    with pytest.raises(RequestInvalid) as caught:
        rig.add([])
    assert caught.value.field == "prompt"
    assert rig.scheduler.idle


def test_priority_goes_before_arrival() -> None:
    rig = Rig(max_num_seqs=1)
    late = [rig.add([1, 2], 1, priority=p) for p in (5, 0, 3)]
    rig.drain()
    assert [late.index(r) for r in rig.finished] == [1, 2, 0]


def test_preempted_requests_keep_their_tokens_and_their_place() -> None:
    rig = Rig(num_blocks=7, block_size=4, prefix_caching=False)
    first, second = rig.add([1] * 8, 16), rig.add([0] * 8, 16)
    rig.drain()
    assert rig.scheduler.num_preemptions >= 1
    assert first.num_preemptions == 0
    assert second.num_preemptions == rig.scheduler.num_preemptions
    assert first.output_ids == solo([1] * 8, 16)
    assert second.output_ids == solo([0] * 8, 16)
    assert rig.finished[0] is first


def test_ids_below_zero_end_one_request_with_an_error_and_spare_the_rest() -> None:
    rig = Rig()
    bad, good = rig.add([1, 1], 3), rig.add([0, 1], 3)
    step = rig.scheduler.schedule()
    assert step is not None
    finished = rig.scheduler.update(step, np.array([-1, 2], np.int32))
    assert finished == [bad]
    assert bad.reason is Reason.ERROR
    assert bad.output_ids == []
    assert good.state is State.RUNNING


def test_every_end_id_stops_however_many_there_are() -> None:
    rig = Rig()
    request = rig.add([1, 1], 9, end_ids=tuple(range(100, 120)))
    step = rig.scheduler.schedule()
    assert step is not None
    assert rig.scheduler.update(step, np.array([119], np.int32)) == [request]
    assert request.reason is Reason.STOP
    assert request.output_ids == [119]


def test_a_fork_shares_blocks_until_one_of_the_two_writes() -> None:
    rig = Rig(num_blocks=12)
    parent = rig.add([1, 2, 3, 4, 0, 1], 4)
    rig.step()
    used = rig.scheduler.pool.num_used
    child = rig.scheduler.fork(parent)
    assert rig.scheduler.pool.num_used == used
    step = rig.step()
    assert step is not None
    assert len(step.copies) == 1
    source, destination = step.copies[0].tolist()
    assert source != destination
    assert rig.scheduler.pool.num_used == used + 1
    rig.drain()
    assert parent.output_ids == child.output_ids == solo([1, 2, 3, 4, 0, 1], 4)


def test_a_prompt_that_waits_for_logits_holds_up_nobody_else() -> None:
    """Two logits a step: the first scored prompt takes them all, the second waits, the third wants none."""
    rig = Rig(num_blocks=40, max_num_batched_tokens=32, max_scored=2, max_overtakes=0)
    first, second = (rig.add([1, 2, 3, 4, 0, 1, 2, token], 2, wanted=range(7)) for token in (1, 2))
    plain = rig.add([3] * 6, 2)
    rig.step()
    assert [r.state for r in (first, second, plain)] == [State.RUNNING, State.WAITING, State.RUNNING]
    rig.drain()
    assert rig.scored == {first.id: list(range(7)), second.id: list(range(7))}
    assert rig.finished[0] is plain


def test_a_scored_prompt_takes_no_cached_block_whose_logits_it_needs() -> None:
    rig = Rig(num_blocks=40)
    prompt = [1, 2, 3, 4, 0, 1, 2, 3, 4]
    rig.run(prompt)
    scored = rig.run(prompt, 0, wanted=range(8))
    assert (scored.num_cached_tokens, rig.scored[scored.id]) == (0, list(range(8)))
    assert (scored.reason, scored.output_ids) == (Reason.LENGTH, [])
    assert rig.run(prompt).num_cached_tokens == 8


def test_a_prompt_whose_last_position_alone_is_wanted_takes_the_cached_blocks_before_it() -> None:
    rig = Rig(num_blocks=40, max_num_batched_tokens=3)
    prompt = [1, 2, 3, 4, 0, 1, 2, 3]
    first = rig.run(prompt, 0, wanted=range(7, 8))
    again = rig.run(prompt, 0, wanted=range(7, 8))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 4), "the block of the last one is not taken"
    assert rig.scored[first.id] == rig.scored[again.id] == [7]


def test_forks_made_before_sampling_begin_with_tokens_of_their_own() -> None:
    rig = Rig(num_blocks=12, max_num_seqs=3)
    parent = rig.add([1, 2, 3, 4, 0, 1], 4)
    rig.samples[parent.id] = 5
    rig.step()
    children = rig.forks[parent.id]
    assert [bool(child.row) for child in children] == [True, True, False, False], "rows for two of the four"
    assert rig.scheduler.pool.num_used == 2
    step = rig.step()
    assert step is not None and len(step.copies) == 2, "the last to write has the block to itself"
    rig.drain()
    for sample, request in enumerate([parent, *children]):
        assert request.output_ids == solo([1, 2, 3, 4, 0, 1], 4, sample=sample)
    assert children[3].num_cached_tokens == 0, "the prompt is the parent's and was not cached"


def test_a_leak_is_named() -> None:
    rig = Rig()
    request = rig.add([1, 2, 3], 2, label="the culprit")
    rig.step()
    rig.scheduler.pool.acquire(rig.scheduler.rows.held(request.row), "the culprit")
    while not rig.scheduler.idle:
        rig.step()
    with pytest.raises(InternalError, match="the culprit"):
        rig.scheduler.check_idle()


def test_the_serial_of_a_row_tells_its_owners_apart() -> None:
    rig = Rig(max_num_seqs=1)
    first = rig.add([1, 2], 3)
    step = rig.scheduler.schedule()
    assert step is not None
    rig.scheduler.abort(first)
    second = rig.add([0, 1, 0], 3)
    assert rig.scheduler.holders(step) == [None]
    assert rig.scheduler.update(step, np.array([4], np.int32)) == []
    rig.drain()
    assert first.output_ids == []
    assert second.output_ids == solo([0, 1, 0], 3)


def test_fork_of_a_finished_request_is_refused() -> None:
    rig = Rig()
    request = rig.run([1, 2])
    with pytest.raises(InternalError):
        rig.scheduler.fork(request)


def test_pack_keeps_ids() -> None:
    assert pack([1, 70_000]).tolist() == [1, 70_000]
    assert pack([1]).dtype == np.int32
