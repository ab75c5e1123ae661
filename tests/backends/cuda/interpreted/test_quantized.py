"""Quantized caches on Triton's kernels, from the pool and `bind` down: codes, scales, steps and recordings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.api import GroupSpec, LayerSpec, Limits, PoolSpec
from pagedkv.api.extensions import GraphShape
from pagedkv.conformance import quantized
from pagedkv.conformance.quantized import QUANTIZED, TOKEN_HEAD
from pagedkv.conformance.rig import Rig
from tests.backends.cuda.double import double

E4M3 = "fp8_e4m3fn/tensor"


def rig(kv_dtype, *, dtype="fp32", block_size=16, backend=None, placement="device", **layer):
    fields = {"q_heads": 4, "kv_heads": 2, "k_dim": 64, "v_dim": 64, "scale": 0.125}
    one = LayerSpec(index=0, **(fields | layer))
    group = GroupSpec(layers=(one,), block_size=block_size, kv_dtype=kv_dtype)
    limits = Limits(rows=4, tokens=64, context=128)
    spec = PoolSpec(groups=(group,), num_blocks=8, dtype=dtype, limits=limits, placement=placement)
    made = Rig(backend or double("triton"), spec)
    made.bind(one)
    return made


def written(made, length, queries):
    """A row whose earlier tokens are in the cache."""
    seq = made.sequence(length)
    made.write(seq, 0, length - queries)
    return seq, length, queries


@pytest.mark.parametrize(
    ("kv_dtype", "capability"),
    [(TOKEN_HEAD, (9, 0)), (E4M3, (8, 0)), (E4M3, (9, 0)), ("fp8_e5m2/tensor", (8, 0))],
    ids=["int8", "e4m3 by hand", "e4m3 by the processor", "e5m2"],
)
def test_prefill_and_decode_in_one_batch(kv_dtype, capability):
    """On 9.0 by descriptors."""
    backend = double("triton", capability=capability)
    made = rig(kv_dtype, backend=backend, block_size=64, window=24, sinks=True)
    rows = [written(made, 66, 1), written(made, 5, 5)]
    assert np.abs(made.step(*rows) - made.expected(*rows)).max() < 1e-5


def test_16_bit_queries_and_a_head_dim_that_is_no_power_of_two():
    made = rig(TOKEN_HEAD, dtype="fp16", k_dim=80, v_dim=40)
    rows = [written(made, 18, 1), written(made, 5, 5)]
    assert np.abs(made.step(*rows) - made.expected(*rows)).max() < 2e-3


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_codes_and_scales_are_those_of_the_contract(kv_dtype):
    made = rig(kv_dtype, v_dim=24)
    seq = made.sequence(17)
    made.write(seq, 0, 17)
    found = made.pool.layer(0)
    block, slot = np.array(seq.blocks)[np.arange(17) // 16], np.arange(17) % 16
    halves = ((found.keys, found.k_scale, "k_scale"), (found.values, found.v_scale, "v_scale"))
    for (cache, scale, name), x in zip(halves, seq.qkv(made.layer())[1:], strict=True):
        wanted = made.scale(made.layer(), name, x)
        codes = (cache if kv_dtype == TOKEN_HEAD else cache.view(torch.uint8)).numpy()[block, :, slot]
        assert np.array_equal(codes, quantized.codes(kv_dtype, x.numpy(), wanted))
        if kv_dtype == TOKEN_HEAD:
            assert np.array_equal(scale.numpy()[block, :, slot], wanted)


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_nan_is_read_as_what_is_not_finite(kv_dtype):
    """Decoded by hand: the interpreter takes e4m3's NaN for 480."""
    made = rig(kv_dtype, backend=double("triton", capability=(8, 0)))
    seq = made.sequence(1)
    q, k, v = seq.qkv(made.layer())
    v[0, 0, 3] = float("nan")
    seq.give(made.layer(), q, k, v)
    out = made.step((seq, 1, 1))
    assert not np.isfinite(out[0, :2, 3]).any() and np.isfinite(out[0, 2:]).all()


@pytest.mark.parametrize("kv_dtype", [TOKEN_HEAD, E4M3])
def test_a_graph_follows_its_plan_and_what_is_bound(kv_dtype):
    made = rig(kv_dtype)
    graphs = made.backend.extension("graph")
    plan = graphs.static_plan(made.pool, 0, GraphShape(rows=2, tokens=2, max_ctx=128))
    q, k, v = (torch.zeros(2, heads, 64) for heads in (4, 2, 2))
    out = torch.full((2, 4, 64), float("nan"))
    graph = graphs.capture(lambda: made.backend.attend(plan, 0, q, k, v, out), [plan])
    for seed in (1, 2):
        made.bind(made.layer(), seed)
        rows = [written(made, 18, 1)]
        for target, values in zip((q, k, v), made.qkv(rows, made.layer()), strict=True):
            target[:1] = values
        graphs.refresh(plan, made.batch(rows, pad_rows=1, pad_slots=1))
        graph.replay()
        assert np.abs(out[:1].double().numpy() - made.expected(*rows)).max() < 1e-5


def test_blocks_go_to_the_host_and_come_back_with_their_scales():
    made = rig(TOKEN_HEAD)
    host = rig(TOKEN_HEAD, backend=made.backend, placement="host")
    seq = made.sequence(16)
    made.write(seq, 0, 16)
    made.backend.wait(made.copy([(seq.blocks[0], 3)], host))
    moved = seq.moved(made.sequence(16).blocks)
    made.backend.wait(host.copy([(3, moved.blocks[0])], made))
    assert np.abs(made.read(moved) - made.expected((seq, 16, 16))).max() < 1e-5
