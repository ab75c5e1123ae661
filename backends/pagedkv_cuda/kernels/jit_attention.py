"""The kernels of attention: one tile of queries against one row's keys, and the merge of what splits left.

A tile is BLOCK_M rows: BLOCK_M // GROUP tokens of one batch row, times the GROUP query heads that share a KV head.

    rows of a tile      token 0: head 0 .. GROUP-1 | token 1: head 0 .. GROUP-1 | ... | unused
    keys of a split     [low + split * span, low + (split + 1) * span), cut at what the tile sees

A key that no row of the tile sees is never loaded, or selected out before it is multiplied, so whatever it holds stays
out of the result. The softmax runs in base 2. Sources: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022
and 2023 (tiles, splits over keys).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv_cuda.kernels.jit_formats import decoded

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
NEVER: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["row_first", "row_count", "span", "splits"])
def attend_tile(
    q, out, lse, part, part_lse, keys, values, k_scale, v_scale, cu_q, ctx_len, table, rows, sinks, alibi,
    row_first, row_count, span, splits, scale, softcap, q_t, k_b, k_h, k_n, v_b, v_h, v_n,
    ks_b, ks_h, ks_n, vs_b, vs_h, vs_n, table_r, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, UNIFORM: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    FORMAT: tl.constexpr, SCALED: tl.constexpr, DESCRIPTORS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One tile, one KV head, one split. With SPLIT the result goes to `part`, normalised, for `merge_splits`.

    `row_first`, `row_count`: the batch rows of this launch. UNIFORM: one tile a row. `scale` holds log2(e) unless
    softcap comes between. WINDOW 0: none.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    pid = tl.program_id(0)
    split = pid % splits
    head = (pid // splits) % KV_HEADS
    row, first = place_of(pid // splits // KV_HEADS, cu_q, row_first, row_count, TOKENS, UNIFORM)
    start = tl.load(cu_q + row)
    count = tl.load(cu_q + row + 1) - start
    if first < count:
        context = tl.load(ctx_len + row)
        m = tl.arange(0, BLOCK_M)
        token = first + m // GROUP
        q_head = (head * Q_HEADS + KV_HEADS - 1) // KV_HEADS + m % GROUP
        live = (m < TOKENS * GROUP) & (token < count) & (q_head * KV_HEADS < (head + 1) * Q_HEADS)
        position = context - count + token
        d = tl.arange(0, BLOCK_DK)
        at = (start + token).to(tl.int64)
        wanted = live[:, None] & (d < DK)[None, :]
        queries = tl.load(q + at[:, None] * q_t + q_head[:, None] * DK + d[None, :], mask=wanted, other=0.0)
        last = context - count + tl.minimum(first + TOKENS, count) - 1
        seen_from = tl.maximum(context - count + first - WINDOW + 1, 0) if WINDOW > 0 else 0
        seen_to = tl.minimum(context, last + 1) if CAUSAL else context
        low = seen_from // BLOCK_N * BLOCK_N + split * span
        slopes = tl.load(alibi + q_head, mask=live, other=0.0) if ALIBI else 0.0
        acc, top, total = scan(
            queries, keys, values, k_scale, v_scale, table + tl.load(rows + row).to(tl.int64) * table_r, head,
            low, tl.minimum(seen_to, low + span), seen_from, position, slopes, scale, softcap,
            k_b, k_h, k_n, v_b, v_h, v_n, ks_b, ks_h, ks_n, vs_b, vs_h, vs_n, DK, DV, BLOCK_DK, BLOCK_DV, BLOCK_SIZE,
            BLOCK_M, BLOCK_N, CAUSAL, WINDOW, SOFTCAP, ALIBI, FORMAT, SCALED, DESCRIPTORS,
        )  # fmt: skip
        sink = tl.load(sinks + q_head, mask=live, other=NEVER) if SINKS and not SPLIT else NEVER
        acc, denominator = normalised(acc, top, total, sink, SINKS and not SPLIT)
        place = at * Q_HEADS + q_head
        leave(acc, denominator, place * splits + split, place, live, out, lse, part, part_lse, DV, BLOCK_DV, SPLIT, LSE)


@triton.jit
def place_of(tile, cu_q, row_first, row_count, TOKENS: tl.constexpr, UNIFORM: tl.constexpr):
    """(batch row, its first token in this tile): the last row whose tiles start at or before `tile`.

    Row r's tiles start at (tokens before it) // TOKENS + (rows before it): room for all of its tokens, at most one
    tile too many.
    """
    low = 0
    first = 0
    if UNIFORM:
        low = tile
    else:
        before = tl.load(cu_q + row_first)
        high = row_count
        while high - low > 1:
            middle = (low + high) // 2
            starts = (tl.load(cu_q + row_first + middle) - before) // TOKENS + middle
            low = tl.where(starts <= tile, middle, low)
            high = tl.where(starts <= tile, high, middle)
        first = (tile - (tl.load(cu_q + row_first + low) - before) // TOKENS - low) * TOKENS
    return row_first + low, first


@triton.jit
def scan(
    queries, keys, values, k_scale, v_scale, table, head, low, high, seen_from, position, slopes, scale, softcap,
    k_b, k_h, k_n, v_b, v_h, v_n, ks_b, ks_h, ks_n, vs_b, vs_h, vs_n, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    FORMAT: tl.constexpr, SCALED: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Keys [low, high) in steps of BLOCK_N -> (sum of weighted values, largest score, sum of weights) of each row.

    A step whose keys come by descriptor is made of boxes, each from within one block and multiplied by itself: put
    together they would pass through registers once more.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    top = tl.full([BLOCK_M], NEVER, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    far = head.to(tl.int64)
    BOX: tl.constexpr = BLOCK_SIZE if DESCRIPTORS and BLOCK_SIZE < BLOCK_N else BLOCK_N
    for at in tl.range(low, high, BLOCK_N):
        scores = ()
        higher = top
        for i in tl.static_range(BLOCK_N // BOX):
            n, inside, block, slot = places(table, at + i * BOX, seen_from, high, BLOCK_SIZE, BOX)
            if DESCRIPTORS:
                page = page_of(table, at + i * BOX, seen_from, high, BLOCK_SIZE, BOX)
                k = box(keys, page, head, at, BLOCK_SIZE, BOX, BLOCK_DK)
            else:
                k = gathered(keys + block * k_b + far * k_h + slot * k_n, inside, DK, BLOCK_DK)
            s = tl.dot(queries, tl.trans(decoded(k, FORMAT, queries.dtype)), input_precision="ieee") * scale
            if SCALED:
                s *= tl.load(k_scale + block * ks_b + far * ks_h + slot * ks_n, mask=inside, other=0.0)[None, :]
            s = shaped(s, n, position, slopes, softcap, SOFTCAP, ALIBI)
            s = tl.where(visible(n, inside, position, CAUSAL, WINDOW), s, NEVER)
            higher = tl.maximum(higher, tl.max(s, 1))
            scores = scores + (s,)  # noqa: RUF005 (Triton's language has no stars)
        finite = tl.where(higher == NEVER, 0.0, higher)
        shrink = tl.exp2(top - finite)
        top = higher
        total *= shrink
        acc *= shrink[:, None]
        for i in tl.static_range(BLOCK_N // BOX):
            n, inside, block, slot = places(table, at + i * BOX, seen_from, high, BLOCK_SIZE, BOX)
            p = tl.exp2(scores[i] - finite[:, None])
            total += tl.sum(p, 1)
            if SCALED:
                p *= tl.load(v_scale + block * vs_b + far * vs_h + slot * vs_n, mask=inside, other=0.0)[None, :]
            if DESCRIPTORS:
                page = page_of(table, at + i * BOX, seen_from, high, BLOCK_SIZE, BOX)
                v = box(values, page, head, at, BLOCK_SIZE, BOX, BLOCK_DV)
                v = tl.where(inside[:, None], decoded(v, FORMAT, queries.dtype), 0.0)
            else:
                v = gathered(values + block * v_b + far * v_h + slot * v_n, inside, DV, BLOCK_DV)
                v = decoded(v, FORMAT, queries.dtype)
            acc = tl.dot(p.to(queries.dtype), v, acc, input_precision="ieee")
    return acc, top, total


@triton.jit
def places(table, at, seen_from, high, BLOCK_SIZE: tl.constexpr, BOX: tl.constexpr):
    """(BOX keys from `at` on, whether each is seen, its block, its slot there)."""
    n = at + tl.arange(0, BOX)
    inside = (n >= seen_from) & (n < high)
    return n, inside, tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64), n % BLOCK_SIZE


@triton.jit
def page_of(table, at, seen_from, high, BLOCK_SIZE: tl.constexpr, BOX: tl.constexpr):
    """The block of the box at `at`; block 0 where none of its keys is seen."""
    return tl.load(table + at // BLOCK_SIZE, mask=(at < high) & (at + BOX > seen_from), other=0)


@triton.jit
def gathered(at, inside, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [BLOCK_N, BLOCK_D] from where `at` [BLOCK_N] points; zeros where not `inside`."""
    d = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (d < DIM)[None, :] if DIM < BLOCK_D else inside[:, None]
    return tl.load(at[:, None] + d[None, :], mask=mask, other=0)


@triton.jit
def box(cache, page, head, at, BLOCK_SIZE: tl.constexpr, BOX: tl.constexpr, BLOCK_D: tl.constexpr):
    """BOX rows of block `page` by one descriptor load; entries past the head's dim arrive as zeros."""
    return cache.load([page, head, at % BLOCK_SIZE, 0]).reshape(BOX, BLOCK_D)


@triton.jit
def shaped(s, n, position, slopes, softcap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores in base 2: c tanh(s / c), then the slope times the distance. tanh x = 1 - 2 / (exp(2 x) + 1)."""
    if SOFTCAP:
        s = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / softcap)) + 1.0))
    if ALIBI:
        s += (slopes * LOG2E)[:, None] * (n[None, :] - position[:, None]).to(tl.float32)
    return s


@triton.jit
def visible(n, inside, position, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which query of the tile sees which key."""
    seen = inside[None, :]
    if CAUSAL:
        seen = seen & (n[None, :] <= position[:, None])
    if WINDOW > 0:
        seen = seen & (n[None, :] > position[:, None] - WINDOW)
    return seen


@triton.jit
def normalised(acc, top, total, sink, SINKS: tl.constexpr):
    """(values over their denominator, its logarithm in base 2); zeros and minus infinity where nothing is seen."""
    if SINKS:
        higher = tl.maximum(top, sink * LOG2E)
        finite = tl.where(higher == NEVER, 0.0, higher)
        shrink = tl.exp2(top - finite)
        acc *= shrink[:, None]
        total = total * shrink + tl.exp2(sink * LOG2E - finite)
        top = higher
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    return acc, tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), NEVER)


@triton.jit
def leave(
    acc, denominator, part_at, out_at, live, out, lse, part, part_lse, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLIT: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Store a tile's result where it belongs."""
    d = tl.arange(0, BLOCK_DV)
    mask = live[:, None] & (d < DV)[None, :]
    if SPLIT:
        tl.store(part + part_at[:, None] * DV + d[None, :], acc, mask=mask)
        tl.store(part_lse + part_at, denominator, mask=live)
    else:
        tl.store(out + out_at[:, None] * DV + d[None, :], acc.to(out.dtype.element_ty), mask=mask)
        if LSE:
            tl.store(lse + out_at, denominator * LN2, mask=live)


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_splits(
    out, lse, part, part_lse, cu_q, sinks, rows, splits, Q_HEADS: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, AT_ONCE: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One query head of one token: the splits' results, weighted by the shares of their denominators.

    part [tokens, Q_HEADS, splits, DV] float32, part_lse [tokens, Q_HEADS, splits] in base 2; the first `rows` rows.
    """
    pid = tl.program_id(0).to(tl.int64)
    if pid < tl.load(cu_q + rows).to(tl.int64) * Q_HEADS:
        d = tl.arange(0, BLOCK_DV)
        acc = tl.zeros([BLOCK_DV], tl.float32)
        top = tl.load(sinks + pid % Q_HEADS) * LOG2E if SINKS else tl.full([], NEVER, tl.float32)
        total = tl.where(top == NEVER, 0.0, 1.0)
        for first in tl.range(0, splits, AT_ONCE):
            s = first + tl.arange(0, AT_ONCE)
            logs = tl.load(part_lse + pid * splits + s, mask=s < splits, other=NEVER)
            known = (logs > NEVER)[:, None] & (d < DV)[None, :]
            parts = tl.load(part + (pid * splits + s)[:, None] * DV + d[None, :], mask=known, other=0.0)
            higher = tl.maximum(top, tl.max(logs, 0))
            finite = tl.where(higher == NEVER, 0.0, higher)
            shares = tl.exp2(logs - finite)
            shrink = tl.exp2(top - finite)
            acc = acc * shrink + tl.sum(parts * shares[:, None], 0)
            total = total * shrink + tl.sum(shares, 0)
            top = higher
        safe = tl.where(total > 0, total, 1.0)
        tl.store(out + pid * DV + d, (acc / safe).to(out.dtype.element_ty), mask=d < DV)
        if LSE:
            tl.store(lse + pid, tl.where(total > 0, (top + tl.log2(safe)) * LN2, NEVER))
