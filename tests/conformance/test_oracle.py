"""The kit's oracle against torch's attention in float64, and against formulas written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pagedkv.api import LayerSpec
from pagedkv.conformance.oracle import attention


def spec(**changes):
    return LayerSpec(**{"index": 0, "q_heads": 6, "kv_heads": 2, "k_dim": 8, "v_dim": 5, "scale": 0.4, **changes})


def numbers(count, context, layer, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((count, layer.q_heads, layer.k_dim))
    shapes = ((context, layer.kv_heads, dim) for dim in (layer.k_dim, layer.v_dim))
    return q, *(rng.standard_normal(shape) for shape in shapes)


def by_torch(layer, q, keys, values, bias):
    """scaled_dot_product_attention in float64; `bias` [Hq or 1, n, c] is added to the scores."""
    group = layer.q_heads // layer.kv_heads
    heads = [torch.from_numpy(x).transpose(0, 1) for x in (q, keys, values)]
    k, v = (x.repeat_interleave(group, 0) for x in heads[1:])
    return F.scaled_dot_product_attention(heads[0], k, v, attn_mask=bias, scale=layer.scale).transpose(0, 1).numpy()


def mask(count, context, layer):
    seen = torch.zeros(count, context, dtype=torch.bool)
    for j in range(count):
        for i in range(context):
            p = context - count + j
            seen[j, i] = (i <= p or not layer.causal) and (layer.window is None or i > p - layer.window)
    return torch.zeros(count, context, dtype=torch.float64).masked_fill(~seen, -math.inf)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": False},
        {"window": 1},
        {"window": 4},
        {"window": 99},
        {"causal": False, "window": 3},
        {"kv_heads": 6},
    ],
    ids=str,
)
@pytest.mark.parametrize(("count", "context"), [(1, 1), (1, 17), (17, 17), (5, 17)])
def test_it_agrees_with_torch(changes, count, context):
    layer = spec(**changes)
    q, keys, values = numbers(count, context, layer)
    out, _ = attention(layer, q, keys, values)
    np.testing.assert_allclose(out, by_torch(layer, q, keys, values, mask(count, context, layer)), atol=1e-13)


def test_alibi_is_a_bias_that_grows_with_the_distance():
    layer, slopes = spec(alibi=True), np.linspace(0.1, 0.6, 6)
    q, keys, values = numbers(3, 9, layer)
    distance = torch.tensor([[i - (6 + j) for i in range(9)] for j in range(3)], dtype=torch.float64)
    bias = torch.from_numpy(slopes)[:, None, None] * distance + mask(3, 9, layer)
    out, _ = attention(layer, q, keys, values, alibi=slopes)
    np.testing.assert_allclose(out, by_torch(layer, q, keys, values, bias), atol=1e-13)


def test_softcap_and_sinks_by_hand():
    """One query, two keys: s = c tanh(scale q.k / c); the sink is a third term below the line that carries no value."""
    layer = LayerSpec(index=0, q_heads=1, kv_heads=1, k_dim=1, v_dim=1, scale=0.5, softcap=2.0, sinks=True)
    out, lse = attention(layer, *(np.reshape(x, (-1, 1, 1)) for x in ([4.0], [3.0, -1.0], [10.0, 20.0])), sinks=[0.7])
    a, b = math.exp(2 * math.tanh(6.0 / 2)), math.exp(2 * math.tanh(-2.0 / 2))
    total = a + b + math.exp(0.7)
    assert out[0, 0, 0] == pytest.approx((10 * a + 20 * b) / total, abs=1e-14)
    assert lse[0, 0] == pytest.approx(math.log(total), abs=1e-14)


def test_lse_merges_two_halves_into_the_whole():
    layer = spec(causal=False)
    q, keys, values = numbers(4, 20, layer)
    (whole, lse), (a, lse_a), (b, lse_b) = (
        attention(layer, q, keys[part], values[part]) for part in (slice(0, 20), slice(0, 8), slice(8, 20))
    )
    merged = np.logaddexp(lse_a, lse_b)
    np.testing.assert_allclose(merged, lse, atol=1e-13)
    weights = [np.exp(one - merged)[..., None] for one in (lse_a, lse_b)]
    np.testing.assert_allclose(weights[0] * a + weights[1] * b, whole, atol=1e-13)


def test_a_query_that_sees_nothing_gives_zeros_and_only_its_sink():
    q, keys, values = numbers(2, 0, spec())
    out, lse = attention(spec(), q, keys, values)
    assert not out.any() and np.isneginf(lse).all()
    out, lse = attention(spec(sinks=True), q, keys, values, sinks=np.full(6, 0.25))
    assert not out.any() and lse == pytest.approx(np.full((2, 6), 0.25))


def test_a_hidden_key_has_no_part_even_if_it_is_not_finite():
    layer = spec(window=2)
    q, keys, values = numbers(1, 5, layer)
    clean, _ = attention(layer, q, keys, values)
    keys[:3], values[:3] = np.nan, np.inf
    assert (attention(layer, q, keys, values)[0] == clean).all()


def test_large_scores_do_not_overflow():
    layer = spec(scale=1e4)
    q, keys, values = numbers(3, 7, layer)
    out, lse = attention(layer, q, keys, values)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
