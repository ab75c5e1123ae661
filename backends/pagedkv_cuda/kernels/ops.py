"""Launches the fused ops; each means what its namesake in `pagedkv.ops.reference` means."""

from __future__ import annotations

import torch

from pagedkv_cuda.kernels.grids import one_axis, power_of_two
from pagedkv_cuda.kernels.jit_ops import gate_block, norm_row, turn_heads

MOST_AT_ONCE = 4096
"""Entries of a vector that one program holds at a time."""
GATE_BLOCK = 1024
HEADS_AT_ONCE = 16


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) times weight, of x [T, D] or [T, H, D] whose last dimension is contiguous.

    A float32 weight under narrower x is applied before rounding (the attribute `wide`), another after it.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[1] if x.ndim == 3 else 1
    stride_h = x.stride(1) if x.ndim == 3 else 0
    _norm(x, x, weight, out, eps, heads, stride_h, add=False)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place, then rms_norm of the sum. x, residual [T, D]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, residual, weight, out, eps, 1, 0, add=True)
    return out


def _norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, heads: int,
    stride_h: int, *, add: bool,
) -> None:  # fmt: skip
    dim = x.shape[-1]
    rows = x.numel() // dim if dim else 0
    if rows == 0:
        return
    block = min(power_of_two(dim), MOST_AT_ONCE)
    norm_row[one_axis(rows, "norm")](
        x, residual, weight, out, eps, x.stride(0), stride_h, residual.stride(0), DIM=dim, HEADS=heads, BLOCK=block,
        ADD=add, WIDE=weight.dtype != x.dtype, num_warps=_warps(block),
    )  # fmt: skip


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn the first R entries of each head in place, entry i paired with i + R/2.

    q [T, q_heads, D] and k [T, kv_heads, D] may be slices of one tensor; cos, sin [T, R/2] float32, contiguous.
    """
    tokens, half = cos.shape
    if tokens == 0:
        return
    turn_heads[one_axis(tokens, "rope")](
        q, k, cos, sin, q.stride(0), q.stride(1), k.stride(0), k.stride(1), Q_HEADS=q.shape[1], KV_HEADS=k.shape[1],
        HALF=half, BLOCK_H=min(HEADS_AT_ONCE, power_of_two(q.shape[1], 1)), BLOCK=power_of_two(half, 1), num_warps=4,
    )  # fmt: skip


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x = [gate, up] [T, 2 I] -> [T, I]."""
    return _gated(x, gelu=False)


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up of x = [gate, up] [T, 2 I] -> [T, I], gelu by its tanh form."""
    return _gated(x, gelu=True)


def _gated(x: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    tokens, dim = x.shape[0], x.shape[1] // 2
    out = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(power_of_two(dim), GATE_BLOCK)
        grid = one_axis(tokens * -(-dim // block), "gated activation")
        gate_block[grid](x, out, x.stride(0), DIM=dim, BLOCK=block, GELU=gelu, num_warps=_warps(block))
    return out


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))
