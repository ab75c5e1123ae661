"""Attention of one row in float64: what every backend's answer is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.api import LayerSpec

Floats = npt.NDArray[np.float64]


def attention(
    layer: LayerSpec, q: Floats, keys: Floats, values: Floats, *, sinks: Any = None, alibi: Any = None
) -> tuple[Floats, Floats]:
    """(out [n, Hq, Dv], log of each softmax denominator [n, Hq]) of q [n, Hq, Dk], the last n of c positions.

    keys [c, Hkv, Dk] and values [c, Hkv, Dv] are those of positions 0 .. c-1, as stored; sinks and alibi are [Hq].
    The formula is that of `AttentionBackend.attend`; ALiBi adds slope (i - p) (Press et al., 2022).
    """
    count, context = len(q), len(keys)
    out = np.zeros((count, layer.q_heads, layer.v_dim))
    lse = np.full((count, layer.q_heads), -np.inf)
    p = np.arange(context - count, context)[:, None]
    i = np.arange(context)[None, :]
    visible = _visible(layer, p, i)
    for head in range(layer.q_heads):
        kv_head = head * layer.kv_heads // layer.q_heads
        s = layer.scale * (q[:, head] @ keys[:, kv_head].T)
        if layer.softcap is not None:
            s = layer.softcap * np.tanh(s / layer.softcap)
        if layer.alibi:
            s = s + float(alibi[head]) * (i - p)
        sink = float(sinks[head]) if layer.sinks else -np.inf
        out[:, head], lse[:, head] = _softmax_sum(np.where(visible, s, -np.inf), sink, values[:, kv_head])
    return out, lse


def _visible(layer: LayerSpec, p: Any, i: Any) -> npt.NDArray[np.bool_]:
    seen = np.ones(np.broadcast_shapes(p.shape, i.shape), bool)
    if layer.causal:
        seen &= i <= p
    if layer.window is not None:
        seen &= i > p - layer.window
    return seen


def _softmax_sum(s: Floats, sink: float, values: Floats) -> tuple[Floats, Floats]:
    """Values [c, Dv] weighted by the softmax of s [n, c] with one more term exp(sink) below the line."""
    top = np.maximum(s.max(1, initial=-np.inf), sink)
    top = np.where(np.isfinite(top), top, 0.0)  # nothing is visible: every weight is 0
    weights = np.exp(s - top[:, None])
    total = weights.sum(1) + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    # A hidden position may hold anything: it has no part in the sum, not even as 0 times something.
    seen = np.isfinite(s)
    weighted = np.stack([row[mask] @ values[mask] for row, mask in zip(weights, seen, strict=True)])
    return weighted / np.where(total > 0, total, 1.0)[:, None], lse
