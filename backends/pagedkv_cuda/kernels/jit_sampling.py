"""The kernels of sampling: one program a row, the vocabulary in steps of BLOCK, nothing sorted.

A logit's *rank key* is its float32 bits as an unsigned number in the same order, so that the k-th largest logit, or the
one that completes a mass of top_p, is found exactly by setting 32 bits from the highest down.
Tokens rank by (logit down, id up): a tie at the edge keeps the lower ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEVER: tl.constexpr = tl.constexpr(float("-inf"))
LOWEST: tl.constexpr = tl.constexpr(0x00800000)  # the rank key just above that of minus infinity


@triton.jit
def greedy_row(logits, ids, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest id of the largest logit; -1 with a NaN in the row, or nothing above minus infinity."""
    row = tl.program_id(0).to(tl.int64)
    best, top, spoiled = largest_of(logits + row * stride, V, BLOCK)
    tl.store(ids + row, tl.where(spoiled | (top == NEVER), -1, best))


@triton.jit
def largest_of(at, V: tl.constexpr, BLOCK: tl.constexpr):
    """(lowest id of the largest logit, that logit, whether the row holds a NaN)."""
    top = NEVER
    best = 0
    nans = 0
    for first in tl.range(0, V, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(at + i, mask=i < V, other=NEVER).to(tl.float32)
        nans += tl.sum((x != x).to(tl.int32), 0)
        high = tl.max(x, 0)
        where = tl.min(tl.where(x == high, i, V), 0)
        best = tl.where(high > top, where, best)
        top = tl.maximum(top, high)
    return best, top, nans > 0


@triton.jit
def key_of(x):
    """float32 as a number of 32 bits, unsigned in int64, that rises with it; -0 counts as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -0x80000000).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def above(at, key, top, inverse, floor, V: tl.constexpr, BLOCK: tl.constexpr):
    """(how many, mass) of the tokens whose key is at least `key` and `floor`; mass is the sum of exp((x - top) / T)."""
    count = 0
    mass = 0.0
    for first in tl.range(0, V, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(at + i, mask=i < V, other=NEVER).to(tl.float32)
        in_it = (i < V) & (key_of(x) >= key) & (key_of(x) >= floor)
        count += tl.sum(in_it.to(tl.int32), 0)
        mass += tl.sum(tl.where(in_it, tl.exp((x - top) * inverse), 0.0), 0)
    return count, mass


@triton.jit(do_not_specialize_on_alignment=["numbers", "temperatures", "top_ks", "top_ps"])  # parts of one tensor
def sample_row(logits, numbers, temperatures, top_ks, top_ps, ids, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    """Top-k, then top-p of what is left, then the draw in the order of ids; temperature 0 is greedy."""
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    best, top, spoiled = largest_of(at, V, BLOCK)
    temperature = tl.load(temperatures + row)
    chosen = tl.where(spoiled | (top == NEVER), -1, best)
    if (chosen >= 0) & (temperature > 0) & (top < float("inf")):
        inverse = 1.0 / temperature
        k = tl.load(top_ks + row)
        p = tl.load(top_ps + row)
        floor = tl.full([], LOWEST, tl.int64)
        spare = tl.full([], V, tl.int32)
        if k < V:
            floor, spare = edge_by_count(at, k, top, inverse, V, BLOCK)
        if p < 1.0:
            floor, spare = edge_by_mass(at, p, floor, spare, top, inverse, V, BLOCK)
        chosen = drawn(at, tl.load(numbers + row), floor, spare, top, inverse, best, V, BLOCK)
    tl.store(ids + row, chosen)


@triton.jit
def edge_by_count(at, k, top, inverse, V: tl.constexpr, BLOCK: tl.constexpr):
    """(key of the k-th largest logit, how many of the tokens at that key are kept); minus infinity is never kept."""
    key = tl.zeros([], tl.int64)
    for bit in range(32):
        trial = key | (tl.full([], 1, tl.int64) << (31 - bit))
        count, _mass = above(at, trial, top, inverse, 0, V, BLOCK)
        key = tl.where(count >= k, trial, key)
    higher, _mass = above(at, key + 1, top, inverse, 0, V, BLOCK)
    return tl.maximum(key, LOWEST), tl.where(key < LOWEST, V, k - higher)


@triton.jit
def edge_by_mass(at, p, floor, spare, top, inverse, V: tl.constexpr, BLOCK: tl.constexpr):
    """The same for the fewest most probable tokens that hold p of the mass from `floor` on.

    Of the tokens at `floor` itself only `spare` count.
    """
    at_floor = mass_of(floor, top, inverse)
    count, _mass = above(at, floor, top, inverse, floor, V, BLOCK)
    inner, mass = above(at, floor + 1, top, inverse, floor, V, BLOCK)
    wanted = tl.maximum(p * (mass + tl.minimum(spare, count - inner) * at_floor), 1e-30)  # the first always stays
    key = floor
    if mass >= wanted:
        low = floor
        for bit in range(32):
            trial = low + (tl.full([], 1, tl.int64) << (31 - bit))
            _count, mass = above(at, trial, top, inverse, floor, V, BLOCK)
            low = tl.where(mass >= wanted, trial, low)
        key = low
        spare = tl.full([], V, tl.int32)
    _count, mass = above(at, key + 1, top, inverse, floor, V, BLOCK)
    fewest = tl.ceil((wanted - mass) / tl.maximum(mass_of(key, top, inverse), 1e-30))
    return key, tl.minimum(spare, tl.maximum(tl.minimum(fewest, V), 1.0).to(tl.int32))


@triton.jit
def mass_of(key, top, inverse):
    """exp((x - top) / T) of the logit with this key."""
    bits = tl.where(key >= 0x80000000, key - 0x80000000, (~key) & 0xFFFFFFFF)
    return tl.exp((bits.to(tl.uint32).to(tl.float32, bitcast=True) - top) * inverse)


@triton.jit
def drawn(at, number, floor, spare, top, inverse, best, V: tl.constexpr, BLOCK: tl.constexpr):
    """The first kept id whose cumulated mass exceeds number times the whole; `best` if rounding leaves none."""
    higher, mass = above(at, floor + 1, top, inverse, 0, V, BLOCK)
    count, _mass = above(at, floor, top, inverse, 0, V, BLOCK)
    goal = number * (mass + tl.minimum(spare, count - higher) * mass_of(floor, top, inverse))
    chosen = tl.full([], -1, tl.int32)
    last = best
    before = 0.0
    ties = 0
    for first in tl.range(0, V, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(at + i, mask=i < V, other=NEVER).to(tl.float32)
        key = key_of(x)
        tie = (i < V) & (key == floor)
        place = ties + tl.cumsum(tie.to(tl.int32), 0)
        kept = (i < V) & ((key > floor) | (tie & (place <= spare)))
        sums = before + tl.cumsum(tl.where(kept, tl.exp((x - top) * inverse), 0.0), 0)
        found = tl.min(tl.where(kept & (sums > goal), i, V), 0)
        chosen = tl.where((chosen < 0) & (found < V), found, chosen)
        last = tl.maximum(tl.max(tl.where(kept, i, -1), 0), tl.where(first == 0, -1, last))
        ties += tl.sum(tie.to(tl.int32), 0)
        before = tl.max(sums, 0)
    return tl.where(chosen < 0, last, chosen)
