"""One sequence computed in different ways: at once, in chunks, from cached blocks, token by token (U90)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from pagedkv.conformance.kit import Kit
from pagedkv.conformance.rig import Rig, Seq

pytestmark = pytest.mark.level("core")

CUTS: dict[str, Callable[[int], list[int]]] = {
    "within-a-block": lambda size: [size // 2 + 1],
    "at-a-block": lambda size: [size],
    "last-token": lambda size: [3 * size + 1],
    "many": lambda size: [1, size - 1, size, size + 1, 2 * size + 2],
    "token-by-token": lambda size: list(range(1, min(3 * size, 40))),
}


def in_chunks(rig: Rig, seq: Seq, cuts: list[int], layer: int | None = None) -> np.ndarray:
    """Every position's output, the sequence computed from cut to cut."""
    bounds = sorted({0, *cuts, seq.length} & set(range(seq.length + 1)))
    parts = [rig.step((seq, high, high - low), layer=layer) for low, high in itertools.pairwise(bounds)]
    return np.concatenate(parts)


@pytest.mark.law("chunks: a prompt in chunks gives what it gives at once")
@pytest.mark.parametrize("cuts", CUTS)
def test_chunked_equals_unchunked(kit: Kit, cuts: str) -> None:
    rig = kit.rig()
    seq = rig.sequence(3 * rig.block_size + 2)
    wanted = rig.expected((seq, seq.length, seq.length))
    out = in_chunks(rig, seq, CUTS[cuts](rig.block_size))
    kit.check(rig, out, wanted, mistake="a chunk ignored the keys already in the cache, or its own offset")
    other = seq.moved(rig.sequence(seq.length).blocks)
    kit.check(rig, rig.step((other, seq.length, seq.length)), out, mistake="one prefill gives something else")


@pytest.mark.law("prefix hit: starting from cached blocks gives what a full prefill gives")
@pytest.mark.parametrize("whole", [1, 2], ids=["one-block", "two-blocks"])
def test_prefix_hit(kit: Kit, whole: int) -> None:
    rig = kit.rig()
    size = rig.block_size
    parent = rig.sequence(2 * size + 1)
    rig.write(parent, 0, parent.length)
    child = rig.fork(parent, whole * size, 3 * size + 1)
    row = (child, child.length, child.length - whole * size)
    hit = rig.step(row)
    kit.check(rig, hit, rig.expected(row), mistake="the cached length was ignored: queries stand at ctx_len - n + j")
    alone = child.moved(rig.sequence(child.length).blocks)
    full = rig.step((alone, child.length, child.length))
    kit.check(rig, hit, full[whole * size :], mistake="a full prefill gives something else")


@pytest.mark.law("prefix hit: rows that resume share a batch with fresh ones and decode, in scattered partial blocks")
def test_resume_among_others(kit: Kit) -> None:
    rig = kit.rig()
    size = rig.block_size
    parent = rig.sequence(2 * size)
    rig.write(parent, 0, parent.length)
    children = [rig.fork(parent, shared, 3 * size - 1) for shared in (size, 2 * size)]
    fresh, older = rig.sequence(size + 1), rig.sequence(2 * size + 1)
    rig.write(older, 0, older.length - 1)
    rows = [
        (older, older.length, 1),
        (children[0], children[0].length, children[0].length - size),
        (fresh, fresh.length, fresh.length),
        (children[1], children[1].length, children[1].length - 2 * size),
    ]
    kit.check(rig, rig.step(*rows), rig.expected(*rows), mistake="a row that resumes was taken for a fresh prefill")


@pytest.mark.needs("window")
@pytest.mark.law("chunks: a windowed layer in chunks gives what it gives at once")
def test_chunks_of_a_windowed_layer(kit: Kit) -> None:
    rig = kit.rig(kit.layer(window=kit.block_size + 1))
    seq = rig.sequence(3 * rig.block_size + 2)
    out = in_chunks(rig, seq, [2, rig.block_size + 3])
    wanted = rig.expected((seq, seq.length, seq.length))
    kit.check(rig, out, wanted, mistake="the window was counted from the chunk instead of the position")
