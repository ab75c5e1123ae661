"""The kernels of the fused ops. Each rounds where its reference in `pagedkv.ops` does."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_row(
    x, residual, weight, out, eps, x_t, x_h, residual_t, DIM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One vector: x / sqrt(mean(x^2) + eps) times weight; with ADD x is added to `residual` in place first.

    WIDE: the weight is float32 and applied before rounding. Rows are (token, head); out is contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    source = x + (row // HEADS) * x_t + (row % HEADS) * x_h
    squares = tl.zeros([BLOCK], tl.float32)
    for at in tl.range(0, DIM, BLOCK):
        d = at + tl.arange(0, BLOCK)
        mask = d < DIM
        part = tl.load(source + d, mask=mask, other=0.0)
        if ADD:
            held = tl.load(residual + row * residual_t + d, mask=mask, other=0.0)
            part = (part.to(tl.float32) + held.to(tl.float32)).to(x.dtype.element_ty)
            tl.store(residual + row * residual_t + d, part, mask=mask)
        squares += part.to(tl.float32) * part.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / DIM + eps)
    for at in tl.range(0, DIM, BLOCK):
        d = at + tl.arange(0, BLOCK)
        mask = d < DIM
        if ADD:
            part = tl.load(residual + row * residual_t + d, mask=mask, other=0.0)
        else:
            part = tl.load(source + d, mask=mask, other=0.0)
        w = tl.load(weight + d, mask=mask, other=0.0).to(tl.float32)
        scaled = part.to(tl.float32) * factor
        if not WIDE:
            scaled = scaled.to(x.dtype.element_ty).to(tl.float32)
        tl.store(out + row * DIM + d, (scaled * w).to(out.dtype.element_ty), mask=mask)


@triton.jit
def turn_heads(
    q, k, cos, sin, q_t, q_h, k_t, k_h, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every head of one token, of q and of k, turned in place."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    c = tl.load(cos + token * HALF + i, mask=i < HALF, other=1.0)
    s = tl.load(sin + token * HALF + i, mask=i < HALF, other=0.0)
    for first in tl.range(0, Q_HEADS, BLOCK_H):
        turn(q + token * q_t, first, c, s, q_h, Q_HEADS, HALF, BLOCK_H, BLOCK)
    for first in tl.range(0, KV_HEADS, BLOCK_H):
        turn(k + token * k_t, first, c, s, k_h, KV_HEADS, HALF, BLOCK_H, BLOCK)


@triton.jit
def turn(
    x, first, c, s, x_h, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entry i paired with i + HALF of BLOCK_H heads."""
    head = first + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK)
    at = x + head[:, None] * x_h + i[None, :]
    mask = (head < HEADS)[:, None] & (i < HALF)[None, :]
    left = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (left * c[None, :] - right * s[None, :]).to(x.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (right * c[None, :] + left * s[None, :]).to(x.dtype.element_ty), mask=mask)


@triton.jit
def gate_block(x, out, x_t, DIM: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """BLOCK entries of one token: gate / (1 + exp(-z)), rounded, times up; z = gate, or what gives gelu's tanh form."""
    blocks: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    pid = tl.program_id(0).to(tl.int64)
    token = pid // blocks
    d = (pid % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    mask = d < DIM
    gate = tl.load(x + token * x_t + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + token * x_t + DIM + d, mask=mask, other=0.0).to(tl.float32)
    z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate  # 2 sqrt(2 / pi)
    active = (gate / (1.0 + tl.exp(-z))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * DIM + d, (active * up).to(out.dtype.element_ty), mask=mask)
