"""What is stored in a cache, in kernels: quantized to bytes and back.

FORMAT is "plain" (the dtype itself), "int8", "e5m2", "e4m3" (bytes, decoded here) or "e4m3_native" (the same bytes,
decoded by 8.9 and up).
An fp8 number is sign, exponent, mantissa: e4m3 1-4-3 with bias 7 and no infinity, e5m2 1-5-2 with bias 15.
Source of the formats: Micikevicius et al., FP8 formats for deep learning, 2022.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decoded(x, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Stored entries as numbers of DTYPE, exact; their scale is not in it."""
    if FORMAT == "e5m2":
        x = (x.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    elif FORMAT == "e4m3":
        code = x.to(tl.int16)
        bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
        bits = tl.where((code & 0x7F) == 0x7F, 0x7E00, bits.to(tl.int32)).to(tl.int16)
        x = bits.to(tl.float16, bitcast=True) * 256.0
    elif FORMAT == "e4m3_native":
        x = x.to(tl.float8e4nv, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def rounded(x):
    """Nearest whole number, ties to even, for |x| < 2^22: what adding 1.5 * 2^23 leaves of a float32."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def float8_code(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The byte of float32 `x`, |x| at most the format's largest, rounded to nearest even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    low: tl.constexpr = 23 - MANTISSA
    even = size + ((1 << (low - 1)) - 1) + ((size >> low) & 1)
    code = (even >> low) - ((127 - BIAS) << MANTISSA)
    small = rounded(tl.abs(x) * (1 << (BIAS - 1 + MANTISSA))).to(tl.int32)
    code = tl.where(size < ((128 - BIAS) << 23), small, code)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def largest(FORMAT: tl.constexpr):
    """The largest number that the format holds."""
    return 127.0 if FORMAT == "int8" else 448.0 if FORMAT == "e4m3" else 57344.0


@triton.jit
def encoded(x, scale, FORMAT: tl.constexpr):
    """float32 `x` / scale as the format's codes, what is too large as the largest."""
    top = largest(FORMAT)
    y = tl.div_rn(x, scale)
    y = tl.where(y > top, top, tl.where(y < -top, -top, y))
    if FORMAT == "int8":
        code = rounded(y).to(tl.int8)
    elif FORMAT == "e4m3":
        code = float8_code(y, 3, 7)
    else:
        code = float8_code(y, 2, 15)
    return code
