"""The price of bringing tokens back: by hand from two rates, and how measurements move them."""

from __future__ import annotations

import math

import pytest

from pagedkv.core.price import Price

MIB = 1 << 20


def price(**names) -> Price:
    """1 MiB a block, 1 GiB/s, 2 ms before the first byte, 1000 tokens a second: 1000/1024 ms a block, 1 ms a token."""
    return Price(**{"block_bytes": MIB, "bandwidth": 1024.0 * MIB, "latency": 2e-3, "prefill": 1000.0} | names)


def test_copies_take_a_start_and_their_bytes_and_prompts_their_tokens() -> None:
    assert price().copying(0) == pytest.approx(2e-3)
    assert price().copying(512) == pytest.approx(2e-3 + 0.5)
    assert price().computing(250) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("blocks", "tokens", "swaps", "fetches"),
    [
        (1, 2, False, False),  # 2.98 ms in one direction, 2 ms to compute
        (1, 3, False, True),  # 5.95 ms there and back, 3 ms to compute
        (1, 5, False, True),
        (1, 6, True, True),
        (100, 199, False, True),  # 199.3 ms there and back
        (100, 200, True, True),
    ],
)
def test_preempted_sequences_pay_both_ways_and_prefixes_one(blocks, tokens, swaps, fetches) -> None:
    assert price().swaps(blocks, tokens) is swaps
    assert price().fetches(blocks, tokens) is fetches


@pytest.mark.parametrize("unknown", [{"bandwidth": None}, {"prefill": None}, {"bandwidth": None, "prefill": None}])
def test_until_both_rates_are_known_copies_are_taken_to_be_cheaper(unknown) -> None:
    assert price(**unknown).swaps(10**6, 1)
    assert price(**unknown).fetches(10**6, 1)
    assert price(**unknown).break_even(16) is None


def test_the_mode_decides_preemptions_without_the_rates_and_prefixes_not_at_all() -> None:
    assert price(mode="swap").swaps(10**6, 1)
    assert not price(mode="recompute").swaps(1, 10**6)
    assert not price(mode="swap").fetches(10**6, 1)
    assert price(mode="recompute").fetches(1, 10**6)


@pytest.mark.parametrize("block_size", [4, 16, 100])
def test_at_the_break_even_length_both_take_as_long(block_size) -> None:
    one = price()
    tokens = one.break_even(block_size)
    assert tokens is not None
    blocks = tokens / block_size
    assert 2 * (2e-3 + blocks / 1024) == pytest.approx(tokens / 1000)
    longer, shorter = 2 * math.ceil(blocks), math.floor(blocks / 2)
    assert one.swaps(longer, longer * block_size)
    assert not one.swaps(shorter, shorter * block_size)


def test_where_copies_are_slower_than_prompts_nothing_breaks_even() -> None:
    assert price(prefill=1e6).break_even(16) == float("inf")
    assert not price(prefill=1e6).swaps(10**6, 16 * 10**6)
    assert price(latency=0.0).break_even(16) == 0


def test_a_copy_that_took_as_long_as_predicted_changes_nothing() -> None:
    one = price()
    for blocks in (1, 64, 1000):
        took = one.copying(blocks)
        one.saw_copy(blocks, took, took)
        assert one.bandwidth == pytest.approx(1024 * MIB)


@pytest.mark.parametrize("true", [128.0 * MIB, 8192.0 * MIB])
def test_the_bandwidth_moves_towards_what_copies_show(true) -> None:
    one = price()
    for _ in range(60):
        before = abs(one.bandwidth - true)
        one.saw_copy(100, 2e-3 + 100 * MIB / true, 2e-3 + 100 * MIB / true)
        assert abs(one.bandwidth - true) < before
    assert one.bandwidth == pytest.approx(true, rel=1e-3)


def test_bounds_that_hold_the_known_bandwidth_say_nothing_new() -> None:
    one = price()
    one.saw_copy(1024, 0.0, 60.0)  # seen to have ended a minute later: at least 1/60 GiB/s
    one.saw_copy(1024, 0.5, 3.0)
    one.saw_copy(1024, 1e-3, 2.0)
    assert one.bandwidth == 1024 * MIB


def test_bounds_that_exclude_it_move_it_towards_the_nearer_one() -> None:
    slower, faster = price(latency=0.0), price(latency=0.0)
    slower.saw_copy(1024, 2.0, 100.0)  # at most 512 MiB/s
    faster.saw_copy(1024, 0.0, 0.25)  # at least 4096 MiB/s
    assert slower.bandwidth == pytest.approx((1024 - 0.2 * 512) * MIB)
    assert faster.bandwidth == pytest.approx((1024 + 0.2 * 3072) * MIB)


def test_a_copy_within_the_start_up_time_shows_no_bandwidth() -> None:
    one = price()
    one.saw_copy(1, 0.0, 1e-3)
    assert one.bandwidth == 1024 * MIB


def test_the_first_measurement_of_an_unknown_rate_is_taken_as_it_is() -> None:
    one = price(bandwidth=None, prefill=None, latency=0.0)
    one.saw_copy(10, 0.0, 2.0)
    one.saw_prefill(300, 1.5)
    assert (one.bandwidth, one.prefill) == (5 * MIB, 200)


def test_the_rate_of_prompts_moves_towards_what_steps_show() -> None:
    one = price()
    one.saw_prefill(500, 0.25)
    assert one.prefill == pytest.approx(1200)
    for _ in range(60):
        one.saw_prefill(500, 0.25)
    assert one.prefill == pytest.approx(2000, rel=1e-3)


def test_a_step_without_a_duration_says_nothing() -> None:
    one = price()
    one.saw_prefill(500, 0.0)
    assert one.prefill == 1000


def test_rates_that_the_user_gave_never_move() -> None:
    one = price(fixed=frozenset({"bandwidth", "prefill"}))
    one.saw_copy(10, 5.0, 5.0)
    one.saw_prefill(10, 5.0)
    assert (one.bandwidth, one.prefill) == (1024 * MIB, 1000)
