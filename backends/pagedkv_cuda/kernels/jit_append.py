"""The kernel that puts new keys and values into the cache."""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv_cuda.kernels.jit_formats import encoded, largest


@triton.jit(do_not_specialize=["count"])
def append_tile(
    k, v, keys, values, k_scale, v_scale, slots, count, k_t, v_t, k_b, k_h, k_n, v_b, v_h, v_n,
    ks_b, ks_h, ks_n, vs_b, vs_h, vs_n, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr,
    FORMAT: tl.constexpr, PER_TOKEN: tl.constexpr,
):  # fmt: skip
    """One KV head of BLOCK_T tokens. `count` tokens; *_t, *_b, *_h, *_n are strides by token, block, head, slot."""
    pid = tl.program_id(0)
    head = (pid % HEADS).to(tl.int64)
    token = (pid // HEADS) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slots + token, mask=token < count, other=-1).to(tl.int64)
    live = slot >= 0
    block = tl.where(live, slot // BLOCK_SIZE, 0)
    offset = tl.where(live, slot % BLOCK_SIZE, 0)
    source = token.to(tl.int64)
    put(
        k + source * k_t + head * DK, keys + block * k_b + head * k_h + offset * k_n,
        k_scale + block * ks_b + head * ks_h + offset * ks_n, live, DK, BLOCK_DK, FORMAT, PER_TOKEN,
    )  # fmt: skip
    put(
        v + source * v_t + head * DV, values + block * v_b + head * v_h + offset * v_n,
        v_scale + block * vs_b + head * vs_h + offset * vs_n, live, DV, BLOCK_DV, FORMAT, PER_TOKEN,
    )  # fmt: skip


@triton.jit
def put(
    source, target, scale_at, live, DIM: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
):  # fmt: skip
    """Copy rows [BLOCK_T, DIM] where `live`, in the cache's format."""
    d = tl.arange(0, BLOCK_D)
    mask = live[:, None] & (d < DIM)[None, :]
    x = tl.load(source[:, None] + d[None, :], mask=mask, other=0.0)
    if FORMAT == "plain":
        tl.store(target[:, None] + d[None, :], x.to(target.dtype.element_ty), mask=mask)
    else:
        x = x.to(tl.float32)
        if PER_TOKEN:
            scale = tl.div_rn(tl.max(tl.abs(x), 1), largest(FORMAT))
            scale = tl.where(scale > 0, scale, 1.0)  # a row of zeros
            wild = tl.max((x != x).to(tl.int32), 1) > 0  # a maximum may pass over NaN
            scale = tl.where(wild, float("nan"), scale)
            tl.store(scale_at, scale, mask=live)
        else:
            scale = tl.load(scale_at, mask=live, other=1.0)
        tl.store(target[:, None] + d[None, :], encoded(x, scale[:, None], FORMAT), mask=mask)
