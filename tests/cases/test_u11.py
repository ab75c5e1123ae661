"""U11: a block released twice is refused and the pool stays whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.api.errors import InternalError
from pagedkv.core.block_pool import BlockPool
from pagedkv.core.prefix_index import PrefixIndex

BLOCKS = 7


def test_u11_twice_in_one_release() -> None:
    pool = BlockPool(BLOCKS, PrefixIndex())
    (block,) = pool.allocate(1, "r")
    with pytest.raises(InternalError, match=f"block {block} released once too often"):
        pool.release([block, block])
    assert sorted(pool.allocate(BLOCKS - 1, "r")) == list(range(1, BLOCKS))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("atrpf"), st.integers(0, 30)), max_size=60))
def test_u11_free_and_used_are_the_whole_pool_after_every_operation(history) -> None:
    index = PrefixIndex()
    pool, refs = BlockPool(BLOCKS, index), dict.fromkeys(range(1, BLOCKS), 0)
    for number, (what, n) in enumerate(history):
        block = n % (BLOCKS - 1) + 1
        if what == "a" and n % 4 <= pool.available:
            for taken in pool.allocate(n % 4, "r"):
                assert refs[taken] == 0
                refs[taken] = 1
        elif what == "t" and (refs[block] or index.holds(block)):
            pool.acquire([block], "s")
            refs[block] += 1
        elif what == "r" and refs[block] == 0:
            with pytest.raises(InternalError):
                pool.release([block])
        elif what == "r":
            pool.release([block])
            refs[block] -= 1
        elif what == "p" and refs[block]:
            index.insert(number.to_bytes(32, "big"), block)
        elif what == "f":
            pool.forget_cached()
        pool.check(refs)
        assert pool.num_used == sum(r > 0 for r in refs.values())
        assert pool.available + pool.num_used == BLOCKS - 1
