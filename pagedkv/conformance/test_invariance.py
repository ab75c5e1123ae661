"""The same bits: for the same work (deterministic), and for a row whatever is around it (batch_invariant)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.api import Capabilities, LayerSpec, UnsupportedError
from pagedkv.conformance.kit import Kit, assert_same_bits
from pagedkv.conformance.rig import Rig, Row, Seq
from pagedkv.core.negotiation import Choice, Requirements, negotiate

pytestmark = pytest.mark.level("core")

INVARIANT = "batch_invariant"


# -- deterministic -----------------------------------------------------------------------------------------------------


def mixed(rig: Rig) -> list[Row]:
    """Two decode rows, a chunk and a prefill; what came before is in the cache."""
    size = rig.block_size
    shapes = [(3 * size + 1, 1), (size, 1), (2 * size + 1, size), (size + 2, size + 2)]
    rows = [(rig.sequence(length), length, count) for length, count in shapes]
    for seq, length, count in rows:
        rig.write(seq, 0, length - count)
    return rows


@pytest.mark.needs("deterministic")
@pytest.mark.law("deterministic: the same batch twice gives the same bits")
def test_same_batch_twice(kit: Kit) -> None:
    rig = kit.rig()
    rows = mixed(rig)
    first = rig.step(*rows)
    for _ in range(3):
        assert_same_bits(rig.step(*rows), first, "the order of a sum depends on chance")


@pytest.mark.needs("deterministic")
@pytest.mark.law("deterministic: other block ids give the same bits")
def test_other_block_ids(kit: Kit) -> None:
    rig = kit.rig()
    rows = mixed(rig)
    first = rig.step(*rows)
    others = [(seq.moved(rig.sequence(seq.length).blocks), length, count) for seq, length, count in rows]
    for seq, length, count in others:
        rig.write(seq, 0, length - count)
    assert_same_bits(rig.step(*others), first, "the order of a sum depends on where blocks lie")


@pytest.mark.needs("deterministic")
@pytest.mark.law("deterministic: another pool gives the same bits")
def test_other_pool(kit: Kit) -> None:
    results = []
    for _ in range(2):
        rig = kit.rig()
        results.append(rig.step(*mixed(rig)))
    assert_same_bits(results[1], results[0], "a result depends on what an earlier pool left")


# -- batch invariant ---------------------------------------------------------------------------------------------------


def _choice(can: Capabilities, layer: LayerSpec) -> Choice | None:
    """What an engine that asks for batch invariance gets; None where no dtype goes with it."""
    for dtype in can.dtypes:
        try:
            return negotiate(can, Requirements(layers=(layer,), dtype=dtype, batch_invariant=True), backend="tested")
        except UnsupportedError:
            continue
    return None


def invariant_rig(kit: Kit) -> Rig:
    layer = kit.layer()
    chosen = _choice(kit.can, layer)
    assert chosen is not None, "batch_invariant is declared, and the exclusions leave no dtype that goes with it"
    features = kit.spec(layer).features | chosen.features
    return kit.rig(layer, dtype=chosen.dtype, kv_dtype=chosen.kv_dtype, features=features)


class Alone:
    """A sequence and what each of its positions gives when it is prefilled alone, at once."""

    def __init__(self, rig: Rig, length: int) -> None:
        self.rig, self.seq = rig, rig.sequence(length)
        self.out = rig.step((self.seq, length, length))

    def again(self) -> Seq:
        """The same tokens in blocks where nothing is yet."""
        return self.seq.moved(self.rig.sequence(self.seq.length).blocks)

    def same(self, got: np.ndarray, start: int, mistake: str) -> None:
        """`got` has the bits of the positions from `start` on."""
        assert_same_bits(got, self.out[start : start + len(got)], mistake)


@pytest.mark.needs(INVARIANT)
@pytest.mark.law("batch_invariant: a row's bits do not depend on its neighbours")
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_with_neighbours(kit: Kit, place: str) -> None:
    rig = invariant_rig(kit)
    alone = Alone(rig, 2 * rig.block_size + 1)
    seq, neighbours = alone.again(), mixed(rig)
    at = {"first": 0, "middle": 2, "last": 4}[place]
    rows = [*neighbours[:at], (seq, seq.length, seq.length), *neighbours[at:]]
    start = sum(count for *_, count in rows[:at])
    out = rig.step(*rows)[start : start + seq.length]
    alone.same(out, 0, "neighbours changed the split or the tiling of a row")


@pytest.mark.needs(INVARIANT)
@pytest.mark.law("batch_invariant: a row's bits do not depend on padding or on generous bounds")
def test_with_padding(kit: Kit) -> None:
    rig = invariant_rig(kit)
    layer, alone = rig.layer(), Alone(rig, 2 * rig.block_size + 1)
    seq = alone.again()
    row = (seq, seq.length, seq.length)
    more = rig.to_device(rig.random(7, layer.q_heads, layer.k_dim))
    q, k, v = rig.qkv([row], layer)
    limits = rig.spec.limits
    plan = rig.plan(row, pad_rows=4, max_q=limits.tokens, max_ctx=limits.context)
    out = rig.call(plan, layer, torch.cat([q, more]), k, v)[: seq.length]
    alone.same(out, 0, "padding changed the split or the tiling of a row")


@pytest.mark.needs(INVARIANT)
@pytest.mark.law("batch_invariant: a position's bits do not depend on how the prompt is cut into chunks")
@pytest.mark.parametrize("step", [1, 3])
def test_in_chunks(kit: Kit, step: int) -> None:
    rig = invariant_rig(kit)
    alone = Alone(rig, 2 * rig.block_size + 2)
    seq, start = alone.again(), 0
    while start < seq.length:
        end = min(seq.length, start + step)
        alone.same(rig.step((seq, end, end - start)), start, "a chunk, or a decode, is summed otherwise than a prefill")
        start = end


@pytest.mark.needs(INVARIANT)
@pytest.mark.law("batch_invariant: a position's bits do not depend on a prefix hit")
def test_after_a_prefix_hit(kit: Kit) -> None:
    rig = invariant_rig(kit)
    size = rig.block_size
    alone = Alone(rig, 3 * size + 1)
    rig.write(seq := alone.again(), 0, 2 * size)
    hit = rig.step((seq, seq.length, seq.length - 2 * size))
    alone.same(hit, 2 * size, "a prefix hit changed the split of a row")


@pytest.mark.needs(INVARIANT)
@pytest.mark.law("batch_invariant: a decode among many has the bits of the same position in a prefill")
def test_decode_equals_prefill(kit: Kit) -> None:
    rig = invariant_rig(kit)
    size = rig.block_size
    singles = [Alone(rig, length) for length in (size + 1, 3 * size, 1, 2 * size + 2)]
    seqs = [one.again() for one in singles]
    for seq in seqs:
        rig.write(seq, 0, seq.length - 1)
    outs = rig.step(*[(seq, seq.length, 1) for seq in seqs])
    for one, out in zip(singles, outs, strict=True):
        one.same(out[None], one.seq.length - 1, "decode sums in another order than prefill")
