"""Sampling against a sorted list in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv_cuda.kernels.sampling import greedy, sample

INF = float("inf")


def kept(row: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """(ids, ascending, and weights of the tokens that stay), by sorting."""
    row = row.astype(np.float64)
    order = np.lexsort((np.arange(len(row)), -row))
    order = order[row[order] > -INF][:top_k]
    weights = np.exp((row[order] - row.max()) / temperature)
    if top_p < 1:
        enough = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1
        order, weights = order[:enough], weights[:enough]
    by_id = np.argsort(order)
    return order[by_id], weights[by_id]


def draws(row, temperature, top_k, top_p, numbers):
    n = len(numbers)
    full = [torch.full((n,), value, dtype=torch.float32) for value in (temperature, top_p)]
    logits = torch.from_numpy(np.broadcast_to(row, (n, len(row))).copy())
    numbers = torch.tensor(numbers, dtype=torch.float32)
    return sample(logits, numbers, full[0], torch.full((n,), top_k, dtype=torch.int32), full[1]).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 300, 1.0), (0.7, 5, 1.0), (1.3, 300, 0.6), (1.0, 7, 0.55), (1.0, 1, 0.5), (1.0, 300, 0.0), (2.0, 290, 0.97)],
)
def test_draws_come_from_what_is_kept_in_its_order(temperature, top_k, top_p):
    row = np.random.default_rng(1).standard_normal(300).astype(np.float32) * 3
    row[10:14] = -INF
    ids, weights = kept(row, temperature, top_k, top_p)
    edges = np.cumsum(weights) / weights.sum()
    chosen = np.unique(np.linspace(0, len(ids) - 1, 3).astype(int))
    middles = [edges[i] - weights[i] / weights.sum() / 2 for i in chosen]
    assert draws(row, temperature, top_k, top_p, middles) == ids[chosen].tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (40, 0.28), (40, 0.51)])
def test_a_tie_at_the_edge_keeps_the_lower_ids(top_k, top_p):
    row = np.full(40, -2.0, np.float32)
    row[[5, 9, 21, 30]] = 1.5
    ids, weights = kept(row, 1.0, top_k, top_p)
    middles = (np.arange(len(ids)) + 0.5) / len(ids)
    assert (weights == weights[0]).all()
    assert draws(row, 1.0, top_k, top_p, middles) == ids.tolist()


def test_the_last_number_before_one_still_finds_a_kept_id():
    row = np.array([1.0, 0.0, -INF, -50.0], np.float32)
    assert draws(row, 1.0, 2, 1.0, [1 - 2**-24]) == [1]


def test_greedy_and_its_special_rows():
    logits = torch.tensor(
        [[0.0, 2, 2, -1], [-INF, -INF, -INF, -INF], [1, float("nan"), 0, 9], [3, INF, INF, 0], [-INF, -5, -0.0, 0]]
    )
    assert greedy(logits).tolist() == [1, -1, -1, 1, 2]
    n = len(logits)
    ones, k = torch.ones(n), torch.full((n,), 4, dtype=torch.int32)
    assert sample(logits, torch.full((n,), 0.5), torch.zeros(n), k, ones).tolist() == [1, -1, -1, 1, 2]
    assert sample(logits[1:4], torch.full((3,), 0.5), ones[:3], k[:3], ones[:3]).tolist() == [-1, -1, 1]


def test_greedy_over_several_steps_of_a_16_bit_vocabulary():
    logits = torch.zeros((2, 10_000), dtype=torch.bfloat16)
    logits[0, 9_999], logits[1, 4_100], logits[1, 8_000] = 1.0, 2.0, 2.0
    assert greedy(logits).tolist() == [9_999, 4_100]
