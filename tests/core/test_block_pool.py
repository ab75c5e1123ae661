"""Reference counts, eviction order, and refusals of the block pool; the hashes of the prefix index."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.api.errors import InternalError
from pagedkv.core.block_pool import BlockPool
from pagedkv.core.prefix_index import PrefixIndex


def pool(blocks: int = 5) -> tuple[BlockPool, PrefixIndex]:
    index = PrefixIndex()
    return BlockPool(blocks, index), index


def test_block_zero_is_never_handed_out() -> None:
    p, _ = pool(5)
    assert sorted(p.allocate(4, "r")) == [1, 2, 3, 4]
    assert p.available == 0
    with pytest.raises(InternalError):
        p.allocate(1, "r")


def test_cached_blocks_go_least_recently_used_first_and_lose_exactly_their_own_entry() -> None:
    p, index = pool(4)
    blocks = p.allocate(3, "r")
    digests = [bytes([i]) * 32 for i in range(3)]
    for digest, block in zip(digests, blocks, strict=True):
        index.insert(digest, block)
    p.release([blocks[1], blocks[0], blocks[2]])
    assert (p.num_cached, p.num_used) == (3, 0)
    assert p.allocate(1, "s") == [blocks[1]]
    assert index.find([digests[1]], 1) == []
    assert index.find([digests[0]], 1) == [blocks[0]]
    assert index.find([digests[2]], 1) == [blocks[2]]


def test_a_hit_takes_a_cached_block_out_of_the_queue() -> None:
    p, index = pool(3)
    a, b = p.allocate(2, "r")
    for digest, block in ((b"a" * 32, a), (b"b" * 32, b)):
        index.insert(digest, block)
    p.release([a, b])
    assert p.count_cached([a, b]) == 2
    p.acquire([a], "s")
    assert p.count_cached([a, b]) == 1
    assert p.allocate(1, "t") == [b]
    assert p.refs(a) == 1


def test_u11_a_block_released_twice_is_refused_and_the_pool_stays_whole() -> None:
    p, _ = pool(5)
    (block,) = p.allocate(1, "twice")
    with pytest.raises(InternalError, match="twice"):
        p.release([block, block])
    assert p.available == 4
    assert sorted(p.allocate(4, "r")) == [1, 2, 3, 4]


def test_shared_blocks_go_back_with_the_last_reference() -> None:
    p, _ = pool(5)
    blocks = p.allocate(2, "r")
    p.acquire(blocks, "s")
    p.release(blocks)
    assert p.num_used == 2
    p.release(blocks)
    assert p.num_used == 0


def test_leaks_name_the_holder() -> None:
    p, _ = pool(5)
    block = p.allocate(1, "someone")
    assert p.leaks() == {"someone": block}
    p.release(block)
    assert p.leaks() == {}


def test_check_finds_a_wrong_reference() -> None:
    p, _ = pool(5)
    (block,) = p.allocate(1, "r")
    p.check({block: 1})
    with pytest.raises(InternalError):
        p.check({})


def chain(index: PrefixIndex, ids: list[int], salt: bytes = b"", size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    index.extend(hashes, index.root(salt), np.array(ids, np.int32).tobytes(), size * 4)
    return hashes


def test_hashes_are_chained_keyed_and_bound() -> None:
    key = b"k" * 32
    index = PrefixIndex(b"model", key)
    ids = list(range(12))
    whole = chain(index, ids)
    assert len(whole) == 3 and all(len(h) == 32 for h in whole)
    assert chain(index, ids[:8]) == whole[:2]
    changed = chain(index, [99, *ids[1:]])
    # a change in the first block changes every later hash
    assert all(a != b for a, b in zip(whole, changed, strict=True)), (
        "a change in the first block changes every later one"
    )
    assert chain(index, [*ids[:11], 99])[:2] == whole[:2]
    assert set(whole).isdisjoint(chain(PrefixIndex(b"other model", key), ids))
    assert set(whole).isdisjoint(chain(PrefixIndex(b"model", b"j" * 32), ids))
    assert set(whole).isdisjoint(chain(index, ids, salt=b"tenant"))


def test_chains_extend_in_any_pieces() -> None:
    index = PrefixIndex()
    ids = np.arange(16, dtype=np.int32)
    hashes: list[bytes] = []
    root = index.root()
    for start in (0, 4, 12):
        stop = {0: 4, 4: 12, 12: 16}[start]
        index.extend(hashes, root, ids[start:stop].tobytes(), 16)
    assert hashes == chain(index, ids.tolist())


def test_the_first_holder_of_a_content_stays_the_findable_one() -> None:
    index = PrefixIndex()
    index.insert(b"x" * 32, 3)
    index.insert(b"x" * 32, 4)
    assert index.find([b"x" * 32], 1) == [3]
    assert not index.holds(4)
    index.forget(3)
    assert len(index) == 0


def test_blocks_with_a_copy_elsewhere_go_before_the_others_each_in_order_of_use() -> None:
    p, index = pool(7)
    blocks = p.allocate(6, "r")
    for block in blocks:
        index.insert(bytes([block]) * 32, block)
    p.release(blocks)
    a, b, c, d, e, f = blocks
    p.copied(c)
    p.acquire([a, b], "copying")
    assert (p.oldest(1), p.oldest(3)) == ([], [d, e]), "c is the first to go"
    p.release([a, b], copied=True)
    p.acquire([a], "s")
    p.release([a])  # used again: as young as any
    assert (p.num_cached, p.available) == (6, 6)
    assert p.allocate(6, "t") == [c, b, d, e, f, a]
    assert len(index) == 0
    p.check(dict.fromkeys(blocks, 1))


def test_what_has_a_copy_is_forgotten_and_discarded_like_the_rest() -> None:
    p, index = pool(4)
    blocks = p.allocate(3, "r")
    for block in blocks:
        index.insert(bytes([block]) * 32, block)
    p.release(blocks, copied=True)
    p.discard(blocks[1])
    assert (p.num_cached, p.num_free, p.oldest(9)) == (2, 1, [])
    p.check({})
    assert p.forget_cached() == 2
    assert (p.num_cached, p.num_free, len(index)) == (0, 3, 0)
    p.check({})
