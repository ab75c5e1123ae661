"""The kit's words on quantized numbers, against torch's conversions and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.conformance import quantized
from pagedkv.conformance.loopback.pool import FP8, to_stored
from pagedkv.conformance.quantized import FLOAT8, TOKEN_HEAD

TORCH = {"fp8_e4m3fn/tensor": torch.float8_e4m3fn, "fp8_e5m2/tensor": torch.float8_e5m2}
ONE = np.ones((1, 1), np.float32)


def numbers(kv_dtype: str) -> np.ndarray:
    """Every code's number, halfway between neighbours and a little to either side, beyond the end, and some others."""
    every = torch.arange(256, dtype=torch.uint8).view(TORCH[kv_dtype]).double().numpy()
    finite = np.unique(every[np.isfinite(every)])
    middles = (finite[1:] + finite[:-1]) / 2
    around = [middles, middles * (1 + 2**-20), middles * (1 - 2**-20)]
    some = np.random.default_rng(0).standard_normal(5000) * 20
    ends = [-0.0, 1e6, -1e6, np.inf, -np.inf]
    return np.concatenate([finite, *around, some, ends]).astype(np.float32)


@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_bytes_of_8_bit_floats_are_those_of_torch(kv_dtype: str) -> None:
    x, most = numbers(kv_dtype), quantized.largest(kv_dtype)
    wanted = torch.from_numpy(x).clamp(-most, most).to(TORCH[kv_dtype]).view(torch.uint8).numpy()
    assert np.array_equal(quantized.codes(kv_dtype, x[None, None], ONE)[0, 0], wanted)
    assert np.array_equal(to_stored(x, kv_dtype), wanted)


@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_every_byte_is_read_as_torch_reads_it(kv_dtype: str) -> None:
    every = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(every).view(TORCH[kv_dtype]).double().numpy()
    read = quantized.decoded(kv_dtype, every[None, None], ONE)[0, 0]
    assert np.array_equal(read, wanted, equal_nan=True)
    table, finite = FP8[kv_dtype]
    assert np.array_equal(table[:finite], wanted[:finite]) and np.isnan(table[finite:128]).all()


@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_nan_is_a_byte_that_is_nan(kv_dtype: str) -> None:
    byte = quantized.codes(kv_dtype, np.full((1, 1, 1), np.nan, np.float32), ONE)
    assert np.isnan(quantized.decoded(kv_dtype, byte, ONE)).all()


def test_int8_by_hand() -> None:
    x = np.array([[[12.7, -6.35, 0.05, 0.151]], [[0, 0, 0, 0]], [[-254.0, 1.0, 3.0, 127.0]]], np.float32)
    scale = quantized.token_scales(x)
    assert scale.tolist() == [[np.float32(12.7) / np.float32(127)], [1.0], [2.0]]
    codes = quantized.codes(TOKEN_HEAD, x, scale)
    assert codes.tolist() == [[[127, -64, 0, 2]], [[0, 0, 0, 0]], [[-127, 0, 2, 64]]]  # ties: -63.5, 0.5, 1.5, 63.5
    assert np.allclose(quantized.decoded(TOKEN_HEAD, codes, scale)[0, 0], [12.7, -6.4, 0, 0.2])


def test_a_row_that_is_not_finite_is_read_so() -> None:
    x = np.array([[[1.0, np.nan, 2.0]], [[np.inf, 1.0, 0.0]]], np.float32)
    scale = quantized.token_scales(x)
    with np.errstate(invalid="ignore"):
        read = quantized.decoded(TOKEN_HEAD, quantized.codes(TOKEN_HEAD, x, scale), scale)
    assert not np.isfinite(read).any()


@pytest.mark.parametrize(("kv_dtype", "x", "near"), [
    (TOKEN_HEAD, 3.5, True), (TOKEN_HEAD, 3.4, False), (TOKEN_HEAD, -2.5001, True),
    ("fp8_e4m3fn/tensor", 1.0625, True), ("fp8_e4m3fn/tensor", 1.07, False), ("fp8_e5m2/tensor", 1.125, True),
])  # fmt: skip
def test_what_hangs_on_the_last_bit_is_found(kv_dtype: str, x: float, near: bool) -> None:
    assert bool(quantized.unsettled(kv_dtype, np.full((1, 1, 1), x, np.float32), ONE).all()) is near
