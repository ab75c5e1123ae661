"""Log-probabilities against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.sampling.logprobs import FLOOR, _ranks, _ranks_elsewhere, score
from tests.sampling.test_sampler import some_logits

INF = float("inf")


def plain(row: list[float], token: int, count: int) -> list[tuple[int, float, int]]:
    """The token and the `count` most probable: sort all ids by logit, then id."""
    exact = torch.log_softmax(torch.tensor(row, dtype=torch.float64), 0).tolist()
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    count = len(row) if count < 0 else count
    return [(i, max(exact[i], FLOOR), order.index(i) + 1) for i in (token, *order[:count])]


grid = st.one_of(st.integers(-60, 60).map(lambda i: i / 4), st.just(-INF))


@given(
    rows=st.lists(st.lists(grid, min_size=12, max_size=12), min_size=1, max_size=4),
    tokens=st.lists(st.integers(0, 11), min_size=4, max_size=4),
    counts=st.lists(st.sampled_from([0, 1, 2, 5, 12, 40, -1]), min_size=4, max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_every_number_is_that_of_float64(rows: list[list[float]], tokens: list[int], counts: list[int]) -> None:
    n = len(rows)
    found = score(torch.tensor(rows), np.arange(n), np.array(tokens[:n]), counts[:n])
    for row, token, count, got in zip(rows, tokens, counts, found, strict=False):
        if max(row) == -INF:
            assert got is None
            continue
        assert got is not None
        want = plain(row, token, count)
        assert [(s.token, s.rank) for s in got] == [(i, rank) for i, _, rank in want]
        assert [s.logprob for s in got] == pytest.approx([logprob for _, logprob, _ in want], abs=2e-6)


@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_a_large_vocabulary_and_no_neighbours(vocab: int) -> None:
    logits = torch.stack([some_logits(vocab, seed=i) for i in range(3)])
    tokens = np.array([7, int(logits[1].argmax()), vocab - 1])
    together = score(logits, np.array([0, 1, 2]), tokens, [5, 0, 3])
    for at in range(3):
        alone = score(logits[at : at + 1], np.array([0]), tokens[at : at + 1], [[5, 0, 3][at]])
        assert alone == [together[at]], "bit for bit"
    exact = torch.log_softmax(logits.double(), 1)
    for at, token in enumerate(tokens.tolist()):
        assert together[at][0].logprob == pytest.approx(float(exact[at, token]), abs=5e-6)  # type: ignore[index]
        assert together[at][0].rank == int((logits[at] > logits[at, token]).sum()) + 1  # type: ignore[index]


def test_infinities_and_what_is_no_number() -> None:
    row = [1.0, INF, 0.0, INF]
    broken = [0.0, float("nan"), 1.0, 2.0]
    found = score(torch.tensor([row, broken]), np.arange(2), np.array([0, 0]), [4, 4])
    assert found[1] is None
    assert found[0] is not None
    half = float(np.log(0.5))
    assert [tuple(s) for s in found[0]] == [(0, FLOOR, 3), (1, half, 1), (3, half, 2), (0, FLOOR, 3), (2, FLOOR, 4)]


def test_both_ways_of_ranking_agree() -> None:
    logits = some_logits(500)[None].repeat(3, 1).mul(2).round()
    rows, tokens = np.array([2, 0, 1]), np.array([17, 400, 3])
    for here, there in zip(_ranks(logits, rows, tokens), _ranks_elsewhere(logits, rows, tokens), strict=True):
        assert np.array_equal(here, there)
