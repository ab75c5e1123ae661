"""The sampler against float64 references written another way: sort everything, then walk down the list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagedkv.api.errors import ConfigError
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.random import stream_key, uniform
from pagedkv.sampling.sampler import Sampler
from pagedkv.sampling.truncation import _at_least_elsewhere, _largest_elsewhere, at_least, largest
from pagedkv.sampling.weights import Weights
from tests.helpers.plain_sampler import reference

INF = float("inf")


def sampler_of(*all_params: SamplingParams, vocab: int, end_ids: Sequence[int] = ()) -> Sampler:
    sampler = Sampler(len(all_params), vocab, seed=0)
    for row, params in enumerate(all_params, start=1):
        sampler.set_row(row, params, end_ids, seed=row)
    return sampler


def draws(logits: Any, count: int, first: int = 0, **fields: Any) -> npt.NDArray[np.int32]:
    """The tokens of one request at `count` successive indices, always from the same logits."""
    row = torch.as_tensor(logits, dtype=torch.float32)
    sampler = sampler_of(SamplingParams(**{"seed": 3, "max_tokens": None, **fields}), vocab=len(row))
    index = np.arange(first, first + count)
    return sampler(row.expand(count, len(row)), np.ones(count, np.int32), index)


def some_logits(vocab: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 3.0},
        {"temperature": 1e300},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 10, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 2.0, "min_p": 0.2, "top_p": 0.95},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [40, 300])
def test_frequencies_follow_the_exact_probabilities(fields: dict[str, Any], vocab: int) -> None:
    """Chi-square over 4,000 draws; a limit of 5 standard deviations."""
    logits, count = some_logits(vocab), 4_000
    exact, margin = reference(logits.tolist(), **fields)
    assert margin > 1e-6
    seen = np.bincount(draws(logits, count, **fields), minlength=vocab)
    assert not seen[exact == 0].any()
    rare = exact * count < 5
    want = np.append(exact[~rare], exact[rare].sum()) * count
    got = np.append(seen[~rare], seen[rare].sum())
    want, got = want[want > 0], got[want > 0]
    chi2, freedom = float(((got - want) ** 2 / want).sum()), len(want) - 1
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5


grid = st.integers(-24, 24).map(lambda i: i / 4)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], dict[str, Any]]:
    few = draw(st.lists(st.one_of(grid, st.just(-INF)), min_size=1, max_size=12))
    logits = (few * draw(st.sampled_from([1, 1, 30, 90])))[:700]
    fields = {
        "temperature": draw(st.sampled_from([0.05, 0.5, 1.0, 4.0])),
        "top_k": draw(st.sampled_from([0, -1, 2, 3, 7, 256, 300, 10**9, 10**30])),
        "top_p": draw(st.sampled_from([0.01, 0.37, 0.81, 0.995, 1.0])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.013, 0.47, 1.0])),
    }
    return logits, fields


@given(case=cases(), first=st.integers(0, 2**40))
@settings(max_examples=150, deadline=None)
def test_each_draw_inverts_the_exact_distribution(case: tuple[list[float], dict[str, Any]], first: int) -> None:
    """With the generator's own numbers, every token is the one whose stretch of [0, 1) holds the number."""
    logits, fields = case
    assume(max(logits) > -INF)
    exact, margin = reference(logits, **fields)
    assume(margin > 1e-6 and (fields["min_p"] < 1 or max(logits) < INF))
    count = 10
    keys, index = np.full(count, stream_key(3), np.uint64), np.arange(first, first + count)
    numbers, ends = uniform(keys, index), np.cumsum(exact)
    tokens = draws(logits, count, first=first, **fields)
    assert (exact[tokens] > 0).all()
    assert (ends[tokens] > numbers - 1e-5).all()
    assert (ends[tokens] - exact[tokens] < numbers + 1e-5).all()


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"min_p": 1e-4}, {"top_p": 0.999, "min_p": 1e-6}], ids=str)
def test_cuts_that_keep_thousands(fields: dict[str, Any]) -> None:
    """Nearly flat logits: the first look at the largest values is not enough."""
    logits = some_logits(9000, spread=0.5)
    exact, _ = reference(logits.tolist(), **fields)
    numbers, ends = uniform(np.full(50, stream_key(3), np.uint64), np.arange(50)), np.cumsum(exact)
    tokens = draws(logits, 50, **fields)
    assert (exact > 0).sum() > 4096
    assert np.abs(tokens - np.searchsorted(ends, numbers, side="right")).max() <= 1


# -- other rows do not matter ------------------------------------------------------------------------------------------

KINDS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "seed=3": SamplingParams(seed=3),
    "cold": SamplingParams(seed=3, temperature=0.2),
    "top-k and top-p": SamplingParams(seed=3, top_k=50, top_p=0.9),
    "top-p": SamplingParams(seed=3, top_p=0.95, temperature=1.3),
    "min-p": SamplingParams(seed=3, min_p=0.02),
}


@pytest.mark.parametrize("vocab", [1000, 49_152])
@pytest.mark.parametrize("name", KINDS)
def test_u54_alone_and_in_any_company(name: str, vocab: int) -> None:
    """First and last of batches of 2, 5 and 8 whose other rows ask for everything else: the same tokens as alone."""
    mine, steps = some_logits(vocab, seed=1), (0, 1, 2, 40)
    alone = [int(draws(mine, 1, first=step, **_fields(KINDS[name]))[0]) for step in steps]
    for size in (2, 5, 8):
        for place in (0, size - 1):
            company = [*KINDS.values(), *KINDS.values()][: size - 1]
            company.insert(place, KINDS[name])
            sampler = sampler_of(*company, vocab=vocab)
            logits = torch.stack([some_logits(vocab, seed=10 + i) for i in range(size)])
            logits[place] = mine
            order = np.arange(1, size + 1, dtype=np.int32)
            got = [int(sampler(logits, order, np.full(size, step))[place]) for step in steps]
            assert got == alone, (size, place)


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}


def test_the_bits_of_a_weight_do_not_depend_on_its_place() -> None:
    """exp must give the same bits in every lane and chunk: what the independence of rows rests on."""
    values = -30 * torch.rand(50_000, generator=torch.Generator().manual_seed(0))
    whole = values.exp()
    for shift in range(17):
        for length in (1, 5, 16, 33, 40_000):
            part = values[shift : shift + length]
            assert torch.equal(part.exp(), whole[shift : shift + length])
            assert torch.equal(part.clone().exp(), whole[shift : shift + length])


def test_rows_at_once_do_not_change_a_draw() -> None:
    logits = torch.stack([some_logits(1000, seed=i) for i in range(9)])
    top, heat, rows = logits.amax(1).numpy(), np.linspace(0.1, 3, 9), np.array([8, 0, 3, 5, 6, 7])
    numbers = np.random.default_rng(0).random(6)
    one, four = Weights(logits, top, heat, at_once=1), Weights(logits, top, heat, at_once=4)
    assert one.draw(rows, numbers).tolist() == four.draw(rows, numbers).tolist()
    assert one.mass(rows).tolist() == four.mass(rows).tolist()
    exact = np.exp((logits.double().numpy() - top[:, None]) / heat[:, None]).sum(1)[rows]
    np.testing.assert_allclose(one.mass(rows), exact, rtol=1e-6)


def test_both_ways_of_searching_agree() -> None:
    """The host's and the devices' search for the largest values find the same, ties included."""
    logits = torch.stack([some_logits(500, seed=i) for i in range(4)]).mul(4).round().div(4)
    rows = np.array([3, 0, 2])
    for width in (1, 7, 499, 500):
        values = largest(logits, rows, width)
        assert np.array_equal(values, _largest_elsewhere(logits, rows, width))
        assert np.array_equal(values, -np.sort(-logits.numpy()[rows], axis=1)[:, :width])
    floors = np.array([0.5, 2.0, -1.0], np.float32)
    for here, there in zip(at_least(logits, rows, floors), _at_least_elsewhere(logits, rows, floors), strict=True):
        assert np.array_equal(here[0], there[0])
        assert np.array_equal(here[1], there[1])


# -- seeds and streams -------------------------------------------------------------------------------------------------


def test_u56_the_stream_advances_and_a_seed_repeats_it() -> None:
    """Uniform logits: many different ids over 32 tokens; the same for the same seed, in one batch too."""
    flat = torch.zeros(1000)
    first = draws(flat, 32, seed=1)
    assert len(set(first.tolist())) > 25
    assert draws(flat, 32, seed=1).tolist() == first.tolist()
    assert draws(flat, 32, seed=2).tolist() != first.tolist()
    sampler = sampler_of(SamplingParams(seed=1), SamplingParams(seed=1), vocab=1000)
    pairs = [sampler(torch.zeros(2, 1000), np.array([1, 2], np.int32), np.array([i, i])) for i in range(32)]
    assert [pair.tolist() for pair in pairs] == [[token, token] for token in first.tolist()]


def test_requests_without_a_seed_differ_by_number_and_by_the_engine_seed() -> None:
    def tokens(engine_seed: int, number: int) -> list[int]:
        sampler = Sampler(1, 1000, engine_seed)
        sampler.set_row(1, SamplingParams(), (), number)
        return sampler(torch.zeros(20, 1000), np.ones(20, np.int32), np.arange(20)).tolist()

    assert tokens(0, 1) == tokens(0, 1)
    assert len({tuple(tokens(seed, number)) for seed in (0, 1) for number in (1, 2, 3)}) == 6


def test_a_users_seed_stands_for_itself() -> None:
    rows = []
    for engine_seed, number, row in ((0, 1, 1), (9, 5, 3)):
        sampler = Sampler(3, 1000, engine_seed)
        sampler.set_row(row, SamplingParams(seed=4), (), number)
        rows.append(sampler(torch.zeros(20, 1000), np.full(20, row, np.int32), np.arange(20)).tolist())
    assert rows[0] == rows[1]


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 2**32])
def test_negative_and_large_seeds(seed: int) -> None:
    flat = torch.zeros(1000)
    assert draws(flat, 20, seed=seed).tolist() == draws(flat, 20, seed=seed).tolist()
    assert draws(flat, 20, seed=seed).tolist() != draws(flat, 20, seed=0).tolist()


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """Its row is given to another and it gets a new one: token 5 is what it would have been."""
    params, logits = SamplingParams(seed=7), some_logits(1000)[None]
    whole = draws(logits[0], 10, seed=7).tolist()
    sampler = sampler_of(params, vocab=1000)
    before = [int(sampler(logits, np.array([1], np.int32), np.array([i]))[0]) for i in range(5)]
    moved = sampler_of(SamplingParams(temperature=0), params, vocab=1000)
    after = [int(moved(logits, np.array([2], np.int32), np.array([i]))[0]) for i in range(5, 10)]
    assert before + after == whole


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1e-6}, {"top_p": 0}, {"top_k": 1}], ids=str)
def test_u58_what_means_greedy_takes_the_first_of_the_largest(fields: dict[str, Any]) -> None:
    logits = some_logits(500)
    logits[[70, 300]] = 50.0
    assert draws(logits, 5, **fields).tolist() == [70] * 5


@pytest.mark.parametrize("top_k", [0, 499, 3])
def test_u58_a_small_temperature_is_divided_without_harm(top_k: int) -> None:
    logits = some_logits(500)
    logits[3] = -INF
    assert draws(logits, 50, temperature=1e-4, top_k=top_k).tolist() == [int(logits.argmax())] * 50


def test_u58_greedy_and_random_rows_with_masked_logits() -> None:
    logits = torch.full((3, 100), -INF)
    logits[0, [8, 9]] = torch.tensor([1.0, 2.0])
    logits[1, [40, 41]] = 0.0
    logits[2, 77] = -1e30
    sampler = sampler_of(SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=5, top_p=0.5), vocab=100)
    seen = {tuple(sampler(logits, np.array([1, 2, 3], np.int32), np.full(3, i)).tolist()) for i in range(30)}
    assert seen == {(9, 40, 77), (9, 41, 77)}


@pytest.mark.parametrize("bad", [float("nan"), -INF])
def test_u58_a_row_without_usable_logits_is_the_only_one_that_fails(bad: float) -> None:
    params = list(KINDS.values())
    rows, index = np.arange(1, 1 + len(params), dtype=np.int32), np.full(len(params), 2)
    logits = torch.stack([some_logits(300, seed=i) for i in range(len(params))])
    good = sampler_of(*params, vocab=300)(logits, rows, index)
    for broken in range(len(params)):
        worse = logits.clone()
        worse[broken, 299 if np.isnan(bad) else slice(None)] = bad
        want = good.copy()
        want[broken] = -1
        assert sampler_of(*params, vocab=300)(worse, rows, index).tolist() == want.tolist()


def test_plus_infinity_is_certain_and_shared() -> None:
    logits = some_logits(300)
    logits[[5, 290]] = INF
    assert draws(logits, 3, temperature=0).tolist() == [5] * 3
    for fields in ({}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.5}):
        counts = np.bincount(draws(logits, 400, **fields), minlength=300)
        assert counts.sum() == counts[5] + counts[290]
        assert 140 < counts[5] < 260


def test_u58_settings_that_cut_nothing_change_nothing() -> None:
    logits = some_logits(300)
    plain = draws(logits, 50).tolist()
    assert draws(logits, 50, top_k=10**9).tolist() == plain
    assert draws(logits, 50, top_k=-1, top_p=1.0, min_p=0.0).tolist() == plain
    assert draws(logits, 50, top_k=300).tolist() == plain


def test_ties_at_the_edge_keep_the_lowest_ids() -> None:
    assert set(draws(torch.zeros(600), 200, top_k=3).tolist()) == {0, 1, 2}
    assert set(draws(torch.zeros(600), 400, top_p=0.0099).tolist()) == set(range(6))


def test_end_tokens_are_masked_until_the_minimum_is_reached() -> None:
    logits = torch.full((1, 50), -2.0)
    logits[0, [4, 7, 9]] = torch.tensor([9.0, 8.0, 7.0])
    untouched = logits.clone()
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[7])
    sampler = sampler_of(params, vocab=50, end_ids=(4, 5000))
    tokens = [int(sampler(logits, np.array([1], np.int32), np.array([i]))[0]) for i in range(4)]
    assert tokens == [9, 9, 4, 4]
    assert torch.equal(logits, untouched)


def test_end_tokens_are_masked_in_their_own_row_only() -> None:
    logits = torch.zeros(3, 50)
    logits[:, 4] = 30.0
    sampler = sampler_of(SamplingParams(seed=1), SamplingParams(seed=1, min_tokens=5), vocab=50, end_ids=(4,))
    assert sampler(logits[:2], np.array([1, 2], np.int32), np.array([0, 5])).tolist() == [4, 4]
    mixed = sampler(logits, np.array([1, 2, 1], np.int32), np.array([0, 4, 9]))
    assert mixed[0] == mixed[2] == 4
    assert mixed[1] != 4


def test_a_row_that_changes_hands_forgets_its_old_request() -> None:
    logits = some_logits(100)[None]
    best = int(logits.argmax())
    sampler = sampler_of(SamplingParams(top_k=5, min_tokens=9, seed=1), vocab=100, end_ids=(best,))
    sampler.set_row(1, SamplingParams(temperature=0), (), 0)
    assert sampler(logits, np.array([1], np.int32), np.array([0])).tolist() == [best]


def test_no_rows_give_no_tokens() -> None:
    got = sampler_of(SamplingParams(), vocab=10)(torch.zeros(0, 10), np.zeros(0, np.int32), np.zeros(0, np.int64))
    assert got.shape == (0,)
    assert got.dtype == np.int32


def test_logits_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(ConfigError, match="vocabulary of 10"):
        sampler_of(SamplingParams(), vocab=10)(torch.zeros(1, 11), np.ones(1, np.int32), np.zeros(1, np.int64))
