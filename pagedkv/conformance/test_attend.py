"""What one attention means, feature by feature, at the places where kernels go wrong; the oracle is in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagedkv.api import Capabilities
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.lattice import GROUPS, HEAD_DIMS, sizes
from pagedkv.conformance.rig import TORCH, Rig, Row

pytestmark = pytest.mark.level("core")


Make = Callable[..., list[Row]]


def written(rig: Rig, *lengths: int) -> list[Row]:
    """Rows of one query token: sequences of these lengths, all but the last token of each in the cache."""
    rows = [(rig.sequence(length), length, 1) for length in lengths]
    for seq, length, _ in rows:
        rig.write(seq, 0, length - 1)
    return rows


def prefills(rig: Rig, *lengths: int) -> list[Row]:
    return [(rig.sequence(length), length, length) for length in lengths]


def agree(kit: Kit, rig: Rig, rows: list[Row], mistake: str) -> None:
    kit.check(rig, rig.step(*rows), rig.expected(*rows), mistake=mistake)


# -- lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.law("context: exactly the first ctx_len keys are read, around the end of a block")
@pytest.mark.parametrize("make", [written, prefills], ids=["decode", "prefill"])
def test_context_around_a_block(kit: Kit, make: Make) -> None:
    rig = kit.rig()
    size = rig.block_size
    lengths = (size - 1, size, size + 1, 2 * size, 2 * size + 1)
    rows = make(rig, *[max(1, length) for length in lengths])
    agree(kit, rig, rows, "a context that ends at or beside the end of a block loses a key or reads one too many")


@pytest.mark.law("block table: a sequence's blocks are read in the order of its table row, wherever they lie")
def test_order_of_blocks(kit: Kit) -> None:
    rig = kit.rig()
    length = 4 * rig.block_size  # as prefills: a query that sees every block gives the same in any order of them
    rows = [(rig.sequence(length, blocks), length, length) for blocks in ([9, 3, 12, 5], [11, 10, 8, 7])]
    agree(kit, rig, rows, "blocks were read in another order, such as by id or as one stretch from the first")


@pytest.mark.law("hidden slots: large finite numbers in unowned blocks and behind the context never leak")
def test_finite_poison(kit: Kit) -> None:
    rig = kit.rig(poison=False)
    rig.poison(nan=False)
    size = rig.block_size
    agree(kit, rig, written(rig, size + 1, 2 * size - 1, 1), "a slot that no query sees took part in a result")


@pytest.mark.needs("nan_safe")
@pytest.mark.law("hidden slots: NaN in unowned blocks and behind the context never leaks (nan_safe)")
@pytest.mark.parametrize("make", [written, prefills], ids=["decode", "prefill"])
def test_nan_poison(kit: Kit, make: Make) -> None:
    rig = kit.rig(poison=False)
    rig.poison(nan=True)
    size = rig.block_size
    rows = make(rig, size + 1, max(1, 2 * size - 1), 1)
    agree(kit, rig, rows, "a hidden slot was multiplied by a weight of 0, and 0 times NaN is NaN: leave it out instead")


# -- heads and dims ----------------------------------------------------------------------------------------------------


def _allows(group: int) -> pytest.MarkDecorator:
    return pytest.mark.applies.with_args(lambda can: can.max_group is None or group <= can.max_group)


@pytest.mark.law("heads: query head h reads KV head floor(h * kv_heads / q_heads)")
@pytest.mark.parametrize("group", [pytest.param(group, marks=_allows(group)) for group in GROUPS])
def test_heads_of_a_group(kit: Kit, group: int) -> None:
    layer = kit.layer(kv_heads=3, q_heads=3 * group)
    rig = kit.rig(layer)
    seq = rig.sequence(rig.block_size + 1)
    q, k, v = seq.qkv(layer)
    numbered = torch.arange(3, dtype=v.dtype)[None, :, None].expand_as(v).contiguous()
    seq.give(layer, q, k, numbered)
    out = rig.step((seq, seq.length, seq.length))
    wanted = torch.arange(3).repeat_interleave(group)[None, :, None].expand(out.shape)
    kit.check(rig, out, wanted.numpy(), mistake="KV heads must be interleaved (0 0 1 1), not repeated (0 1 0 1)")


def _two_dims(can: Capabilities) -> bool:
    return len(sizes(can.head_dims, HEAD_DIMS)) > 1


@pytest.mark.applies.with_args(_two_dims)
@pytest.mark.law("dims: k_dim and v_dim may differ, both ways")
@pytest.mark.parametrize("larger", ["k", "v"])
def test_key_and_value_dims_differ(kit: Kit, larger: str) -> None:
    low, high, *_ = sorted(sizes(kit.can.head_dims, HEAD_DIMS))
    k_dim, v_dim = (high, low) if larger == "k" else (low, high)
    rig = kit.rig(kit.layer(k_dim=k_dim, v_dim=v_dim))
    agree(kit, rig, [*written(rig, rig.block_size + 1), *prefills(rig, 3)], "one dim was taken for both")


@pytest.mark.law("scale: scores are multiplied by the layer's scale, whatever it is")
@pytest.mark.parametrize("scale", [1.0, 0.03])
def test_scale_is_the_layers(kit: Kit, scale: float) -> None:
    rig = kit.rig(kit.layer(scale=scale))
    agree(kit, rig, [*written(rig, rig.block_size + 1), *prefills(rig, 3)], "head_dim ** -0.5 was used instead")


@pytest.mark.law("softmax: scores far above or below zero neither overflow nor vanish")
@pytest.mark.parametrize("score", [300.0, -300.0])
def test_scores_far_from_zero(kit: Kit, score: float) -> None:
    """All scores are equal, so that the result is a plain mean and no rounding of the scores shows."""
    rig = kit.rig()
    layer = rig.layer()
    rows = prefills(rig, rig.block_size + 1, 3)
    for seq, *_ in rows:
        q, k, v = seq.qkv(layer)
        seq.give(layer, torch.full_like(q, score / (layer.scale * layer.k_dim)), torch.ones_like(k), v)
    agree(kit, rig, rows, "take the largest score off before the exponential")


# -- features of a layer -----------------------------------------------------------------------------------------------


@pytest.mark.needs("window")
@pytest.mark.law("window: key i is visible iff i > p - window")
@pytest.mark.parametrize("make", [written, prefills], ids=["decode", "prefill"])
@pytest.mark.parametrize("blocks", [0, 1, 1.5, 9], ids=["one-token", "one-block", "mid-block", "beyond"])
def test_window(kit: Kit, make: Make, blocks: float) -> None:
    rig = kit.rig(kit.layer(window=max(1, int(blocks * kit.block_size))))
    size = rig.block_size
    agree(kit, rig, make(rig, 3 * size + 1, size, 1), "the window is off by one, or ignored")


@pytest.mark.needs("softcap")
@pytest.mark.law("softcap: s becomes softcap * tanh(s / softcap), rescaled after the tanh")
def test_softcap(kit: Kit) -> None:
    rig = kit.rig(kit.layer(softcap=2.5, scale=1.0))
    rows = [*written(rig, rig.block_size + 1), *prefills(rig, rig.block_size + 2)]
    agree(kit, rig, rows, "the result of tanh was not multiplied by softcap again, or the cap came before the scale")


@pytest.mark.needs("sinks")
@pytest.mark.law("sinks: exp(sink) of a query head is added to its softmax denominator")
def test_sinks(kit: Kit) -> None:
    rig = kit.rig(kit.layer(sinks=True))
    rows = [*written(rig, rig.block_size + 1, 1), *prefills(rig, 3)]
    agree(kit, rig, rows, "the sink was scaled, taken for another head, or left out")


@pytest.mark.needs("alibi")
@pytest.mark.law("alibi: slope * (i - p) of a query head is added to each score")
def test_alibi(kit: Kit) -> None:
    rig = kit.rig(kit.layer(alibi=True))
    rows = [*written(rig, rig.block_size + 1, 1), *prefills(rig, 3)]
    agree(kit, rig, rows, "the slope was taken for another head, scaled, or counted from another position")


@pytest.mark.needs("non_causal")
@pytest.mark.law("non-causal: every query sees the whole context")
def test_non_causal(kit: Kit) -> None:
    rig = kit.rig(kit.layer(causal=False))
    rows = [*prefills(rig, rig.block_size + 1), *prefills(rig, 3)]
    agree(kit, rig, rows, "later keys were hidden although the layer is not causal")


@pytest.mark.needs("non_causal")
@pytest.mark.law("no visible key: the output is zero")
def test_nothing_visible(kit: Kit) -> None:
    layer = kit.layer(causal=False)
    rig = kit.rig(layer)
    batch = rig.batch([(rig.sequence(1), 1, 1)], write=False)
    batch.ctx_len[:] = 0
    plan = rig.backend.plan(rig.pool, 0, batch)
    out = rig.call(plan, layer, rig.to_device(rig.random(1, layer.q_heads, layer.k_dim)))
    kit.check(rig, out, 0 * out, tolerance=1e-30, mistake="a query over an empty context divided 0 by 0 or read a key")


@pytest.mark.needs("kv_sharing")
@pytest.mark.law("kv_sharing: a layer with kv_of attends over the other layer's cache")
def test_layer_reads_the_cache_of_another(kit: Kit) -> None:
    layers = (kit.layer(0), kit.layer(1), kit.layer(2, kv_of=0))
    rig = kit.rig(*layers)
    rows = [*written(rig, rig.block_size + 1), *prefills(rig, 3)]
    plan = rig.plan(*rows)
    for layer in layers:
        out = rig.attend(plan, rows, layer)
        kit.check(rig, out, rig.expected(*rows, layer=layer.index), mistake="it read another cache than kv_of names")


@pytest.mark.needs("multi_token_decode")
@pytest.mark.law("multi_token_decode: decode rows hold 1..decode_q query tokens, mixed in one batch")
def test_several_tokens_in_a_decode_row(kit: Kit) -> None:
    rig = kit.rig()
    size = rig.block_size
    shapes = [(size + 1, 3), (size, 1), (2 * size, 2), (size, size)]
    rows = [(rig.sequence(length), length, min(count, length)) for length, count in shapes]
    for seq, length, count in rows:
        rig.write(seq, 0, length - count)
    out = rig.step(*rows, num_decode=3, decode_q=3)
    kit.check(rig, out, rig.expected(*rows), mistake="a decode row was taken to have one token, or decode_q of them")


@pytest.mark.law("older context: a query sees keys up to its own position, not those written later")
def test_attend_only_at_an_older_context(kit: Kit) -> None:
    rig = kit.rig()
    seq = rig.sequence(3 * rig.block_size)
    rig.write(seq, 0, seq.length)
    rows = [(seq, context, count) for context, count in ((rig.block_size + 1, 1), (1, 1), (seq.length - 1, 2))]
    out = rig.step(*rows, write=False)
    kit.check(rig, out, rig.expected(*rows), mistake="keys past ctx_len, or past the query's position, were read")


@pytest.mark.law("dtype: out has the pool's dtype, and q, k and v keep their values")
def test_inputs_are_never_written(kit: Kit) -> None:
    layer = kit.layer()
    rig = kit.rig(layer)
    rows = prefills(rig, rig.block_size + 1)
    given = rig.qkv(rows, layer)
    before = [rig.to_array(tensor) for tensor in given]
    out = rig.empty_out(rows[0][2], layer)
    rig.backend.attend(rig.plan(*rows), layer.index, *given, out)
    kit.check(rig, rig.to_array(out), rig.expected(*rows))
    assert out.dtype == TORCH[rig.spec.dtype], f"out became {out.dtype}"
    for name, tensor, old in zip("qkv", given, before, strict=True):
        assert (rig.to_array(tensor) == old).all(), f"attend wrote into {name}: scale a copy instead"
