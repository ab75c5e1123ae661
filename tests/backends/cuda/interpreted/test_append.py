"""Append, and the formats of quantized caches, against torch's own conversions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pagedkv.api.errors import UnsupportedError
from pagedkv_cuda.kernels.append import append
from pagedkv_cuda.kernels.arguments import Cache
from pagedkv_cuda.kernels.jit_formats import decoded, encoded

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SLOTS = torch.tensor([37, -1, 16, 18, 63, -1])


def cache_of(dtype: torch.dtype, scales: str | None = None, dims: tuple[int, int] = (80, 64)) -> Cache:
    """Four blocks of 16 slots and two heads, strides as where two layers share a block; every byte 3."""
    raw = [torch.full((4, 2, 2, 16, dim * dtype.itemsize), 3, dtype=torch.uint8).view(dtype) for dim in dims]
    made = {
        None: (None, None),
        "token": (torch.full((4, 2, 16), 5.0), torch.full((4, 2, 16), 5.0)),
        "head": (torch.tensor([0.02, 0.5]), torch.tensor([0.03, 0.01])),
        "tensor": (torch.tensor(0.02), torch.tensor(0.01)),
    }[scales]
    return Cache(keys=raw[0][:, 1], values=raw[1][:, 1], k_scale=made[0], v_scale=made[1])


def new(dtype: torch.dtype, dims: tuple[int, int] = (80, 64)) -> list[torch.Tensor]:
    """k and v as slices of one tensor, a row of zeros and rows of padding among them."""
    both = torch.from_numpy(np.random.default_rng(0).standard_normal((8, 2 * sum(dims)), np.float32)).to(dtype)
    both[2] = 0.0
    both[[1, 5, 6, 7]] = float("nan")
    return [part.view(8, 2, -1) for part in both.split([2 * dims[0], 2 * dims[1]], 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_the_slots_change_and_they_hold_the_rows(dtype):
    cache, rows = cache_of(dtype), new(dtype)
    before = [held.clone() for held in (cache.keys, cache.values)]
    append(*rows, cache, SLOTS)
    for held, old, given in zip((cache.keys, cache.values), before, rows, strict=True):
        for row, slot in enumerate(SLOTS.tolist()):
            if slot >= 0:
                old[slot // 16, :, slot % 16] = given[row]
        assert torch.equal(held.view(torch.uint8), old.view(torch.uint8))


@pytest.mark.parametrize("scales", ["token", "head", "tensor"])
@pytest.mark.parametrize("stored", LARGEST)
def test_quantized_rows_are_those_of_torch(stored, scales):
    cache, rows = cache_of(stored, scales), new(torch.float32)
    append(*rows, cache, SLOTS)
    pairs = ((cache.keys, cache.k_scale, rows[0]), (cache.values, cache.v_scale, rows[1]))
    for held, scale, given in pairs:
        for row, slot in enumerate(SLOTS.tolist()):
            if slot < 0:
                continue
            at = (slot // 16, slice(None), slot % 16)
            expected = given[row].abs().amax(-1) / LARGEST[stored]
            expected[expected == 0] = 1.0
            used = scale[at] if scales == "token" else scale.expand(2)
            if scales == "token":
                torch.testing.assert_close(used, expected)
            wanted = (given[row] / used[:, None]).clamp(-LARGEST[stored], LARGEST[stored])
            wanted = wanted.round().to(stored) if stored == torch.int8 else wanted.to(stored)
            assert torch.equal(held[at].view(torch.uint8), wanted.view(torch.uint8))
        if scales == "token":
            untouched = torch.ones(64, dtype=torch.bool).index_fill(0, SLOTS[SLOTS >= 0], False).view(4, 16)
            assert (scale.transpose(0, 1)[:, untouched] == 5.0).all()


def test_a_slot_beyond_32_bits_is_reached():
    """One block number times a stride above 2^31 entries: a view over nothing stands for the cache."""
    storage = torch.zeros(1 << 20, dtype=torch.int8)
    keys = storage.as_strided((70_000, 1, 16, 64), (0, 0, 64, 1))
    k = torch.ones((1, 1, 64))
    far = (1 << 31) + 16 * 3 + 5  # the block's number alone is small, the slot is not
    append(
        k, k, Cache(keys=keys, values=keys, k_scale=torch.tensor(0.5), v_scale=torch.tensor(0.5)), torch.tensor([far])
    )
    assert (storage[5 * 64 : 6 * 64] == 2).all() and int(storage.count_nonzero()) == 64


def test_no_slots_is_no_launch():
    cache = cache_of(torch.float32)
    append(*new(torch.float32), cache, torch.empty(0, dtype=torch.int64))
    assert (cache.keys.view(torch.uint8) == 3).all()


@pytest.mark.parametrize(
    ("stored", "scales", "given", "reason"),
    [
        (torch.int8, None, torch.float16, "needs k_scale and v_scale"),
        (torch.float16, "head", torch.float16, "has no scales"),
        (torch.bfloat16, None, torch.float16, "make them one dtype"),
        (torch.float64, None, torch.float64, "give float16, bfloat16 or float32"),
    ],
)
def test_what_does_not_go_together_is_refused(stored, scales, given, reason):
    with pytest.raises(UnsupportedError, match=reason):
        append(*new(given), cache_of(stored, scales), SLOTS)


@triton.jit
def convert(x, bytes_, numbers, FORMAT: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(bytes_ + i, encoded(tl.load(x + i), 1.0, FORMAT))
    tl.store(numbers + i, decoded(tl.load(bytes_ + i), FORMAT, tl.float32))


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_fp8_is_rounded_and_read_as_torch_does(name, dtype):
    """Every code's own number, halfway to the next one and a little to either side, beyond the end, and NaN."""
    codes = torch.arange(127 if name == "e4m3" else 124, dtype=torch.uint8).view(dtype).float()
    middles = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([codes, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), torch.tensor([1e6, float("inf")])])
    x = torch.cat([x, -x, torch.tensor([float("nan")])])
    x = torch.cat([x, torch.zeros(2048 - len(x))])
    raw, numbers = torch.empty(2048, dtype=torch.uint8), torch.empty(2048)
    convert[(1,)](x, raw, numbers, FORMAT=name, N=2048)
    expected = x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    assert torch.equal(raw[: len(x)][~x.isnan()], expected.view(torch.uint8)[~x.isnan()])
    torch.testing.assert_close(numbers, expected.float(), rtol=0, atol=0, equal_nan=True)
