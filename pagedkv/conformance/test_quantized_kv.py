"""Quantized caches: what is stored under which scale, what is read back, and scales wherever their blocks go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import GroupSpec, LayerSpec, Limits
from pagedkv.api.errors import BackendError, ContractViolation
from pagedkv.api.extensions import GraphShape, canonical_fingerprint
from pagedkv.conformance import quantized
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.lattice import BLOCK_SIZES, HEAD_DIMS, PLAIN, combines, sizes
from pagedkv.conformance.oracle import Floats, attention
from pagedkv.conformance.quantized import FLOAT8, QUANTIZED, SCALES, TOKEN_HEAD
from pagedkv.conformance.refusals import refuses
from pagedkv.conformance.rig import TORCH, Rig, Row, Seq

pytestmark = pytest.mark.level("quantized_kv")

DTYPES = ("fp32", "bf16", "fp16")
EXACT = 2e-6
"""Of numbers about 1: what a product of code and scale in float32 may be off."""
SCALE = 0.25
"""A bound scale under which quotients are exact."""


def _stored_as(kv_dtype: str) -> Any:
    """The parameter of a case that applies where this KV dtype is declared."""
    applies = pytest.mark.applies.with_args(lambda can: any(combines(can, dtype, kv_dtype) for dtype in can.dtypes))
    return pytest.param(kv_dtype, marks=applies)


each = pytest.mark.parametrize("kv_dtype", [_stored_as(name) for name in QUANTIZED])
each_bound = pytest.mark.parametrize("kv_dtype", [_stored_as(name) for name in FLOAT8])
each_made = pytest.mark.parametrize("kv_dtype", [_stored_as(TOKEN_HEAD)])


def rig_of(kit: Kit, kv_dtype: str, *layers: LayerSpec, **changes: Any) -> Rig:
    """A rig of this KV dtype, its dtype the kit's where that goes together."""
    dtypes = [kit.dtype, *kit.can.dtypes]
    dtype = next(name for name in dtypes if combines(kit.can, name, kv_dtype))
    return kit.rig(*layers, **{"dtype": dtype, "kv_dtype": kv_dtype} | changes)


def with_scale(rig: Rig, scale: float = SCALE) -> Rig:
    """One scale for everything, where scales are bound."""
    for layer in rig.group.layers:
        if rig.group.kv_dtype in FLOAT8 and layer.kv_of is None:
            rig.bind_scales(layer, dict.fromkeys(SCALES, scale))
    return rig


def values_read(rig: Rig, rows: torch.Tensor, *, written: bool = True) -> Floats:
    """What is read of value rows [n, kv_heads, dim], each the only token of a sequence: weight 1, no error of sums."""
    layer = rig.layer()
    seqs = [rig.sequence(1) for _ in rows]
    for seq, row in zip(seqs, rows, strict=True):
        q, k, _ = seq.qkv(layer)
        seq.give(layer, q, torch.zeros_like(k), row[None].to(TORCH[rig.spec.dtype]))
    out = rig.step(*((seq, 1, 1) for seq in seqs), write=written)
    return out[:, :: layer.q_heads // layer.kv_heads]


def written_row(rig: Rig, row: torch.Tensor) -> Seq:
    """A sequence of one token with these values [1, kv_heads, dim], appended and not read."""
    seq, layer = rig.sequence(1), rig.layer()
    q, k, _ = seq.qkv(layer)
    seq.give(layer, q, torch.zeros_like(k), row)
    rig.write(seq, 0, 1)
    return seq


def _extension(rig: Rig, name: str) -> Any:
    return rig.backend.extension(name)


def one_row(rig: Rig, numbers: Sequence[float]) -> torch.Tensor:
    """A row [1, kv_heads, dim] that holds these numbers in each head, zeros behind."""
    layer = rig.layer()
    row = torch.zeros(1, layer.kv_heads, layer.v_dim)
    row[..., : len(numbers)] = torch.tensor(numbers)
    return row


# -- which -------------------------------------------------------------------------------------------------------------


@pytest.mark.law("quantized_kv: a declared KV dtype is one of the contract's")
@pytest.mark.applies.with_args(lambda can: any(name not in PLAIN for name in can.kv_dtypes))
def test_known_words(kit: Kit) -> None:
    unknown = [name for name in kit.can.kv_dtypes if name not in (*PLAIN, *QUANTIZED)]
    assert not unknown, f"nothing says what {', '.join(unknown)} stores; the contract has {', '.join(QUANTIZED)}"


# -- numbers -----------------------------------------------------------------------------------------------------------


@each
@pytest.mark.law("quantized_kv: attention over codes and scales agrees with the float64 oracle")
@pytest.mark.parametrize("form", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [False, True], ids=["plain", "features"])
def test_numbers(kit: Kit, kv_dtype: str, dtype: str, form: str, special: bool) -> None:
    if not combines(kit.can, dtype, kv_dtype):
        return
    rig = kit.rig(_layer(kit, special), dtype=dtype, kv_dtype=kv_dtype)
    rows = _rows(rig, form)
    kit.check(rig, rig.step(*rows), rig.expected(*rows), mistake="codes without their scales, or other tokens' scales")


def _layer(kit: Kit, special: bool) -> LayerSpec:
    """A plain layer, or one with every declared feature."""
    if not special:
        return kit.layer()
    wanted: dict[str, Any] = {"window": kit.block_size + 2, "softcap": 3.0, "sinks": True, "alibi": True}
    return kit.layer(**{name: value for name, value in wanted.items() if kit.has(name)})


def _rows(rig: Rig, form: str) -> list[Row]:
    size = rig.block_size
    fresh = [(rig.sequence(2 * size + 1), 2 * size + 1, 2 * size + 1), (rig.sequence(1), 1, 1)]
    if form == "prefill":
        return fresh
    older = [rig.sequence(3 * size + 1), rig.sequence(size), rig.sequence(size + 1)]
    for seq in older:
        rig.write(seq, 0, seq.length - 1)
    return [*((seq, seq.length, 1) for seq in older), *(fresh if form == "mixed" else [])]


@each
@pytest.mark.law("quantized_kv: every declared block size and head dim")
def test_sizes(kit: Kit, kv_dtype: str) -> None:
    block_sizes = sizes(kit.can.block_sizes, BLOCK_SIZES, [kit.can.preferred_block_size])
    pairs = [(size, kit.head_dim) for size in block_sizes]
    pairs += [(kit.block_size, dim) for dim in sizes(kit.can.head_dims, HEAD_DIMS, [64, 80, 128])]
    for size, dim in pairs:
        layer = kit.layer(k_dim=dim, v_dim=dim)
        limits = Limits(rows=4, tokens=2 * size + 8, context=2 * size + 8)
        rig = rig_of(kit, kv_dtype, layer, block_size=size, num_blocks=8, limits=limits)
        older = rig.sequence(size + 1)
        rig.write(older, 0, size)
        rows = [(older, size + 1, 1), (rig.sequence(3), 3, 3)]
        kit.check(rig, rig.step(*rows), rig.expected(*rows), mistake=f"blocks of {size}, head dim {dim}")
        rig.close()


@each
@pytest.mark.law("quantized_kv: values are read as stored, never the raw argument")
def test_values_are_read_as_stored(kit: Kit, kv_dtype: str) -> None:
    rig = rig_of(kit, kv_dtype)
    layer, seq = rig.layer(), rig.sequence(1)
    raw = seq.qkv(layer)[2]
    out = rig.step((seq, 1, 1))  # one visible key: the output is its value, without any error of the attention
    wanted = rig.expected((seq, 1, 1))
    lost = np.abs(raw.double().numpy() - rig.stored(layer, "v_scale", raw)).max()
    assert lost > 100 * EXACT, "the case itself rounds nothing"
    limit = max(EXACT * np.abs(wanted).max(), torch.finfo(TORCH[rig.spec.dtype]).eps)
    kit.check(rig, out, wanted, tolerance=limit, mistake="v was used before it was quantized")


@each
@pytest.mark.law("quantized_kv: keys are read as stored, never the raw argument")
def test_keys_are_read_as_stored(kit: Kit, kv_dtype: str) -> None:
    rig = rig_of(kit, kv_dtype)
    layer, seq = rig.layer(), rig.sequence(rig.block_size + 1)
    q, k, v = seq.qkv(layer)
    seq.give(layer, 4 * q, k, v)  # so that what the keys lose shows
    row = (seq, seq.length, seq.length)
    raw, _ = attention(layer, 4 * q.double().numpy(), k.double().numpy(), rig.stored(layer, "v_scale", v))
    limit = 4 * rig.tolerance
    assert np.abs(raw - rig.expected(row)).max() > 2 * limit, "the case itself rounds nothing"
    kit.check(rig, rig.step(row), rig.expected(row), tolerance=limit, mistake="k was used before it was quantized")


@each
@pytest.mark.law("quantized_kv: halfway between two codes the even one is stored")
def test_ties_go_to_even(kit: Kit, kv_dtype: str) -> None:
    rig = with_scale(rig_of(kit, kv_dtype))
    count = min(8, rig.layer().v_dim - 1)
    if kv_dtype == TOKEN_HEAD:  # the largest makes the scale 1/64
        ties, scale = [(i + 0.5) / 64 for i in range(count)], 1 / 64
        row, nearest = one_row(rig, [*ties, 127 / 64]), [float(2 * ((i + 1) // 2)) for i in range(count)]
    else:  # between 1 and 2 neighbours are a step apart, and 1 is even
        step, scale = 2.0 ** -FLOAT8[kv_dtype].mantissa, SCALE
        picked = range(min(count, 2 ** FLOAT8[kv_dtype].mantissa))
        row = one_row(rig, [scale * (1 + (i + 0.5) * step) for i in picked])
        nearest = [1 + 2 * ((i + 1) // 2) * step for i in picked]
    wanted = scale * np.array(nearest)
    out = values_read(rig, torch.cat([row, -row]))[..., : len(nearest)]
    expected = np.broadcast_to(np.array([1, -1])[:, None, None] * wanted, out.shape)
    kit.check(rig, out, expected, tolerance=EXACT, mistake="ties are not rounded to even")


@each
@pytest.mark.law("quantized_kv: a row of zeros is read as zeros")
def test_zeros(kit: Kit, kv_dtype: str) -> None:
    rig = rig_of(kit, kv_dtype)
    out = values_read(rig, torch.zeros(2, rig.layer().kv_heads, rig.layer().v_dim))
    assert (out == 0).all(), f"zeros were stored and {out.ravel()[np.argmax(out.ravel() != 0)]} is read: 0 / 0?"


@each_bound
@pytest.mark.law("quantized_kv: what is too large is stored as the largest finite number, infinity too")
def test_saturation(kit: Kit, kv_dtype: str) -> None:
    rig = with_scale(rig_of(kit, kv_dtype))
    most = SCALE * quantized.largest(kv_dtype)
    row = one_row(rig, [1.03 * most, 3 * most, float("inf"), -3 * most, -float("inf")])
    out = values_read(rig, row)[..., :5]
    wanted = np.broadcast_to(most * np.array([1, 1, 1, -1, -1]), out.shape)
    kit.check(rig, out, wanted, tolerance=most * 1e-2, mistake="an overflow must saturate, not become NaN or wrap")


@each
@pytest.mark.law("quantized_kv: NaN is read as what is not finite, never as a number")
def test_nan_stays(kit: Kit, kv_dtype: str) -> None:
    rig = with_scale(rig_of(kit, kv_dtype))
    row = one_row(rig, [1.0, float("nan"), 0.5])
    out = values_read(rig, row)
    assert not np.isfinite(out[..., 1]).any(), "NaN was stored as a number: what went wrong before is hidden"


@each_made
@pytest.mark.law("quantized_kv: each token and KV head has a scale of its own, keys and values apart")
def test_scales_of_tokens_and_heads(kit: Kit, kv_dtype: str) -> None:
    rig = rig_of(kit, kv_dtype)
    layer = rig.layer()
    sizes_ = torch.tensor([10.0**e for e in (-3, 2, -1, 0, 1, -2)])
    rows = torch.randn(6, layer.kv_heads, layer.v_dim, generator=torch.Generator().manual_seed(3))
    rows *= sizes_[:, None, None] * torch.tensor([1.0, 30.0])[None, : layer.kv_heads, None]
    rows = rig.settled(layer, "v_scale", rows.to(TORCH[rig.spec.dtype]))
    out, wanted = values_read(rig, rows), rig.stored(layer, "v_scale", rows)
    top = np.abs(wanted).max(-1, keepdims=True)
    limit = max(EXACT, torch.finfo(TORCH[rig.spec.dtype]).eps)
    mistake = "a scale is shared by tokens, by heads, or by keys and values"
    kit.check(rig, out / top, wanted / top, tolerance=limit, mistake=mistake)


@each
@pytest.mark.law("quantized_kv: a slot of -1 stores neither codes nor scale, and other slots keep theirs")
def test_padding_is_not_stored(kit: Kit, kv_dtype: str) -> None:
    rig = rig_of(kit, kv_dtype, num_blocks=6)
    size, layer = rig.block_size, rig.layer()
    kept, seq = rig.sequence(2 * size, [5, 2]), rig.sequence(1, [3])
    rig.write(kept, 0, kept.length)
    before = rig.read(kept)
    _, k, v = seq.qkv(layer)
    wild = torch.full((1, *k.shape[1:]), float("nan"), dtype=k.dtype)
    plan = rig.plan(slots=np.array([-1, 3 * size, -1], np.int64))
    k, v = (rig.to_device(torch.cat([wild, tensor, 1e3 + 0 * tensor])) for tensor in (k, v))
    rig.backend.attend(plan, 0, None, k, v, None)
    kit.same(rig, rig.read(kept), before, mistake="padding changed codes or scales of a slot")
    kit.check(rig, rig.read(seq), rig.expected((seq, 1, 1)))
    null = rig.read(rig.sequence(size, [0]))
    assert (null == 0).all(), "padding was stored in block 0"


# -- blocks ------------------------------------------------------------------------------------------------------------


def _uneven(rig: Rig, tokens: int, blocks: Sequence[int] | None = None) -> Seq:
    """A written sequence whose tokens are of very different sizes."""
    seq = rig.sequence(tokens, blocks)
    for layer in rig.group.layers:
        if layer.kv_of is None:
            q, k, v = seq.qkv(layer)
            size = torch.logspace(-1, 1, tokens)[:, None, None].to(k.dtype)
            k, v = (rig.settled(layer, name, x * size) for name, x in zip(SCALES, (k, v), strict=True))
            seq.give(layer, q, k, v)
    rig.write(seq, 0, tokens)
    return seq


def _groups(kit: Kit, kv_dtype: str) -> list[GroupSpec]:
    first = GroupSpec(layers=(kit.layer(0), kit.layer(1)), block_size=kit.block_size, kv_dtype=kv_dtype)
    return [first, dataclasses.replace(first, layers=(kit.layer(2, kv_heads=1),))]


@each
@pytest.mark.law("quantized_kv: a copied block is read bit for bit as its source, its scales went with it")
@pytest.mark.parametrize("way", ["within", pytest.param("host", marks=pytest.mark.placement("host"))])
def test_copies_take_the_scales(kit: Kit, kv_dtype: str, way: str) -> None:
    rig = rig_of(kit, kv_dtype, groups=_groups(kit, kv_dtype))
    size = rig.block_size
    seq, other = _uneven(rig, 2 * size), _uneven(rig, 2 * size)
    before = [rig.read(seq, layer.index) for layer in rig.group.layers]
    if way == "host":
        host = rig_of(kit, kv_dtype, groups=_groups(kit, kv_dtype), placement="host", num_blocks=6)
        rig.backend.wait(rig.copy([(block, i + 1) for i, block in enumerate(seq.blocks)], host))
        rig.backend.wait(host.copy([(i + 1, block) for i, block in enumerate(other.blocks)], rig))
    else:
        rig.backend.wait(rig.copy(list(zip(seq.blocks, other.blocks, strict=True))))
    moved = seq.moved(other.blocks)
    for layer, wanted in zip(rig.group.layers, before, strict=True):
        mistake = f"layer {layer.index}: codes or scales stayed behind"
        kit.same(rig, rig.read(moved, layer.index), wanted, mistake=mistake)
        row = (moved, moved.length, moved.length)
        kit.check(rig, rig.read(moved, layer.index), rig.expected(row, layer=layer.index), tolerance=20 * rig.tolerance)


@each
@pytest.mark.law("quantized_kv: block 0 is read as zero, and clears a block with its scales")
def test_null_block(kit: Kit, kv_dtype: str) -> None:
    rig = rig_of(kit, kv_dtype)
    seq = _uneven(rig, rig.block_size)
    rig.clear(seq.blocks)
    for blocks, what in (([0], "block 0"), (seq.blocks, "a block that was cleared")):
        out = rig.read(rig.sequence(rig.block_size, blocks))
        assert (out == 0).all(), f"{what} is not read as zero"


@each
@pytest.mark.law("quantized_kv: starting from cached blocks gives what a full prefill gives, and so do chunks")
def test_prefix_hit(kit: Kit, kv_dtype: str) -> None:
    rig = rig_of(kit, kv_dtype)
    size = rig.block_size
    parent = rig.sequence(2 * size + 1)
    rig.write(parent, 0, parent.length)
    child = rig.fork(parent, 2 * size, 3 * size + 1)
    hit = rig.step((child, child.length, size + 1))
    alone = child.moved(rig.sequence(child.length).blocks)
    full = rig.step((alone, child.length, child.length))
    kit.check(rig, hit, full[2 * size :], mistake="cached blocks are read under other scales than fresh ones")
    chunks = child.moved(rig.sequence(child.length).blocks)
    parts = [rig.step((chunks, end, n)) for end, n in ((size + 1, size + 1), (child.length, 2 * size))]
    kit.check(rig, np.concatenate(parts), full, mistake="a chunk's keys were used before they were quantized")


@each
@pytest.mark.needs("kv_sharing")
@pytest.mark.law("quantized_kv: a layer that reads another one's cache reads it under that one's scales")
def test_shared_cache(kit: Kit, kv_dtype: str) -> None:
    rig = rig_of(kit, kv_dtype, kit.layer(0), kit.layer(1, kv_of=0))
    seq = rig.sequence(rig.block_size + 1)
    rig.write(seq, 0, seq.length)
    wanted = rig.expected((seq, seq.length, seq.length), layer=1)
    kit.check(rig, rig.read(seq, 1), wanted, mistake="the scales of the layer that owns the cache were not used")


@each
@pytest.mark.law("quantized_kv: pool_cost includes the scales that lie in the blocks")
@pytest.mark.parametrize("placement", [pytest.param(p, marks=pytest.mark.placement(p)) for p in ("device", "host")])
def test_cost(kit: Kit, kv_dtype: str, placement: str) -> None:
    for heads, size in ((1, kit.block_size), (4, kit.can.preferred_block_size)):
        layer = kit.layer(kv_heads=heads)
        dtype = next(name for name in kit.can.dtypes if combines(kit.can, name, kv_dtype))
        spec = kit.spec(layer, dtype=dtype, kv_dtype=kv_dtype, block_size=size, placement=placement)
        scales = 2 * 4 if kv_dtype == TOKEN_HEAD else 0
        least, cost = size * heads * (layer.k_dim + layer.v_dim + scales), kit.backend.pool_cost(spec)
        assert cost.per_block >= least, f"per_block {cost.per_block}: codes and scales take {least} bytes"


# -- bound scales ------------------------------------------------------------------------------------------------------


@each_bound
@pytest.mark.law("quantized_kv: scales are 1 until they are bound")
def test_scale_before_bind(kit: Kit, kv_dtype: str) -> None:
    dtype = next(name for name in (kit.dtype, *kit.can.dtypes) if combines(kit.can, name, kv_dtype))
    rig = Rig(kit.backend, kit.spec(dtype=dtype, kv_dtype=kv_dtype))
    try:
        rows = [(rig.sequence(3), 3, 3)]
        kit.check(rig, rig.step(*rows), rig.expected(*rows), mistake="an unbound scale is 1")
    finally:
        rig.close()


@each_bound
@pytest.mark.law("quantized_kv: a bound scale is one number, or one for each KV head; each layer has its own")
@pytest.mark.parametrize("form", ["scalar", "per head", "one of both"])
def test_bound_scales(kit: Kit, kv_dtype: str, form: str) -> None:
    rig = rig_of(kit, kv_dtype, kit.layer(0), kit.layer(1))
    names = SCALES[:1] if form == "one of both" else SCALES
    for layer in rig.group.layers:
        first = 0.03 * (1 + layer.index)
        heads = [first * 2**i for i in range(layer.kv_heads)]
        rig.bind_scales(layer, dict.fromkeys(names, first if form == "scalar" else heads))
    seq = rig.sequence(rig.block_size + 1)
    rig.write(seq, 0, seq.length)
    for layer in rig.group.layers:
        wanted = rig.expected((seq, seq.length, seq.length), layer=layer.index)
        mistake = "another layer's or head's scale, or k_scale for v_scale"
        kit.check(rig, rig.read(seq, layer.index), wanted, mistake=mistake)


@each_bound
@pytest.mark.law("quantized_kv: a scale bound again counts from then on, for what is appended and what is read")
def test_bound_again(kit: Kit, kv_dtype: str) -> None:
    rig = with_scale(rig_of(kit, kv_dtype))
    layer = rig.layer()
    row = rig.settled(layer, "v_scale", rig.random(1, layer.kv_heads, layer.v_dim))
    first, old = values_read(rig, row), written_row(rig, row)
    with_scale(rig, 2 * SCALE)
    again = rig.read(old)[:, :: layer.q_heads // layer.kv_heads]
    kit.check(rig, again, 2 * first, tolerance=4 * EXACT, mistake="codes are read under the scale of now")
    row = rig.settled(layer, "v_scale", row)
    fresh, wanted = values_read(rig, row), rig.stored(layer, "v_scale", row)
    limit = max(4 * EXACT, 4 * torch.finfo(TORCH[rig.spec.dtype]).eps)
    kit.check(rig, fresh, wanted, tolerance=limit, mistake="an append divides by the scale from before")


@each_bound
@pytest.mark.law("quantized_kv: work enqueued before a bind keeps the scales from before")
def test_bind_is_ordered(kit: Kit, kv_dtype: str) -> None:
    rig = with_scale(rig_of(kit, kv_dtype))
    layer = rig.layer()
    row = rig.settled(layer, "v_scale", rig.random(1, layer.kv_heads, layer.v_dim))
    seq, wanted = written_row(rig, row), 4 * rig.stored(layer, "v_scale", row)
    with_scale(rig, 4 * SCALE)  # nothing waited for the append, whose codes now stand for four times as much
    out = rig.read(seq)[:, :: layer.q_heads // layer.kv_heads]
    limit = max(20 * EXACT, 20 * torch.finfo(TORCH[rig.spec.dtype]).eps)
    kit.check(rig, out, wanted, tolerance=limit, mistake="a bind reached an append that was enqueued before it")


@each_bound
@pytest.mark.extension("graph")
@pytest.mark.law("quantized_kv: a replay appends and reads under the scales of now")
def test_bind_under_a_graph(kit: Kit, kv_dtype: str) -> None:
    rig = with_scale(rig_of(kit, kv_dtype))
    layer, extension = rig.layer(), _extension(rig, "graph")
    plan = extension.static_plan(rig.pool, 0, GraphShape(rows=1, tokens=1, max_ctx=rig.block_size))
    seq = rig.sequence(1)
    q, k, v = rig.qkv([(seq, 1, 1)], layer)
    out = rig.empty_out(1, layer)
    extension.refresh(plan, rig.batch([(seq, 1, 1)]))
    graph = extension.capture(lambda: rig.backend.attend(plan, 0, q, k, v, out), [plan])
    for scale in (SCALE, 4 * SCALE):
        with_scale(rig, scale)
        graph.replay()
        wanted = rig.expected((seq, 1, 1))
        kit.check(rig, rig.to_array(out), wanted, mistake="the scale of the recording is in use")
    graph.close()


@each
@pytest.mark.law("quantized_kv: scales of a wrong shape, not above 0, or that the KV dtype does not bind are refused")
def test_wrong_scales_are_refused(kit: Kit, kv_dtype: str) -> None:
    rig = rig_of(kit, kv_dtype)
    heads = rig.layer().kv_heads
    wrong: list[dict[str, Any]] = [{"q_scale": np.float32(1)}, {"no_such_scale": np.float32(1)}]
    if kv_dtype in FLOAT8:
        shapes = [np.ones(heads + 1), np.ones((heads, 1)), np.zeros(heads), np.full(heads, np.nan), np.full(heads, -1)]
        wrong += [{"k_scale": np.asarray(values, np.float32)} for values in shapes]
        wrong += [{"v_scale": np.ones(heads, np.float32), "no_such_scale": np.float32(1)}]
    else:
        wrong += [{name: np.float32(1)} for name in SCALES]
    for params in wrong:
        with refuses(BackendError, f"bind of {params} to a layer of {kv_dtype}"):
            rig.backend.bind(rig.pool, 0, params)
    rows = [(rig.sequence(3), 3, 3)]
    kit.check(rig, rig.step(*rows), rig.expected(*rows), mistake="a refused bind changed something")


# -- as bytes ----------------------------------------------------------------------------------------------------------


def _canonical(rig: Rig, seq: Seq) -> bytes:
    """Fingerprint, then of each layer keys and values [head, token, dim], then both scales [head, token] or [head]."""
    parts, kv_dtype = [canonical_fingerprint(rig.group)], rig.group.kv_dtype
    for layer in sorted(rig.group.layers, key=lambda layer: layer.index):
        halves = list(zip(SCALES, seq.qkv(layer)[1:], strict=True))
        scales = [rig.scale(layer, name, x) for name, x in halves]
        for (_, x), scale in zip(halves, scales, strict=True):
            parts.append(quantized.codes(kv_dtype, x.float().numpy(), scale).transpose(1, 0, 2).tobytes())
        kept = [scale.T if kv_dtype == TOKEN_HEAD else scale[0] for scale in scales]
        parts += [np.ascontiguousarray(scale, "<f4").tobytes() for scale in kept]
    return b"".join(parts)


@each
@pytest.mark.extension("canonical_kv")
@pytest.mark.law("quantized_kv: exported bytes are codes, then scales behind the values of their layer")
def test_exported_bytes(kit: Kit, kv_dtype: str) -> None:
    rig = rig_of(kit, kv_dtype, kit.layer(4), kit.layer(1, kv_heads=1))
    size = rig.block_size
    seq = rig.sequence(size + 1)
    rig.write(seq, 0, seq.length)
    ids, lengths = np.array(seq.blocks, np.int32), np.array([size, 1], np.int32)
    event, data = _extension(rig, "canonical_kv").export(rig.pool, 0, ids, lengths)
    event.join()
    wanted = np.frombuffer(_canonical(rig, seq), np.uint8)
    assert len(data) == len(wanted), f"{len(data)} bytes, expected {len(wanted)}: codes of a byte, scales of four"
    differ = np.flatnonzero(np.asarray(data) != wanted)
    assert not len(differ), f"byte {differ[:1]} of {len(wanted)} differs: layer by layer keys, values, their scales"


@each
@pytest.mark.extension("canonical_kv")
@pytest.mark.law("quantized_kv: an import brings the scales, and is refused where other ones are bound")
def test_import(kit: Kit, kv_dtype: str) -> None:
    rig = rig_of(kit, kv_dtype, kit.layer(4), kit.layer(1, kv_heads=1))
    size, extension = rig.block_size, _extension(rig, "canonical_kv")
    seq, other = _uneven(rig, size), _uneven(rig, size)
    data = np.frombuffer(_canonical(rig, seq), np.uint8).copy()
    ids, lengths = np.array(other.blocks, np.int32), np.array([size], np.int32)
    rig.backend.wait(extension.import_(rig.pool, 0, ids, lengths, data))
    moved = seq.moved(other.blocks)
    for layer in rig.group.layers:
        before = rig.read(seq, layer.index)
        kit.same(rig, rig.read(moved, layer.index), before, mistake="codes or scales were not brought")
    if kv_dtype in FLOAT8:
        with_scale(rig, 3 * SCALE)
        with refuses(ContractViolation, "an import into layers with other scales bound"):
            extension.import_(rig.pool, 0, ids, lengths, data)
