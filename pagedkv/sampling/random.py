"""Random numbers that are a pure function of (stream key, index): nothing to save, restore or share between rows.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_BUMPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL
_MASK64 = (1 << 64) - 1


def philox(counter: UInt64, key: UInt64) -> UInt64:
    """Ten rounds of Philox4x32 on counters [4, n] with keys [2, n], 32-bit words held in uint64: [4, n]."""
    even, odd = counter[0::2], counter[1::2]  # (c0, c2) are multiplied, (c1, c3) are mixed in
    for round_key in (key + _BUMPS) & _LOW:
        product = even * _MULTIPLIERS
        high, low = product >> _HALF, product & _LOW
        even, odd = high[::-1] ^ odd ^ round_key, low[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniform(keys: UInt64, index: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The `index`-th number of each stream: keys [n], index [n] -> [n], multiples of 2**-53 in [0, 1)."""
    position = index.astype(np.uint64)
    nothing = np.zeros_like(position)
    words = philox(np.stack([position & _LOW, position >> _HALF, nothing, nothing]), _halves(keys))
    bits = ((words[0] << _HALF) | words[1]) >> np.uint64(11)
    numbers: npt.NDArray[np.float64] = bits * 2.0**-53
    return numbers


def stream_key(seed: int) -> int:
    """The key of a user's seed: its 64 bits, so that every seed has its own stream and negative ones are fine."""
    return seed & _MASK64


def derived_key(seed: int, number: int) -> int:
    """The key of stream `number` of the engine seed `seed`, for requests without a seed of their own.

    It is a block of another counter space (third word 1) than the draws, so it is independent of every draw of `seed`.
    """
    return _block(seed, number, 1)


def sample_key(key: int, sample: int) -> int:
    """The key of sample 0, 1, ... of a request whose own key is `key`, which is sample 0's (third word 2)."""
    return _block(key, sample, 2) if sample else key


def _block(seed: int, number: int, space: int) -> int:
    number &= _MASK64
    counter = np.array([[number & 0xFFFFFFFF], [number >> 32], [space], [0]], np.uint64)
    words = philox(counter, _halves(np.array([seed & _MASK64], np.uint64)))[:, 0]
    return int(words[0]) << 32 | int(words[1])


def _halves(keys: UInt64) -> UInt64:
    return np.stack([keys & _LOW, keys >> _HALF])
