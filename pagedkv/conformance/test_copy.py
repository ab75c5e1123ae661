"""Copies of blocks: every byte, nothing else, and in the promised order beside compute."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

from pagedkv.api import Event, GroupSpec
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.rig import Rig, Seq

pytestmark = pytest.mark.level("copy")

PATIENCE = 20.0
"""Seconds after which an event that is polled should long be done."""


def two_groups(kit: Kit, **changes: Any) -> Rig:
    """Two groups whose layers differ, two layers in the first, K unlike V in all of them."""
    groups = [
        GroupSpec(layers=(kit.layer(0), kit.layer(1)), block_size=kit.block_size, kv_dtype=kit.kv_dtype),
        GroupSpec(layers=(kit.layer(2, kv_heads=1),), block_size=kit.block_size, kv_dtype=kit.kv_dtype),
    ]
    return kit.rig(groups=groups, **changes)


def cleared(rig: Rig) -> Rig:
    """Without NaN: the cases that look at stale contents see numbers."""
    rig.clear(range(1, rig.spec.num_blocks))
    return rig


def full(rig: Rig, blocks: int = 2) -> Seq:
    """A written sequence of whole blocks."""
    seq = rig.sequence(blocks * rig.block_size)
    rig.write(seq, 0, seq.length)
    return seq


def place(rig: Rig, seq: Seq) -> Seq:
    """The sequence's content in fresh blocks, where nothing is yet."""
    return seq.moved(rig.sequence(seq.length).blocks)


def pairs(seq: Seq, other: Seq) -> list[tuple[int, int]]:
    return list(zip(seq.blocks, other.blocks, strict=True))


def same_content(kit: Kit, rig: Rig, seq: Seq, before: dict[int, np.ndarray], mistake: str) -> None:
    for index, wanted in before.items():
        kit.same(rig, rig.read(seq, index), wanted, mistake=f"layer {index}: {mistake}")


def contents(rig: Rig, seq: Seq) -> dict[int, np.ndarray]:
    """Layer -> what attention reads from the sequence's blocks."""
    return {layer.index: rig.read(seq, layer.index) for layer in rig.group.layers}


def agree(kit: Kit, rig: Rig, seq: Seq, mistake: str) -> None:
    """Every layer of `seq` reads as the oracle says."""
    for layer in rig.group.layers:
        wanted = rig.expected((seq, seq.length, seq.length), layer=layer.index)
        kit.check(rig, rig.read(seq, layer.index), wanted, mistake=f"layer {layer.index}: {mistake}")


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.law("copy: keys and values of every layer of every group arrive bit for bit")
@pytest.mark.parametrize("group", [0, 1])
def test_every_layer_and_both_halves(kit: Kit, group: int) -> None:
    rig = cleared(two_groups(kit)).of_group(group)
    seq = full(rig)
    before, other = contents(rig, seq), place(rig, seq)
    rig.backend.wait(rig.copy(pairs(seq, other)))
    agree(kit, rig, other, "not copied, or K and V exchanged")
    same_content(kit, rig, other, before, "the copy is not bit for bit")


@pytest.mark.law("copy: only the destinations change")
def test_only_destinations_change(kit: Kit) -> None:
    rig = cleared(two_groups(kit))
    seqs = [full(rig) for _ in range(4)]
    before = [contents(rig, seq) for seq in seqs]
    target = place(rig, seqs[1])
    rig.backend.wait(rig.copy(pairs(seqs[1], target)))
    for seq, wanted in zip(seqs, before, strict=True):
        same_content(kit, rig, seq, wanted, "a copy changed its source or a third block")


@pytest.mark.law("copy: many pairs in one call, in any order")
@pytest.mark.parametrize("order", ["as-given", "reversed", "shuffled"])
def test_many_pairs_in_any_order(kit: Kit, order: str) -> None:
    rig = cleared(kit.rig(kit.layer(0), kit.layer(1)))
    seqs = [full(rig, 3) for _ in range(5)]
    others = [place(rig, seq) for seq in seqs]
    wanted = [pair for seq, other in zip(seqs, others, strict=True) for pair in pairs(seq, other)]
    turned = {"as-given": wanted, "reversed": wanted[::-1]}.get(order) or rig.rng.permutation(wanted)
    rig.backend.wait(rig.copy(turned))
    for other in others:
        agree(kit, rig, other, "with many pairs in a call some block is missing or in another's place")


@pytest.mark.law("copy: one source to several destinations")
def test_one_source_many_destinations(kit: Kit) -> None:
    rig = cleared(kit.rig(kit.layer(0), kit.layer(1)))
    seq = full(rig, 1)
    others = [place(rig, seq) for _ in range(4)]
    rig.backend.wait(rig.copy([(seq.blocks[0], other.blocks[0]) for other in others]))
    for other in others:
        agree(kit, rig, other, "a repeated source was copied once only")


@pytest.mark.law("copy: copying block 0 clears a block")
def test_null_block_clears(kit: Kit) -> None:
    rig = kit.rig(kit.layer(0), kit.layer(1))
    seq = full(rig)
    rig.clear(seq.blocks)
    for layer in rig.group.layers:
        out = rig.read(seq, layer.index)
        assert (out == 0).all(), f"layer {layer.index}: a block cleared by a copy of block 0 has values other than 0"


@pytest.mark.law("copy: no pair at all is legal")
def test_no_pairs(kit: Kit) -> None:
    rig = kit.rig()
    seq = full(rig)
    before = contents(rig, seq)
    rig.copy([]).join()
    same_content(kit, rig, seq, before, "an empty copy changed a block")


@pytest.mark.law("copy: the array of pairs may be overwritten once the call returns")
def test_pairs_overwritten(kit: Kit) -> None:
    rig = cleared(kit.rig())
    seq, third = full(rig), full(rig)
    other = place(rig, seq)
    array = np.array(pairs(seq, other), np.int32)
    event = rig.backend.copy_blocks(rig.pool, rig.pool, array)
    array[:] = third.blocks
    rig.backend.wait(event)
    agree(kit, rig, other, "the array of pairs was read after the call returned")
    agree(kit, rig, third, "the array of pairs was read after the call returned")


@pytest.mark.law("copy on write: appending to a copy leaves the original as it is")
def test_copy_on_write(kit: Kit) -> None:
    rig = cleared(kit.rig(kit.layer(0), kit.layer(1)))
    size = rig.block_size
    parent = rig.sequence(2 * size - 1)
    rig.write(parent, 0, parent.length)
    before = contents(rig, parent)
    child = rig.fork(parent, parent.length, 2 * size)
    rig.backend.wait(rig.copy([(parent.blocks[1], child.blocks[1])]))
    rows = [(child, child.length, 1)]
    for layer in rig.group.layers:
        out = rig.step(*rows, layer=layer.index)
        kit.check(rig, out, rig.expected(*rows, layer=layer.index), mistake="the copied half of the block is not there")
    same_content(kit, rig, parent, before, "the append to the copy reached the original")


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.law("copy order: after=None starts after all compute enqueued so far")
def test_after_compute_so_far(kit: Kit) -> None:
    rig = cleared(kit.rig(kit.layer(0), kit.layer(1)))
    seq = rig.sequence(2 * rig.block_size)
    other = place(rig, seq)
    rig.write(seq, 0, seq.length)
    rig.backend.wait(rig.copy(pairs(seq, other)))
    agree(kit, rig, other, "the copy started before the append that precedes it was done")


@pytest.mark.law("copy order: after=event starts after the recorded compute")
def test_after_recorded_event(kit: Kit) -> None:
    rig = cleared(kit.rig(kit.layer(0), kit.layer(1)))
    seq, bystander = rig.sequence(2 * rig.block_size), rig.sequence(rig.block_size)
    other = place(rig, seq)
    rig.write(seq, 0, seq.length)
    event = rig.backend.record()
    rig.write(bystander, 0, bystander.length)
    rig.backend.wait(rig.copy(pairs(seq, other), after=event))
    agree(kit, rig, other, "`after` was ignored: the copy read blocks before they were written")
    agree(kit, rig, bystander, "compute beside a copy was lost")


@pytest.mark.law("copy order: after=event of another copy chains them")
def test_chained_copies(kit: Kit) -> None:
    rig = cleared(kit.rig(kit.layer(0), kit.layer(1)))
    seq = full(rig)
    chain = [seq, place(rig, seq), place(rig, seq), place(rig, seq)]
    event: Event | None = None
    for source, target in itertools.pairwise(chain):
        event = rig.copy(pairs(source, target), after=event)
    rig.backend.wait(event or Event())
    agree(kit, rig, chain[-1], "`after` was ignored: a copy started before the copy it was to follow")


@pytest.mark.law("copy order: compute after wait(event) sees the copy")
def test_wait_orders_readers(kit: Kit) -> None:
    rig = cleared(kit.rig(kit.layer(0), kit.layer(1)))
    seqs = [full(rig) for _ in range(3)]
    others = [place(rig, seq) for seq in seqs]
    events = [rig.copy(pairs(seq, other)) for seq, other in zip(seqs, others, strict=True)]
    for event in events:
        rig.backend.wait(event)
    for other in others:
        agree(kit, rig, other, "wait did nothing: attention ran before the copy it was to wait for")


@pytest.mark.law("copy order: whoever overwrites a source after wait(event) does not change the copy")
def test_wait_orders_writers(kit: Kit) -> None:
    rig = cleared(kit.rig(kit.layer(0), kit.layer(1)))
    seq = full(rig)
    other, new = place(rig, seq), rig.sequence(seq.length, seq.blocks)
    rig.backend.wait(rig.copy(pairs(seq, other)))
    rig.write(new, 0, new.length)
    agree(kit, rig, other, "wait did nothing: the source was overwritten before the copy had read it")
    agree(kit, rig, new, "the copy was made after wait(event) and undid a later write")


@pytest.mark.law("copy order: a destination written after wait(event) keeps what was written")
def test_copy_does_not_come_late(kit: Kit) -> None:
    rig = cleared(kit.rig(kit.layer(0), kit.layer(1)))
    seq = full(rig)
    new = place(rig, seq)
    new.give(rig.layer(0), *rig.sequence(seq.length).qkv(rig.layer(0)))
    rig.backend.wait(rig.copy(pairs(seq, new)))
    rig.write(new, 0, new.length)
    rig.backend.synchronize()
    agree(kit, rig, new, "wait did nothing: the copy came after the write that waited for it")


# -- events ------------------------------------------------------------------------------------------------------------


@pytest.mark.law("events: a copy is visible to compute once its event is joined")
def test_joined_copy_is_visible(kit: Kit) -> None:
    rig = cleared(kit.rig(kit.layer(0), kit.layer(1)))
    seq = full(rig)
    other = place(rig, seq)
    event = rig.copy(pairs(seq, other))
    event.join()
    agree(kit, rig, other, "join returned before the copy had ended")
    assert event.done() is True, "an event that was joined must be done"


@pytest.mark.law("events: a copy is visible to compute once its event says done")
def test_done_copy_is_visible(kit: Kit) -> None:
    rig = cleared(kit.rig(kit.layer(0), kit.layer(1)))
    seq = full(rig)
    other = place(rig, seq)
    event = rig.copy(pairs(seq, other))
    until_done(event)
    agree(kit, rig, other, "done() was true before the copy had ended")
    assert event.done() is True, "an event that was done must stay done"


@pytest.mark.law("events: synchronize ends all work, and every event before it is done")
def test_synchronize_ends_everything(kit: Kit) -> None:
    rig = cleared(kit.rig(kit.layer(0), kit.layer(1)))
    seq = full(rig)
    other = place(rig, seq)
    events = [rig.copy(pairs(seq, other)), rig.backend.record()]
    rig.backend.synchronize()
    assert [event.done() for event in events] == [True, True], "an event is not done after synchronize"
    agree(kit, rig, other, "synchronize returned before a copy had ended")


@pytest.mark.law("events: record, done and join of compute; join with a timeout returns once the work is done")
def test_recorded_compute_ends(kit: Kit) -> None:
    rig = cleared(kit.rig())
    seq = full(rig)
    event = rig.backend.record()
    until_done(event)
    event.join(timeout=PATIENCE)
    assert event.done() is True
    rig.backend.wait(event)
    agree(kit, rig, seq, "waiting for an event that is done changed a result")


@pytest.mark.law("events: an event may be waited for and joined again, and after later work")
def test_events_are_reusable(kit: Kit) -> None:
    rig = cleared(kit.rig())
    seq = full(rig)
    first, second = place(rig, seq), place(rig, seq)
    event = rig.copy(pairs(seq, first))
    for _ in range(2):
        rig.backend.wait(event)
        event.join()
    later = rig.copy(pairs(first, second), after=event)
    rig.backend.wait(later)
    agree(kit, rig, second, "a copy after an event that was joined before is missing")


@pytest.mark.law("events: to_host gives the values of all compute enqueued before it")
def test_to_host_follows_compute(kit: Kit) -> None:
    rig = cleared(kit.rig())
    layer, seq = rig.layer(), rig.sequence(rig.block_size + 1)
    rows = [(seq, seq.length, seq.length)]
    out = rig.empty_out(seq.length, layer)
    rig.backend.attend(rig.plan(*rows), layer.index, *rig.qkv(rows, layer), out)
    event, array = rig.backend.to_host(out.float())
    until_done(event)
    kit.check(rig, array, rig.expected(*rows), mistake="the array was not valid although its event was done")


def until_done(event: Event) -> None:
    """Poll an event, as an engine does between two steps."""
    end = time.monotonic() + PATIENCE
    while not event.done():
        assert time.monotonic() < end, (
            f"an event was not done after {PATIENCE:g} s of polling; its work must go on alone"
        )
        time.sleep(0.001)


# -- two pools ---------------------------------------------------------------------------------------------------------


@pytest.mark.law("copy between pools: bit for bit, an id may stand on both sides")
def test_between_two_pools(kit: Kit) -> None:
    layers = (kit.layer(0), kit.layer(1))
    here, there = cleared(kit.rig(*layers)), cleared(kit.rig(*layers, seed=1))
    seq = full(here, 4)
    before = contents(here, seq)
    other = seq.moved([*seq.blocks[1:], seq.blocks[0]])  # each id is source here and destination there
    here.backend.wait(here.copy(pairs(seq, other), dst=there))
    agree(kit, there, other, "pairs between two pools overlapped as if they were one")
    same_content(kit, there, other, before, "the copy is not bit for bit")
    same_content(kit, here, seq, before, "a copy to another pool changed its source")


@pytest.mark.placement("host")
@pytest.mark.law("host pools: blocks come back bit for bit, into other ids too")
@pytest.mark.parametrize("group", [0, 1])
def test_round_trip_over_the_host(kit: Kit, group: int) -> None:
    rig = cleared(two_groups(kit)).of_group(group)
    host = two_groups(kit, placement="host", num_blocks=9)
    seq = full(rig, 3)
    before = contents(rig, seq)
    out = rig.copy(list(zip(seq.blocks, (8, 3, 5), strict=True)), dst=host)
    back = place(rig, seq)
    event = host.copy(list(zip((8, 3, 5), back.blocks, strict=True)), dst=rig, after=out)
    rig.backend.wait(event)
    agree(kit, rig, back, "blocks that went to the host did not come back")
    same_content(kit, rig, back, before, "the round trip is not bit for bit")


@pytest.mark.placement("host")
@pytest.mark.law("host pools: a block out and in again is as if nothing had happened, whoever had its id meanwhile")
def test_swapped_out_and_in(kit: Kit) -> None:
    layers = (kit.layer(0), kit.layer(1))
    rig = cleared(kit.rig(*layers))
    host = kit.rig(*layers, placement="host", num_blocks=4)
    seq = full(rig)
    rig.backend.wait(rig.copy(list(zip(seq.blocks, (2, 1), strict=True)), dst=host))
    usurper = rig.sequence(seq.length, seq.blocks)
    rig.write(usurper, 0, usurper.length)
    agree(kit, rig, usurper, "the id's next owner")
    rig.backend.wait(host.copy(list(zip((2, 1), seq.blocks, strict=True)), dst=rig))
    agree(kit, rig, seq, "blocks that were out and in are not what they were")


@pytest.mark.placement("host")
@pytest.mark.law("host pools: block 0 of a host pool is zero and clears a block of the device")
def test_null_block_of_a_host_pool(kit: Kit) -> None:
    rig, host = kit.rig(), kit.rig(placement="host", num_blocks=3)
    seq = full(rig, 1)
    rig.backend.wait(host.copy([(0, seq.blocks[0])], dst=rig))
    assert (rig.read(seq) == 0).all(), "block 0 of a host pool is not zero"
