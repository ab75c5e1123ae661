"""Quantized caches by the contract's own words, in float64: the codes that are stored and the numbers that are read.

    "int8/token_head"                      -127..127; a scale for each token and KV head, max|x| / 127, made at append
    "fp8_e4m3fn/tensor", "fp8_e5m2/tensor" 8-bit floats; a scale for each KV head of a layer, bound beforehand

A code is the number nearest to x / scale, ties to even, the largest one where that is exceeded; it is read as
code x scale. Written from the formats' definition (Micikevicius et al., FP8 formats for deep learning, 2022), with no
table and no conversion of a library, so that it shares no mistake with a backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.conformance.oracle import Floats

Float32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

INT8_LARGEST = 127
MARGIN = 1e-3
"""So near to a tie, as a share of a step, the float32 quotient of another division may go the other way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8:
    """Sign, exponent, mantissa: the bits of the mantissa, the exponent's bias, the largest finite number."""

    mantissa: int
    bias: int
    largest: float


FLOAT8 = {
    "fp8_e4m3fn/tensor": Float8(mantissa=3, bias=7, largest=448.0),
    "fp8_e5m2/tensor": Float8(mantissa=2, bias=15, largest=57344.0),
}
TOKEN_HEAD = "int8/token_head"
QUANTIZED = (TOKEN_HEAD, *FLOAT8)
"""The contract's quantized KV dtypes."""

SCALES = ("k_scale", "v_scale")
"""What is bound to a layer whose KV dtype has bound scales."""


def largest(kv_dtype: str) -> float:
    """The largest number that a code stands for."""
    return FLOAT8[kv_dtype].largest if kv_dtype in FLOAT8 else float(INT8_LARGEST)


def token_scales(x: Float32) -> Float32:
    """Scales [..., heads] of rows x [..., heads, dim]: 1 where all of a row is zero."""
    made = np.abs(x).max(-1) / np.float32(INT8_LARGEST)
    return np.where(made == 0, np.float32(1), made).astype(np.float32)


def codes(kv_dtype: str, x: Float32, scale: Float32) -> npt.NDArray[Any]:
    """What is stored of x [..., heads, dim] under scale [..., heads]: int8, or the bytes of 8-bit floats."""
    return _code_numbers(kv_dtype)(_quotient(x, scale))


def decoded(kv_dtype: str, stored: npt.NDArray[Any], scale: Float32) -> Floats:
    """What is read of codes [..., heads, dim] under scale [..., heads]."""
    numbers = stored.astype(np.float64) if kv_dtype == TOKEN_HEAD else _numbers(FLOAT8[kv_dtype], stored)
    return numbers * np.asarray(scale, np.float64)[..., None]


def unsettled(kv_dtype: str, x: Float32, scale: Float32) -> Bools:
    """Where x / scale lies so near to a tie that two right divisions may store two neighbours."""
    y = np.abs(_quotient(x, scale).astype(np.float64))
    steps = y if kv_dtype == TOKEN_HEAD else y / _step(FLOAT8[kv_dtype], y)
    return np.abs(steps - np.floor(steps) - 0.5) < MARGIN


def _quotient(x: Float32, scale: Float32) -> Float32:
    """x / scale as float32 divides."""
    with np.errstate(invalid="ignore", over="ignore"):
        return (np.asarray(x, np.float32) / np.asarray(scale, np.float32)[..., None]).astype(np.float32)


def _code_numbers(kv_dtype: str) -> Callable[[Float32], npt.NDArray[Any]]:
    if kv_dtype == TOKEN_HEAD:
        return lambda y: np.clip(np.rint(np.nan_to_num(y)), -INT8_LARGEST, INT8_LARGEST).astype(np.int8)
    return lambda y: _bytes(FLOAT8[kv_dtype], y.astype(np.float64))


def _exponent(kind: Float8, size: Floats) -> npt.NDArray[np.int64]:
    """The exponent of numbers from 0 on; that of the smallest normal one below it."""
    found: npt.NDArray[np.int64] = np.maximum(np.frexp(size)[1] - 1, 1 - kind.bias).astype(np.int64)
    return found


def _step(kind: Float8, size: Floats) -> Floats:
    """The distance between neighbours at numbers from 0 on."""
    return np.ldexp(1.0, _exponent(kind, size) - kind.mantissa)


def _bytes(kind: Float8, y: Floats) -> npt.NDArray[np.uint8]:
    """Float64 numbers rounded to 8 bits, the largest finite one where that is exceeded, NaN as NaN."""
    size = np.minimum(np.nan_to_num(np.abs(y), nan=0.0), kind.largest)
    step = _step(kind, size)
    rounded = np.rint(size / step) * step
    exponent = _exponent(kind, rounded)
    ones = (rounded / np.ldexp(1.0, exponent - kind.mantissa)).astype(np.int64)  # the mantissa, its leading 1 included
    normal = ones >> kind.mantissa
    code = ones + ((exponent + kind.bias - 1) << kind.mantissa) * normal
    code = np.where(np.isnan(y), 0x7F, code)
    return (code | np.where(np.signbit(y), 0x80, 0)).astype(np.uint8)


def _numbers(kind: Float8, stored: npt.NDArray[Any]) -> Floats:
    """The numbers of bytes, NaN and infinity included."""
    byte = stored.astype(np.int64)
    exponent, mantissa = (byte & 0x7F) >> kind.mantissa, byte & ((1 << kind.mantissa) - 1)
    ones = mantissa + np.where(exponent > 0, 1 << kind.mantissa, 0)
    number = np.ldexp(ones.astype(np.float64), np.maximum(exponent, 1) - kind.bias - kind.mantissa)
    past = number > kind.largest  # e4m3 has NaN there, e5m2 infinity and then NaN
    infinite = past & (mantissa == 0) & (kind.mantissa == 2)
    number = np.where(past, np.where(infinite, np.inf, np.nan), number)
    return np.where(byte & 0x80, -number, number)
