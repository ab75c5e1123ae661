"""The log-sum-exp that `attend` gives on request: against float64, for every feature, and without touching `out`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import ContractViolation, LayerSpec, UnsupportedError
from tests.backends.cpu.rig import TORCH, Rig, Seq, layer_spec, pool_spec
from tests.backends.cpu.test_attention import ROWS, bind, pairwise

LATTICE: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp32", "bf16"),
    "kv_dtype": ("fp32", "fp16"),
    "heads": ((4, 2), (1, 1), (5, 2), (20, 1)),
    "dims": ((16, 16), (5, 1)),
    "window": (None, 1, 16, 130),
    "softcap": (None, 5.0),
    "sinks": (False, True),
    "alibi": (False, True),
    "causal": (True, False),
    "shape": tuple(ROWS),
    "poison": (1e4, float("nan")),
}


def log_sums(spec: LayerSpec, q: np.ndarray, keys: np.ndarray, params: Mapping[str, Any]) -> np.ndarray:
    """log of each denominator in float64, [n, Hq], for the last n of the context's queries."""
    count, context = len(q), len(keys)
    p, i = np.arange(context - count, context)[:, None, None], np.arange(context)
    s = np.einsum("nhd,chd->nhc", q, keys[:, np.arange(spec.q_heads) * spec.kv_heads // spec.q_heads]) * spec.scale
    s = s if spec.softcap is None else spec.softcap * np.tanh(s / spec.softcap)
    if spec.alibi:
        s = s + np.asarray(params["alibi"], np.float64)[:, None] * (i - p)
    seen = (i <= p if spec.causal else i < context) & (i > p - (spec.window or math.inf))
    s = np.where(seen, s, -np.inf)
    if spec.sinks:
        sinks = np.broadcast_to(np.asarray(params["sinks"], np.float64)[:, None], (count, spec.q_heads, 1))
        s = np.concatenate([s, sinks], 2)
    return np.logaddexp.reduce(s, 2)


def expected(rig: Rig, rows: list[tuple[Seq, int, int]], params: Mapping[str, Any]) -> np.ndarray:
    stored = TORCH[rig.group.kv_dtype]
    parts = [
        log_sums(
            rig.layer,
            seq.queries[context - count : context].double().numpy(),
            seq.keys[:context].to(stored).double().numpy(),
            params,
        )
        for seq, context, count in rows
    ]
    return np.concatenate(parts)


def attend(rig: Rig, rows: list[tuple[Seq, int, int]], *, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one step, both with `padding` rows past the tokens; lse is 7 where nothing was written."""
    plan = rig.backend.plan(rig.pool, rig.group_index, rig.batch(rows))
    q, k, v = rig.tensors(rows)
    q = torch.cat([q, rig.random(padding, *q.shape[1:])])
    out = torch.empty(len(q), rig.layer.q_heads, rig.layer.v_dim, dtype=q.dtype)
    lse = torch.full((len(q), rig.layer.q_heads), 7.0)
    rig.backend.attend(plan, rig.layer.index, q, k, v, out, extra={"lse": lse})
    return out, lse


def written(rig: Rig, shape: str) -> list[tuple[Seq, int, int]]:
    """The rows of a shape, all but their query tokens in the cache."""
    rows = [(rig.sequence(context), context, count) for context, count in ROWS[shape]]
    for seq, context, count in rows:
        rig.write(seq, 0, context - count)
    return rows


@pytest.mark.parametrize("case", pairwise(LATTICE), ids=lambda case: "-".join(str(value) for value in case.values()))
def test_against_float64(case: dict[str, Any]) -> None:
    (q_heads, kv_heads), (k_dim, v_dim) = case["heads"], case["dims"]
    features = {name: case[name] for name in ("window", "softcap", "sinks", "alibi", "causal")}
    layer = layer_spec(q_heads=q_heads, kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim, **features)
    rig = Rig(pool_spec(layer, kv_dtype=case["kv_dtype"], dtype=case["dtype"]))
    rig.poison(case["poison"])
    params = bind(rig)
    rows = written(rig, case["shape"])
    out, lse = attend(rig, rows)
    want = expected(rig, rows, params)
    assert lse.dtype == torch.float32
    # The weights' sum is fp32, whatever the dtype of q: a bound of its rounding, plus that of the score it stands on.
    assert np.abs(lse.double().numpy() - want).max() <= 5e-6 * max(1.0, np.abs(want).max())
    assert torch.equal(out, rig.step(*rows)), "asking for it changes no bit of out"


def test_two_halves_of_the_keys_merge_into_the_whole() -> None:
    """What it is for: out = sum of out_i exp(lse_i - lse), here over the first and the last keys of one query."""
    rig = Rig(pool_spec(layer_spec(causal=False)))
    seq = rig.sequence(48)
    first = Seq(seq.keys[:32], seq.values[:32], seq.queries, seq.blocks[:2])
    last = Seq(seq.keys[32:], seq.values[32:], seq.queries, seq.blocks[2:])
    rig.write(seq, 0, 48)
    query, outs, sums = seq.queries[47:], [], []
    for part, context in ((first, 32), (last, 16), (seq, 48)):
        plan = rig.backend.plan(rig.pool, 0, rig.batch([(part, context, 1)], write=False))
        outs.append(torch.empty(1, 4, 16))
        sums.append(torch.empty(1, 4))
        rig.backend.attend(plan, 0, query, None, None, outs[-1], extra={"lse": sums[-1]})
    weights = [torch.exp(part - sums[2])[..., None] for part in sums[:2]]
    assert torch.allclose(weights[0] * outs[0] + weights[1] * outs[1], outs[2], atol=1e-6)
    assert torch.allclose(torch.logaddexp(sums[0], sums[1]), sums[2], atol=1e-6)


@pytest.mark.parametrize("sink", [None, -3.0, 90.0])
def test_where_nothing_is_visible_only_the_sink_remains(sink: float | None) -> None:
    rig = Rig(pool_spec(layer_spec(causal=False, sinks=sink is not None)))
    rig.poison(float("nan"))
    if sink is not None:
        rig.backend.bind(rig.pool, 0, {"sinks": np.full(4, sink, np.float32)})
    seq = rig.sequence(5)
    batch = rig.batch([(seq, 1, 1), (seq, 2, 2)], write=False)
    batch.ctx_len[:] = 0
    lse = torch.zeros(3, 4)
    plan = rig.backend.plan(rig.pool, 0, batch)
    rig.backend.attend(plan, 0, torch.ones(3, 4, 16), None, None, torch.empty(3, 4, 16), extra={"lse": lse})
    assert torch.equal(lse, torch.full((3, 4), -math.inf if sink is None else sink))


def test_a_row_has_the_same_bits_alone_and_in_company() -> None:
    rig = Rig(pool_spec(layer_spec(q_heads=3, kv_heads=1)))
    rows = written(rig, "mixed")
    _, lse = attend(rig, rows)
    start = 0
    for row in rows:
        _, alone = attend(rig, [row])
        assert torch.equal(alone, lse[start : start + row[2]])
        start += row[2]


def test_large_scores_neither_overflow_nor_lose_their_digits() -> None:
    rig = Rig(pool_spec(layer_spec(scale=100.0)))
    rows = [(rig.sequence(140), 140, 140)]
    _, lse = attend(rig, rows)
    want = expected(rig, rows, {})
    assert np.abs(want).max() > 500 and np.abs(lse.double().numpy() / want - 1).max() <= 2e-6


def test_rows_past_the_tokens_are_left_alone() -> None:
    rig = Rig(pool_spec())
    rows = [(rig.sequence(20), 20, 3)]
    rig.write(rows[0][0], 0, 17)
    out, lse = attend(rig, rows, padding=2)
    assert torch.equal(lse[3:], torch.full((2, 4), 7.0)) and torch.isfinite(out).all()
    assert np.abs(lse[:3].double().numpy() - expected(rig, rows, {})).max() <= 5e-6


@pytest.mark.parametrize(
    "lse",
    [
        torch.empty(4, 4),
        torch.empty(5, 3),
        torch.empty(5),
        torch.empty(5, 4).bfloat16(),
        torch.empty(4, 5).t(),
        np.empty((5, 4), np.float32),
    ],
    ids=["too few rows", "other heads", "one dim", "other dtype", "not contiguous", "no tensor"],
)
def test_another_tensor_is_a_violation_and_nothing_is_written(lse: Any) -> None:
    rig = Rig(pool_spec())
    rows = [(rig.sequence(5), 5, 5)]
    plan = rig.backend.plan(rig.pool, 0, rig.batch(rows))
    q, k, v = rig.tensors(rows)
    out = torch.full((5, 4, 16), 7.0)
    rig.pool.layer(0).keys.zero_()
    with pytest.raises(ContractViolation, match="lse must be"):
        rig.backend.attend(plan, 0, q, k, v, out, extra={"lse": lse})
    assert torch.equal(out, torch.full((5, 4, 16), 7.0)) and not rig.pool.layer(0).keys.any()


def test_an_unknown_extra_is_refused_by_name_and_an_append_has_none() -> None:
    rig = Rig(pool_spec())
    rows = [(rig.sequence(5), 5, 5)]
    plan = rig.backend.plan(rig.pool, 0, rig.batch(rows))
    q, k, v = rig.tensors(rows)
    with pytest.raises(UnsupportedError, match=r"no extra 'mask', 'tree'; it accepts 'lse'"):
        rig.backend.attend(plan, 0, q, k, v, torch.empty(5, 4, 16), extra={"tree": 1, "lse": 2, "mask": 3})
    with pytest.raises(ContractViolation, match="an append has no log-sum-exp"):
        rig.backend.attend(plan, 0, None, k, v, None, extra={"lse": torch.empty(5, 4)})
