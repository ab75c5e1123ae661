"""The generator against its published vectors, and its numbers' distribution."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.sampling.random import derived_key, philox, stream_key, uniform

ALL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ALL] * 4, [ALL] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers_of_random123(counter: list[int], key: list[int], want: list[int]) -> None:
    """The vectors of Random123's kat_vectors file for philox4x32, 10 rounds; alone and beside others."""
    words = philox(np.array([[c, 1] for c in counter], np.uint64), np.array([[k, 2] for k in key], np.uint64))
    assert words[:, 0].tolist() == want


def test_the_number_is_made_of_the_first_two_words() -> None:
    number = uniform(np.array([0], np.uint64), np.array([0]))[0]
    assert number == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53


def test_numbers_depend_on_key_and_index_only() -> None:
    keys = np.array([5, 2**64 - 1, 5, 0], np.uint64)
    index = np.array([7, 2**40, 8, 0])
    together = uniform(keys, index)
    alone = [uniform(keys[i : i + 1], index[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


@pytest.mark.parametrize("vary", ["index", "seed"])
def test_the_numbers_are_uniform(vary: str) -> None:
    """Chi-square of 256 cells over 100,000 numbers, and of pairs of neighbours over 16 x 16 cells."""
    count = np.arange(100_000)
    keys, index = (np.zeros_like(count), count) if vary == "index" else (count, np.zeros_like(count))
    numbers = uniform(keys.astype(np.uint64), index)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    pairs = (numbers[:-1] * 16).astype(int) * 16 + (numbers[1:] * 16).astype(int)
    for cells in ((numbers * 256).astype(int), pairs):
        seen = np.bincount(cells, minlength=256)
        chi2 = float(((seen - len(cells) / 256) ** 2 / (len(cells) / 256)).sum())
        assert 255 - 5 * np.sqrt(510) < chi2 < 255 + 5 * np.sqrt(510)


def test_every_seed_has_its_own_key() -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**32]
    assert len({stream_key(seed) for seed in seeds}) == len(seeds)
    assert all(0 <= stream_key(seed) < 2**64 for seed in seeds)
    derived = {derived_key(seed, number) for seed in seeds for number in (-1, 0, 1, 2**40)}
    assert len(derived) == 24
