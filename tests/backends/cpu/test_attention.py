"""Attention against a float64 oracle, over a pairwise cover of what the backend declares and its boundaries."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv_cpu import planning
from tests.backends.cpu.rig import Rig, layer_spec, pool_spec

TOLERANCE = {"fp32": 5e-6, "bf16": 1.6e-2, "fp16": 2e-3}
LATTICE: dict[str, tuple[Any, ...]] = {
    "dtype": ("fp32", "bf16", "fp16"),
    "kv_dtype": ("fp32", "bf16", "fp16"),
    "block_size": (1, 3, 4, 16, 32),
    "heads": ((1, 1), (6, 2), (4, 1), (14, 2), (8, 1), (5, 2), (20, 1)),
    "dims": ((16, 16), (64, 64), (80, 80), (128, 128), (24, 40), (5, 1)),
    "window": (None, 1, 16, 130),
    "softcap": (None, 5.0),
    "sinks": (False, True),
    "alibi": (False, True),
    "causal": (True, False),
    "shape": ("decode", "prompt", "chunk", "mixed"),
    "poison": (1e4, float("nan"), float("inf"), 1e37),
}


def pairwise(lattice: dict[str, tuple[Any, ...]], seed: int = 1) -> list[dict[str, Any]]:
    """Cases that hold every pair of values of any two fields, chosen greedily."""
    rng, names = random.Random(seed), list(lattice)
    todo = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(lattice[a]))
        for j in range(len(lattice[b]))
    }

    def covered(case: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)} & todo

    cases = []
    while todo:
        a, i, b, j = min(todo)
        drawn = [{n: rng.randrange(len(lattice[n])) for n in names} | {a: i, b: j} for _ in range(30)]
        best = max(drawn, key=lambda case: len(covered(case)))
        todo -= covered(best)
        cases.append({n: lattice[n][at] for n, at in best.items()})
    return cases


ROWS = {
    "decode": [(1, 1), (31, 1), (32, 1), (33, 1), (150, 1)],
    "prompt": [(1, 1), (37, 37), (140, 140)],
    "chunk": [(140, 9), (40, 3), (130, 4)],
    "mixed": [(129, 1), (128, 1), (50, 20), (3, 3), (260, 2)],
}


def bind(rig: Rig) -> dict[str, np.ndarray]:
    """Random sinks and slopes, as far as the layer has them."""
    rng = np.random.default_rng(3)
    heads, params = rig.layer.q_heads, {}
    if rig.layer.sinks:
        params["sinks"] = rng.normal(size=heads).astype(np.float32)
    if rig.layer.alibi:
        params["alibi"] = rng.uniform(0.01, 0.5, size=heads).astype(np.float32)
    if params:
        rig.backend.bind(rig.pool, rig.layer.index, params)
    return params


CASES = pairwise(LATTICE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_oracle(case):
    (q_heads, kv_heads), (k_dim, v_dim) = case["heads"], case["dims"]
    layer = layer_spec(
        q_heads=q_heads,
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        **{name: case[name] for name in ("window", "softcap", "sinks", "alibi", "causal")},
    )
    size = case["block_size"]
    blocks = 2 + sum(-(-context // size) for context, _ in ROWS[case["shape"]]) + 8
    rig = Rig(pool_spec(layer, block_size=size, kv_dtype=case["kv_dtype"], dtype=case["dtype"], num_blocks=blocks))
    if not (case["kv_dtype"] == "fp16" and case["poison"] == 1e37):  # fp16 holds no such number
        rig.poison(case["poison"])
    params = bind(rig)
    rows = [(rig.sequence(context), context, count) for context, count in ROWS[case["shape"]]]
    for seq, context, count in rows:
        rig.write(seq, 0, context - count)
    out = rig.step(*rows).double().numpy()
    want = np.concatenate([rig.expected(*row, params) for row in rows])
    limit = TOLERANCE[case["dtype"]]
    assert np.abs(out - want).max() <= limit * max(1.0, np.abs(want).max())


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
@pytest.mark.parametrize("window", [None, 1, 16, 17, 128, 129, 5000])
def test_context_boundaries(block_size, window):
    edges = {block_size - 1, block_size, block_size + 1, 127, 128, 129, 256, 257} - {0}
    rig = Rig(pool_spec(layer_spec(window=window), block_size=block_size, num_blocks=1300))
    rig.poison(float("nan"))
    rows = [(rig.sequence(context), context, 1) for context in sorted(edges)]
    for seq, context, _ in rows:
        rig.write(seq, 0, context - 1)
    out = rig.step(*rows).double().numpy()
    want = np.concatenate([rig.expected(*row) for row in rows])
    assert np.abs(out - want).max() <= 5e-6


def test_a_query_that_sees_nothing_gives_zeros():
    for sinks in (False, True):
        rig = Rig(pool_spec(layer_spec(causal=False, sinks=sinks)))
        rig.poison(float("nan"))
        if sinks:
            rig.backend.bind(rig.pool, 0, {"sinks": np.zeros(4, np.float32)})
        seq = rig.sequence(5)
        batch = rig.batch([(seq, 1, 1), (seq, 2, 2)], write=False)
        batch.ctx_len[:] = 0
        out = torch.full((3, 4, 16), 7.0)
        rig.backend.attend(rig.backend.plan(rig.pool, 0, batch), 0, torch.ones(3, 4, 16), None, None, out)
        assert torch.equal(out, torch.zeros(3, 4, 16))


def test_a_nan_that_is_seen_stays_visible():
    rig = Rig(pool_spec())
    seq, other = rig.sequence(20), rig.sequence(20)
    seq.values[7] = float("nan")
    out = rig.step((seq, 20, 20), (other, 20, 20))
    assert not out[:7].isnan().any() and out[7:20].isnan().all() and not out[20:].isnan().any()


def test_scores_of_very_different_size_do_not_overflow():
    rig = Rig(pool_spec(layer_spec(scale=100.0)))
    seq = rig.sequence(140)
    out = rig.step((seq, 140, 140)).double().numpy()
    assert np.abs(out - rig.expected(seq, 140, 140)).max() <= 1e-3 * 5  # fp32 scores of some thousands
    assert np.isfinite(out).all()


def test_long_context_is_read_in_several_pieces():
    layer = layer_spec(q_heads=2, kv_heads=1, k_dim=128, v_dim=64)
    limits = pool_spec().limits
    rig = Rig(pool_spec(layer, num_blocks=700, limits=type(limits)(rows=2, tokens=10000, context=10000)))
    seq = rig.sequence(10000)
    rig.write(seq, 0, 9998)
    out = rig.step((seq, 10000, 2)).double().numpy()
    assert np.abs(out - rig.expected(seq, 10000, 2)).max() <= 5e-6


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 128])
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("window", [None, 20, 130])
def test_gathering_whole_blocks_changes_no_bit(block_size, kv_dtype, window, monkeypatch):
    rig = Rig(pool_spec(layer_spec(window=window), block_size=block_size, kv_dtype=kv_dtype, num_blocks=1500))
    rig.poison(float("nan"))
    rows = [(rig.sequence(context), context, 1) for context in (1, 15, 16, 33, 127, 128, 129, 250, 256)]
    for seq, context, _ in rows:
        rig.write(seq, 0, context - 1)
    plans = {}
    for many in (10**9, 1):
        monkeypatch.setattr(planning, "MANY_ROWS", many)
        monkeypatch.setattr(planning, "LARGE_BLOCK", 1)
        plans[many] = rig.step(*rows)
    assert torch.equal(plans[1], plans[10**9])
    want = np.concatenate([rig.expected(*row) for row in rows])
    assert np.abs(plans[1].double().numpy() - want).max() <= 5e-6


def test_whole_blocks_are_read_as_such_and_torn_ones_row_by_row():
    slots = np.concatenate([np.arange(32, 48), np.arange(80, 86), np.zeros(10), np.zeros(16)]).astype(np.int32)
    blocks = planning._blocks(np.tile(slots, 50), 16)
    assert blocks is not None
    assert blocks.numbers[:3].tolist() == [2, 0, 0]
    assert blocks.patch_at.tolist() == list(range(1, 150, 3))
    assert blocks.patch_slots[:16].tolist() == slots[16:32].tolist()
    assert planning._blocks(slots, 16) is None, "too few rows to be worth it"
    assert planning._blocks(np.tile(slots, 50), 3) is None, "a chunk does not hold whole blocks of 3"
