"""Both levels of blocks and what is on its way between them, step by step; random histories: test_scheduler_machine."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.api.errors import InternalError
from pagedkv.core.prefix_index import PrefixIndex
from pagedkv.core.request import Reason, State
from pagedkv.core.tiers import HostMemory, Tiers, Transfer
from tests.helpers.core_rig import Rig, solo

A, B, C, D = (bytes([letter]) * 32 for letter in b"abcd")


class Host:
    """Host memory that gives `pools`, one after another."""

    def __init__(self, *pools: int) -> None:
        self.pools, self.asked = list(pools), 0

    def more(self) -> int:
        self.asked += 1
        return self.pools.pop(0) if self.pools else 0


def tiers(*pools: int, blocks: int = 9, caching: bool = True) -> tuple[Tiers, Host]:
    host = Host(*pools)
    return Tiers(blocks, PrefixIndex(), HostMemory(more=host.more, caching=caching)), host


def sent(some: Tiers) -> Transfer:
    """The only transfer that waits to begin."""
    (transfer,) = some.outbox
    some.outbox.clear()
    return transfer


def cached(some: Tiers, *digests: bytes) -> list[int]:
    """Blocks of the device that hold this content and nobody uses, the oldest first."""
    blocks = some.device.allocate(len(digests), "gone")
    for digest, block in zip(digests, blocks, strict=True):
        some.index.insert(digest, block)
    some.device.release(blocks)
    return blocks


# -- saving ------------------------------------------------------------------------------------------------------------


def test_saved_blocks_are_the_callers_and_the_transfers_until_it_has_landed() -> None:
    some, _ = tiers(4)
    blocks = some.device.allocate(2, "r")
    saved = some.save(blocks, [A, None], "r")
    transfer = sent(some)
    assert transfer.to_host and transfer.pairs.tolist() == list(map(list, zip(blocks, saved, strict=True)))
    some.check(dict.fromkeys(blocks, 1), dict.fromkeys(saved, 1))
    some.device.release(blocks)
    assert (some.device.available, some.in_transit()) == (6, (2, 0)), "they are read still: nobody gets them"
    assert some.host_index.get(A) is None, "findable once it is there, not before"
    some.land(transfer)
    assert (some.device.available, some.in_transit(), some.moving) == (8, (0, 0), False)
    assert some.host_index.get(A) == saved[0]
    some.drop(saved)
    assert (some.host.num_cached, some.host.num_free) == (1, 3)
    some.check({}, {})


def test_a_save_that_is_given_up_on_its_way_leaves_what_is_findable_and_frees_the_rest() -> None:
    some, _ = tiers(4)
    blocks = some.device.allocate(2, "r")
    saved = some.save(blocks, [A, None], "r")
    some.device.release(blocks)
    some.drop(saved)
    assert some.in_transit() == (2, 2)
    some.land(sent(some))
    assert some.host_index.get(A) == saved[0]
    assert (some.device.num_used, some.host.num_used, some.host.num_cached) == (0, 0, 1)
    some.check({}, {})


def test_host_memory_is_made_when_it_is_needed_and_no_sooner() -> None:
    some, host = tiers(2, 3)
    assert (host.asked, some.host.num_blocks) == (0, 1)
    first = some.save(some.device.allocate(2, "r"), [None, None], "r")
    assert host.pools == [3] and sorted(first) == [1, 2]
    second = some.save(some.device.allocate(3, "s"), [None] * 3, "s")
    assert host.pools == [] and sorted(second) == [3, 4, 5]
    asked = host.asked
    assert some.save(some.device.allocate(1, "t"), [None], "t") is None
    assert host.asked == asked + 1


@pytest.mark.parametrize("pools", [(), (1,), (2,)])
def test_what_does_not_fit_is_refused_whole_and_changes_nothing(pools) -> None:
    some, _ = tiers(*pools)
    blocks = some.device.allocate(3, "r")
    assert some.save(blocks, [A, B, None], "r") is None
    assert not some.outbox and not some.moving and some.num_saved == 0
    some.check(dict.fromkeys(blocks, 1), {})


def test_content_that_lies_there_already_is_not_copied_again() -> None:
    some, _ = tiers(5)
    first = some.save(some.device.allocate(2, "r"), [A, B], "r")
    some.land(sent(some))
    again = some.save(some.device.allocate(3, "s"), [A, B, C], "s")
    assert again[:2] == first
    assert sent(some).pairs[:, 1].tolist() == again[2:]
    assert some.num_saved == 3
    all_there = some.save(some.device.allocate(1, "t"), [A], "t")
    assert all_there == first[:1] and not some.outbox


def test_a_refused_save_gives_up_what_it_found() -> None:
    some, _ = tiers(1)
    saved = some.save(some.device.allocate(1, "r"), [A], "r")
    some.land(sent(some))
    assert some.save(some.device.allocate(2, "s"), [A, B], "s") is None
    assert some.host.refs(saved[0]) == 1


def test_saving_evicts_what_is_only_cached_on_the_host_the_oldest_first() -> None:
    some, _ = tiers(2)
    for digest in (A, B):
        some.drop(some.save(some.device.allocate(1, "r"), [digest], "r"))
        some.land(sent(some))
    assert some.host.num_cached == 2
    some.save(some.device.allocate(1, "s"), [C], "s")
    some.land(sent(some))
    assert (some.host_index.get(A), some.host_index.get(B) is None) == (None, False)


def test_without_caching_nobody_finds_what_was_saved() -> None:
    some, _ = tiers(3, caching=False)
    saved = some.save(some.device.allocate(2, "r"), [A, B], "r")
    some.land(sent(some))
    assert len(some.host_index) == 0
    some.drop(saved)
    assert some.host.num_free == 3
    cached(some, A)
    some.save_oldest(8)
    assert not some.outbox


# -- the second level --------------------------------------------------------------------------------------------------


def test_what_is_evicted_next_is_saved_first_and_only_what_is() -> None:
    some, _ = tiers(8)
    blocks = cached(some, A, B, C)
    some.save_oldest(5)
    assert not some.outbox, "five are free"
    some.save_oldest(7)
    transfer = sent(some)
    assert transfer.device_blocks == blocks[:2] and transfer.digests == [A, B]
    some.land(transfer)
    assert [some.host_index.get(digest) is not None for digest in (A, B, C)] == [True, True, False]
    assert some.device.oldest(3) == blocks[2:], "the others need not be saved again"
    some.save_oldest(7)
    assert not some.outbox, "both lie there already"
    some.device.allocate(7, "r")
    assert [some.index.get(digest) is not None for digest in (A, B, C)] == [False, False, True]


def test_cached_blocks_that_move_never_take_more_than_half_from_those_who_run() -> None:
    some, _ = tiers(8)
    cached(some, A, B, C, D)
    running = some.device.allocate(4, "r")
    some.save_oldest(8)
    assert (some.device.available, some.in_transit()) == (2, (2, 2))
    some.check(dict.fromkeys(running, 1), {})


def test_a_full_host_makes_room_for_what_was_used_last() -> None:
    some, _ = tiers(2)
    cached(some, A, B, C)
    for _ in range(3):
        some.device.release(some.device.allocate(6, "r"))  # evicts the oldest
        some.save_oldest(8)
        while some.outbox:
            some.land(some.outbox.popleft())
    assert some.host.num_cached == 2
    assert [some.host_index.get(digest) is not None for digest in (A, B, C)] == [False, True, True]


def test_fetched_blocks_are_findable_on_the_device_once_they_are_there() -> None:
    some, _ = tiers(4)
    saved = some.save(some.device.allocate(1, "r"), [A], "r")
    some.land(sent(some))
    (block,) = some.device.allocate(1, "s")
    some.fetch([(saved[0], block, A)], "s")
    transfer = sent(some)
    assert (transfer.to_host, transfer.pairs.tolist(), some.num_fetched) == (False, [[saved[0], block]], 1)
    assert some.index.get(A) is None
    some.drop(saved)
    assert some.host.num_used == 1, "its source is not evicted while it is read"
    some.land(transfer)
    assert (some.index.get(A), some.host.num_used, some.host.num_cached) == (block, 0, 1)


# -- forgetting --------------------------------------------------------------------------------------------------------


def test_forgotten_content_is_found_on_no_level_nor_where_it_arrives() -> None:
    some, _ = tiers(6)
    there = some.save(some.device.allocate(2, "r"), [A, B], "r")
    some.land(sent(some))
    some.drop(there[:1])
    some.save(some.device.allocate(1, "r"), [C], "r")
    some.forget([A, B, C, None])
    some.land(sent(some))
    assert len(some.host_index) == 0
    assert (some.host.num_cached, some.host.num_used) == (0, 2), "B and C are the request's own still"


def test_forgetting_everything_leaves_what_requests_use_and_frees_the_rest() -> None:
    some, _ = tiers(6)
    used = some.save(some.device.allocate(1, "r"), [A], "r")
    some.land(sent(some))
    some.drop(some.save(some.device.allocate(1, "s"), [B], "s"))
    some.land(sent(some))
    cached(some, C, D)
    some.save_oldest(8)
    on_its_way = sent(some)
    forgotten = some.forget_all()
    assert forgotten == 1, "B; what moves is nobody's yet"
    assert some.host_index.get(A) == used[0]
    some.land(on_its_way)
    assert (len(some.index), len(some.host_index)) == (0, 1)
    assert (some.device.num_cached, some.host.num_cached, some.host.num_used) == (0, 0, 1)
    assert some.in_transit() == (0, 0)


def test_nothing_lands_twice() -> None:
    some, _ = tiers(2)
    some.save(some.device.allocate(1, "r"), [A], "r")
    transfer = sent(some)
    some.land(transfer)
    with pytest.raises(InternalError, match="'r' landed twice"):
        some.land(transfer)


@pytest.mark.parametrize("level", ["device", "host"])
def test_a_reference_too_many_on_either_level_is_told(level) -> None:
    some, _ = tiers(2)
    blocks = some.device.allocate(1, "r")
    saved = some.save(blocks, [A], "r")
    some.check({blocks[0]: 1}, {saved[0]: 1})
    getattr(some, level).acquire(blocks if level == "device" else saved, "s")
    with pytest.raises(InternalError, match="of 'r': "):
        some.check({blocks[0]: 1}, {saved[0]: 1})


def test_without_host_memory_nothing_is_ever_saved() -> None:
    some = Tiers(9, PrefixIndex())
    assert (some.swapping, some.caching) == (False, False)
    cached(some, A)
    some.save_oldest(8)
    assert some.save(some.device.allocate(1, "r"), [B], "r") is None
    assert not some.outbox


# -- under the scheduler -----------------------------------------------------------------------------------------------


def until(rig: Rig, reached) -> None:
    """Steps in which nothing lands, unless everybody waits for that, until `reached` holds."""
    for _ in range(200):
        step = rig.scheduler.schedule()
        rig._begin_all()
        if step is not None:
            rig.compute(step)
        rig.scheduler.check()
        if reached():
            return
        if step is None and rig.moving:
            rig.land(next(iter(rig.moving)))
    raise AssertionError("never reached")


def two(**names) -> tuple[Rig, object, object]:
    """Two requests of 3 blocks each where there are 5; the second one must make room."""
    rig = Rig(num_blocks=6, max_model_len=16, prefix_caching=False, **names)
    return rig, rig.add([0, 1, 2, 0], 8), rig.add([1, 1, 2, 0], 8)


def test_nobody_gets_a_block_that_is_being_copied() -> None:
    rig, first, second = two(host_blocks=8)
    until(rig, lambda: second.state is State.SWAPPED)
    (transfer,) = rig.moving
    taken = set()
    while transfer in rig.moving:
        rig.step(land=False)
        taken |= set(rig.scheduler.rows.held(first.row)) if first.row else set()
    assert taken and not taken & set(transfer.device_blocks)
    rig.drain()
    assert (first.output_ids, second.output_ids) == (solo([0, 1, 2, 0], 8), solo([1, 1, 2, 0], 8))


@pytest.mark.parametrize("state", ["departing", "swapped", "loading"])
def test_a_request_can_be_ended_wherever_its_blocks_are(state) -> None:
    """U35: and the other one gives what it would give alone."""
    rig, first, second = two(host_blocks=8)
    until(rig, lambda: second.state is State.SWAPPED)
    if state != "departing":
        rig.land(*rig.moving)
    if state == "loading":
        until(rig, lambda: second.state is State.LOADING)
    assert rig.scheduler.abort(second)
    rig.scheduler.check()
    assert second.reason is Reason.ABORT
    rig.drain()
    assert first.output_ids == solo([0, 1, 2, 0], 8)
    assert second.output_ids == solo([1, 1, 2, 0], 8)[: len(second.output_ids)]


@pytest.mark.parametrize("state", ["departing", "swapped", "loading"])
def test_after_a_change_of_weights_nothing_that_was_copied_is_read(state) -> None:
    rig, first, second = two(host_blocks=8)
    until(rig, lambda: second.state is State.SWAPPED)
    if state != "departing":
        rig.land(*rig.moving)
    if state == "loading":
        until(rig, lambda: second.state is State.LOADING)
    rig.scheduler.flush()
    rig.memory.clear()
    rig.host.clear()
    assert (first.state, second.state) == (State.WAITING, State.WAITING) or first.state is State.FINISHED
    rig.drain()
    assert (first.output_ids, second.output_ids) == (solo([0, 1, 2, 0], 8), solo([1, 1, 2, 0], 8))


def test_a_change_of_weights_empties_both_levels() -> None:
    rig = Rig(num_blocks=5, host_blocks=8, max_model_len=16)
    for prompt in ([0] * 8, [1] * 8, [2] * 8):
        rig.run(prompt, 2)
    tiers = rig.scheduler.tiers
    assert tiers.device.num_cached and tiers.host.num_cached
    rig.scheduler.flush()
    assert (tiers.device.num_cached, tiers.host.num_cached) == (0, 0)
    again = rig.run([0] * 8, 2)
    assert (again.num_cached_tokens, again.num_host_cached_tokens) == (0, 0)


def test_what_is_under_way_when_logits_turn_out_unusable_arrives_without_being_findable() -> None:
    """Its blocks are cached by a preemption, on their way to the host, and its own again when it fails."""
    rig = Rig(num_blocks=7, host_blocks=20, max_model_len=24, mode="recompute", max_num_seqs=2)
    first, bad = rig.add([0, 1, 2, 0], 12), rig.add([1, 1, 2, 0, 3, 3, 1, 1], 8)
    until(rig, lambda: bad.num_preemptions == 1)
    assert any(transfer.cached for transfer in rig.moving)
    assert rig.scheduler.abort(first)
    until(rig, lambda: bad.state is State.RUNNING)
    held = rig.scheduler.rows.held(bad.row)
    moving = rig.scheduler.tiers.moving_refs()
    assert any(moving[block] for block in held), "some of its blocks move while it runs"
    hashes = list(bad.hashes)
    rig.scheduler.fail(bad)
    rig.drain()
    tiers = rig.scheduler.tiers
    found = [tiers.index.get(digest) or tiers.host_index.get(digest) for digest in hashes]
    assert found == [None] * len(hashes)


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_nobody_makes_room_more_often_than_allowed(most, mode) -> None:
    rig = Rig(num_blocks=9, host_blocks=30, max_model_len=40, max_num_seqs=6, mode=mode, max_preemptions=most)
    prompts = [[number, 1, 2, number, 3] for number in range(5)]
    requests = [rig.add(prompt, 20) for prompt in prompts]
    rig.drain()
    assert [request.output_ids for request in requests] == [solo(prompt, 20) for prompt in prompts]
    counts = [request.num_preemptions for request in requests]
    assert max(counts) <= most and sum(counts) == rig.scheduler.num_preemptions >= 1
    assert counts[0] == 0, "the first in order never makes room"
    assert sum(request.num_swaps for request in requests) == rig.scheduler.num_swaps


def test_transfers_are_pairs_of_blocks_as_the_contract_takes_them() -> None:
    rig, _, second = two(host_blocks=8)
    until(rig, lambda: second.state is State.SWAPPED)
    (transfer,) = rig.moving
    assert transfer.pairs.dtype == np.int32 and transfer.pairs.shape == (len(second.saved), 2)
    assert (transfer.pairs > 0).all() and len(set(transfer.host_blocks)) == len(transfer.host_blocks)
    rig.drain()
