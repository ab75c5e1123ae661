"""Which orders of copies and compute are legal. Each case ends with the call that is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pagedkv.api import ContractViolation
from pagedkv.checking import order
from tests.checking.rig import SPEC, Core


def test_compute_may_follow_a_copy_that_was_waited_for():
    for settle in (
        lambda core, event: core.checked.wait(event),
        lambda core, event: event.join(),
        lambda core, event: event.done(),
        lambda core, event: core.checked.synchronize(),
    ):
        core = Core()
        settle(core, core.copy((9, 1), (2, 10)))
        core.attend()


def test_compute_on_other_blocks_and_reads_of_a_source_need_no_wait():
    core = Core()
    core.copy((1, 9), (10, 11))
    core.attend()  # reads block 1, writes blocks 2 and 3


def test_block_0_is_a_source_that_nobody_writes():
    core = Core()
    core.copy((0, 9), (0, 10))
    core.copy((0, 11))
    core.attend()


def test_a_join_with_a_limit_proves_nothing():
    core = Core()
    event = core.copy((9, 1))
    event.join(0.1)
    with pytest.raises(ContractViolation, match="block 1, which a pending"):
        core.attend()


def test_a_window_keeps_a_layer_away_from_a_block():
    core = Core()
    core.copy((9, 1))  # row A stands at position 19: layer 1 sees keys 12..19, layer 0 all of them
    with pytest.raises(ContractViolation, match="block 1"):
        core.attend(k=None, v=None, layer=1)
    other = Core()
    other.copy((9, 1))
    plan = other.plan(
        group=1, slots=None, ctx_len=np.array([32, 5], np.int32), max_ctx=32
    )  # position 31 sees keys 24..31
    other.attend(plan, 4, k=None, v=None)


def test_copies_chain_through_after():
    core = Core()
    first = core.copy((9, 10))
    second = core.copy((10, 11), after=first)
    third = core.copy((11, 12), after=second)  # comes after the first, too
    core.copy((13, 10), after=third)
    core.checked.wait(third)
    core.copy((12, 14))  # all compute so far has waited


def test_an_after_that_came_before_the_wait_does_not_cover_it():
    core = Core()
    early = core.checked.record()
    event = core.copy((9, 10))
    core.checked.wait(event)
    with pytest.raises(ContractViolation, match="block 10, which a pending") as caught:
        core.copy((10, 11), after=early)
    assert caught.value.law == "wait"
    core.copy((10, 11), after=event)
    core.copy((10, 12), after=core.checked.record())


def test_after_must_come_after_the_compute_that_used_the_blocks():
    core = Core()
    early = core.checked.record()
    core.attend()
    core.copy((8, 9), after=early)
    for pair in ((2, 10), (11, 1)):  # written by attend; read by attend
        with pytest.raises(ContractViolation) as caught:
            core.copy(pair, after=early)
        assert caught.value.law == "after"
    core.copy((2, 10), after=core.checked.record())
    core.checked.record().join()
    core.copy((2, 12), after=early)  # the host has seen the end of that compute


def test_pools_have_blocks_of_their_own():
    core = Core()
    host = core.checked.alloc_pool(dataclasses.replace(SPEC, placement="host", num_blocks=5))
    core.copy((20, 1), to=host)
    core.attend()  # block 1 of the other pool
    with pytest.raises(ContractViolation, match="wait"):
        core.checked.copy_blocks(host, core.pool, np.array([[1, 22]], np.int32))
    event = core.copy((21, 2), to=host)
    assert event.done()


def test_a_refused_copy_is_not_under_way():
    core = Core()
    with pytest.raises(ContractViolation):
        core.copy((1, 0))
    core.attend()


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(order, "_MOST", 8)
    core = Core()
    event = core.copy((0, 30))
    for _ in range(30):
        event = core.copy((0, 30), after=event)
    assert len(core.checked._order._transfers) == 8 and len(event.moment.transfers) == 8
