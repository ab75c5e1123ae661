"""Small kernels that show what the interpreter does, alone in their module: it leaves its own names beside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bf16_work(a, b, product, total, narrow, N: tl.constexpr):
    """a, b [N, N] bfloat16: their product in float32, their sum, and the product rounded to bfloat16."""
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x, y = tl.load(a + i), tl.load(b + i)
    wide = tl.dot(x, y)
    tl.store(product + i, wide)
    tl.store(total + i, x + y)
    tl.store(narrow + i, wide.to(tl.bfloat16))


@triton.jit
def copy_from(source, target, at, N: tl.constexpr):
    """N entries of `source` from `at` on."""
    i = tl.arange(0, N)
    tl.store(target + i, tl.load(source + at + i))
