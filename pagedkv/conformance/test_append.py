"""Where an append writes, where it must not, and what attention then reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.api import Capabilities
from pagedkv.api.checks import excluded
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.lattice import PLAIN
from pagedkv.conformance.rig import TORCH, Rig, Seq

pytestmark = pytest.mark.level("core")

NAN = float("nan")


def pad(rig: Rig, tensor: torch.Tensor, rows: int = 3, value: float = NAN) -> torch.Tensor:
    """`tensor` with rows of one number behind it."""
    more = torch.full((rows, *tensor.shape[1:]), value, dtype=tensor.dtype)
    return torch.cat([tensor, rig.to_device(more)])


def append(rig: Rig, slots: np.ndarray, k: torch.Tensor, v: torch.Tensor, layer: int | None = None) -> None:
    """Append only, to slots of the case's own."""
    plan = rig.plan(slots=np.asarray(slots, np.int64))
    rig.backend.attend(plan, rig.layer(layer).index, None, rig.to_device(k), rig.to_device(v), None)


def full(rig: Rig, blocks: list[int]) -> Seq:
    """A written sequence that fills these blocks."""
    seq = rig.sequence(len(blocks) * rig.block_size, blocks)
    rig.write(seq, 0, seq.length)
    return seq


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.law("append: each row of k and v is written at its slot")
def test_rows_are_written(kit: Kit) -> None:
    rig = kit.rig()
    seq = rig.sequence(2 * rig.block_size + 1)
    rig.write(seq, 0, seq.length)
    kit.check(rig, rig.read(seq), rig.expected((seq, seq.length, seq.length)), mistake="a write was left out")


@pytest.mark.law("append: the last row of k and the last slot of a block are written")
def test_last_slot_is_written(kit: Kit) -> None:
    rig = kit.rig()
    one, other = rig.sequence(rig.block_size), rig.sequence(2 * rig.block_size)
    for seq in (one, other):
        rig.write(seq, 0, seq.length)
    rows = [(seq, seq.length, 1) for seq in (one, other)]
    out = rig.step(*rows, write=False)
    kit.check(rig, out, rig.expected(*rows), mistake="the last row of an append, or of a block, was left out")


@pytest.mark.law("append: only the given slots of the given layer change")
def test_nothing_else_is_written(kit: Kit) -> None:
    rig = kit.rig(kit.layer(0), kit.layer(1))
    size = rig.block_size
    changed, other = full(rig, [7, 2, 5]), full(rig, [6, 3, 1])
    before = [rig.read(other, 0), rig.read(other, 1), rig.read(changed, 1)]
    at = sorted({0, size - 1, size, 2 * size})
    new = rig.sequence(len(at), [])
    _, k, v = new.qkv(rig.layer(0))
    append(rig, changed.slots(at, size), k, v, layer=0)
    after = [rig.read(other, 0), rig.read(other, 1), rig.read(changed, 1)]
    for got, wanted, what in zip(after, before, ("another block", "another block", "another layer"), strict=True):
        kit.same(rig, got, wanted, mistake=f"an append changed {what}")
    q, old_k, old_v = (tensor.clone() for tensor in changed.qkv(rig.layer(0)))
    old_k[at], old_v[at] = k, v
    changed.give(rig.layer(0), q, old_k, old_v)
    kit.check(rig, rig.read(changed, 0), rig.expected((changed, changed.length, changed.length), layer=0))


@pytest.mark.law("append: a slot of -1 is not written anywhere")
def test_minus_one_is_not_written(kit: Kit) -> None:
    rig = kit.rig(num_blocks=6)
    layer, size = rig.layer(), rig.block_size
    first, last = full(rig, [1, 2]), full(rig, [4, 5])
    before = rig.read(first), rig.read(last)
    seq = rig.sequence(1, [3])
    k, v = (pad(rig, rig.to_device(tensor), 4) for tensor in seq.qkv(layer)[1:])
    order = [1, 0, 2, 3, 4]
    append(rig, np.array([-1, 3 * size, -1, -1, -1]), k[order], v[order])
    kit.check(rig, rig.read(seq), rig.expected((seq, 1, 1)), mistake="the row beside a slot of -1 was not written")
    kit.same(rig, rig.read(last), before[1], mistake="-1 was taken for the last slot of the pool")
    kit.same(rig, rig.read(first), before[0], mistake="-1 wrote into somebody's block")
    assert_null_block(kit, rig)


@pytest.mark.law("append: there may be fewer rows of k than query tokens")
def test_fewer_rows_than_tokens(kit: Kit) -> None:
    rig = kit.rig()
    layer, seq = rig.layer(), rig.sequence(rig.block_size + 2)
    rig.write(seq, 0, seq.length - 2)
    rows = [(seq, seq.length, 4)]
    q, k, v = rig.qkv(rows, layer)
    plan = rig.plan(*rows, slots=seq.slots([seq.length - 2, seq.length - 1], rig.block_size))
    out = rig.call(plan, layer, q, k[2:].contiguous(), v[2:].contiguous())
    kit.check(rig, out, rig.expected(*rows), mistake="rows of k were matched with query tokens instead of slots")


@pytest.mark.law("append: there may be more rows of k than query tokens")
def test_more_rows_than_tokens(kit: Kit) -> None:
    rig = kit.rig()
    layer, seq, other = rig.layer(), rig.sequence(rig.block_size + 1), rig.sequence(rig.block_size + 2)
    everything = [(other, other.length, other.length), (seq, seq.length, seq.length)]
    q, k, v = rig.qkv(everything, layer)
    slots = np.concatenate([one.slots(range(one.length), rig.block_size) for one in (other, seq)])
    out = rig.call(rig.plan((seq, seq.length, 1), slots=slots), layer, q[-1:].contiguous(), k, v)
    kit.check(
        rig, out, rig.expected((seq, seq.length, 1)), mistake="only as many rows of k as query tokens were written"
    )
    kit.check(rig, rig.read(other), rig.expected(everything[0]), mistake="rows of k without a query were left out")


@pytest.mark.law("append: rows of k and v behind the last slot are padding")
def test_more_rows_than_slots(kit: Kit) -> None:
    rig = kit.rig(num_blocks=8)
    layer, last = rig.layer(), full(rig, [7])
    before, seq = rig.read(last), rig.sequence(rig.block_size + 1, [3, 1])
    q, k, v = rig.qkv([(seq, seq.length, seq.length)], layer)
    out = rig.call(rig.plan((seq, seq.length, seq.length)), layer, q, pad(rig, k), pad(rig, v))
    kit.check(rig, out, rig.expected((seq, seq.length, seq.length)), mistake="padding rows of k were appended")
    kit.same(rig, rig.read(last), before, mistake="padding rows of k were appended")
    assert_null_block(kit, rig)


# -- before and after --------------------------------------------------------------------------------------------------


@pytest.mark.law("append: append only, then attend only, equals one call, bit for bit")
def test_two_calls_equal_one(kit: Kit) -> None:
    results = []
    for split in (False, True):
        rig = kit.rig()
        seqs = [rig.sequence(rig.block_size + 1), rig.sequence(3), rig.sequence(2 * rig.block_size)]
        rig.write(seqs[0], 0, rig.block_size)
        rows = [(seqs[0], seqs[0].length, 1), (seqs[1], 3, 3), (seqs[2], seqs[2].length, seqs[2].length)]
        plan, layer = rig.plan(*rows), rig.layer()
        q, k, v = rig.qkv(rows, layer)
        if split:
            rig.backend.attend(plan, layer.index, None, k, v, None)
        results.append(rig.call(plan, layer, q, None if split else k, None if split else v))
    kit.same(rig, results[0], results[1], mistake="attention in the call that appends used other keys than the cache's")


@pytest.mark.law("append: all appends of a call precede every row's attention, a later row of a sequence first")
@pytest.mark.parametrize("one_table_row", [False, True], ids=["two-table-rows", "one-table-row"])
def test_later_row_of_a_sequence_first(kit: Kit, one_table_row: bool) -> None:
    rig = kit.rig()
    seq, part = rig.sequence(2 * rig.block_size + 1), max(1, rig.block_size - 1)
    rows = [(seq, seq.length, seq.length - part), (seq, part, part)]
    batch = rig.batch(rows)
    if one_table_row:
        batch.rows[:] = batch.rows[0]
    plan = rig.backend.plan(rig.pool, 0, batch)
    out = rig.attend(plan, rows, rig.layer())
    kit.check(rig, out, rig.expected(*rows), mistake="rows were appended and attended one after another")


@pytest.mark.law("append: a row sees what another row of the same call writes into a block they share")
def test_rows_that_share_blocks(kit: Kit) -> None:
    rig = kit.rig()
    size = rig.block_size
    parent = rig.sequence(2 * size + 1)
    child = rig.fork(parent, 2 * size, 3 * size)
    rows = [(child, child.length, size), (parent, parent.length, parent.length)]
    kit.check(rig, rig.step(*rows), rig.expected(*rows), mistake="a shared block was read before it was written")


def _coarser(can: Capabilities) -> list[tuple[str, str]]:
    """(dtype, KV dtype) whose cache rounds: fp32 over half precision first."""
    half = [name for name in PLAIN[1:] if name in can.kv_dtypes]
    pairs = [(dtype, kv) for dtype in can.dtypes for kv in half if dtype == "fp32" or (dtype, kv) == ("fp16", "bf16")]
    allowed = [(dtype, kv) for dtype, kv in pairs if not list(excluded({"dtype": dtype, "kv_dtype": kv}, can))]
    return sorted(allowed, key=lambda pair: pair[0] != "fp32")


@pytest.mark.applies.with_args(lambda can: bool(_coarser(can)))
@pytest.mark.law("stored: attention reads values as stored, never the raw argument")
def test_values_are_read_as_stored(kit: Kit) -> None:
    dtype, kv_dtype = _coarser(kit.can)[0]
    rig = kit.rig(dtype=dtype, kv_dtype=kv_dtype)
    seq = rig.sequence(1)
    finest = max(torch.finfo(TORCH[dtype]).eps, 1e-6)
    out = rig.step((seq, 1, 1))  # one visible key: the output is its value, without any error of the attention
    kit.check(rig, out, rig.expected((seq, 1, 1)), tolerance=4 * finest, mistake="v was used before it was rounded")


@pytest.mark.applies.with_args(lambda can: bool(_coarser(can)))
@pytest.mark.law("stored: attention reads keys as stored, never the raw argument")
def test_keys_are_read_as_stored(kit: Kit) -> None:
    """Two keys that differ by a quarter of the stored precision are equal once stored, and so are their weights."""
    dtype, kv_dtype = _coarser(kit.can)[0]
    rig = kit.rig(dtype=dtype, kv_dtype=kv_dtype)
    layer, seq = rig.layer(), rig.sequence(2)
    q, k, v = (torch.ones_like(tensor) for tensor in seq.qkv(layer))
    lost = torch.finfo(TORCH[kv_dtype]).eps / 4
    k[0] += lost
    v[0] = -1
    q /= layer.scale * layer.k_dim * lost  # raw keys would differ by 1 in the score
    seq.give(layer, q, k, v)
    out = rig.step((seq, 2, 2))
    kit.check(rig, out[-1:], np.zeros_like(out[-1:]), tolerance=0.1, mistake="k was used before it was rounded")


# -- forms of the arguments --------------------------------------------------------------------------------------------


@pytest.mark.law("strides: q, k and v may be slices of one tensor, with a token stride longer than a token")
def test_slices_of_one_tensor(kit: Kit) -> None:
    layer = kit.layer()
    rig = kit.rig(layer)
    rows = [(seq := rig.sequence(rig.block_size + 1), seq.length, seq.length), (rig.sequence(2), 2, 2)]
    fused = torch.cat(rig.qkv(rows, layer), dim=1)
    q, k, v = torch.split(fused, [layer.q_heads, layer.kv_heads, layer.kv_heads], dim=1)
    out = rig.call(rig.plan(*rows), layer, q, k, v)
    kit.check(rig, out, rig.expected(*rows), mistake="the token stride of q, k or v was taken to be heads * dim")


@pytest.mark.law("padding: out rows past the last token stay finite, whatever q, k and v hold there")
def test_padding_rows_of_q_and_out(kit: Kit) -> None:
    rig = kit.rig()
    layer, seq = rig.layer(), rig.sequence(rig.block_size + 1)
    rows = [(seq, seq.length, seq.length)]
    q, k, v = (pad(rig, tensor) for tensor in rig.qkv(rows, layer))
    out = rig.call(rig.plan(*rows, pad_rows=2, pad_slots=3), layer, q, k, v)
    kit.check(rig, out[: seq.length], rig.expected(*rows), mistake="padding took part in a real row")
    assert np.isfinite(out[seq.length :]).all(), "out rows past the last token are not finite: clear them"
    assert_null_block(kit, rig)


@pytest.mark.law("padding: rows past num_seqs have no query and change nothing")
def test_padding_rows_of_the_batch(kit: Kit) -> None:
    rig = kit.rig()
    rows = [(seq := rig.sequence(rig.block_size + 1), seq.length, 2), (rig.sequence(1), 1, 1)]
    rig.write(seq, 0, seq.length - 2)
    out = rig.step(*rows, pad_rows=5)
    kit.check(rig, out, rig.expected(*rows), mistake="rows past num_seqs were attended")


@pytest.mark.law("empty: a batch without sequences and tokens is legal, with padding rows and without")
@pytest.mark.parametrize("padding", [0, 3])
def test_no_sequence(kit: Kit, padding: int) -> None:
    rig = kit.rig()
    layer, plan = rig.layer(), rig.plan(pad_rows=padding, pad_slots=padding)
    q, k, v = (pad(rig, tensor, padding) for tensor in rig.qkv([], layer))
    out = rig.call(plan, layer, q, k, v)
    assert np.isfinite(out).all(), "out rows of a batch without tokens are not finite: clear them"
    rig.backend.attend(plan, layer.index, None, k, v, None)
    assert np.isfinite(rig.call(rig.plan(write=False), layer, q)).all(), "attend only: out rows are not finite"
    assert_null_block(kit, rig)


@pytest.mark.law("profiling: a batch whose slots are all -1 and whose table is all 0 is legal and finite")
def test_all_null(kit: Kit) -> None:
    rig = kit.rig()
    layer, size = rig.layer(), rig.block_size
    seqs = [rig.sequence(length, [0] * 3) for length in (2 * size + 1, size)]
    rows = [(seqs[0], seqs[0].length, 1), (seqs[1], size, size)]
    out = rig.step(*rows, slots=np.full(1 + size, -1, np.int64))
    kit.check(rig, out, 0 * out, tolerance=1e-30, mistake="the null block does not read as zero, or -1 was written")
    assert out.shape == (1 + size, layer.q_heads, layer.v_dim)
    assert_null_block(kit, rig)


# -- the null block ----------------------------------------------------------------------------------------------------


@pytest.mark.law("null block: block 0 reads as zero after every kind of append")
def test_null_block_stays_zero(kit: Kit) -> None:
    rig = kit.rig()
    assert_null_block(kit, rig)
    size = rig.block_size
    rows = [(seq := rig.sequence(size + 1), seq.length, seq.length), (rig.sequence(1), 1, 1)]
    q, k, v = (pad(rig, tensor, 2, 5.0) for tensor in rig.qkv(rows, rig.layer()))
    rig.call(rig.plan(*rows, pad_rows=3, pad_slots=2), rig.layer(), q, k, v)
    assert_null_block(kit, rig)


def assert_null_block(kit: Kit, rig: Rig) -> None:
    """Copied over a block that ends a sequence, block 0 gives zero keys and zero values in every slot but the last.

    Only the last slot is written: its weight tells the keys before it, what is added to it tells their values.
    """
    layer, size = rig.layer(), rig.block_size
    block = rig.free.pop()
    rig.clear([block])
    seq = rig.sequence(size, [block])
    q, k, v = (tensor.clone() for tensor in seq.qkv(layer))
    k[:-1], v[:-1] = 0, 0
    seq.give(layer, q, k, v)
    rig.write(seq, size - 1, size)
    rows = [(seq, size, 1)]
    out = rig.step(*rows, write=False)
    kit.check(rig, out, rig.expected(*rows), mistake="block 0 was written: it must read as zero for ever")
    rig.free.append(block)
