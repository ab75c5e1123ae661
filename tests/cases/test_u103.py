"""U103: a small job takes a small cache, and an absolute size wins over the fraction."""

from __future__ import annotations

import pytest

from pagedkv.api import MemoryInfo
from tests.helpers.engine_rig import engine
from tests.helpers.memory_rig import GIB, Telling, planned

ROOM = MemoryInfo(free=60 * GIB, total=64 * GIB)


@pytest.mark.parametrize("size", [1, 3, 16, 200, 256])
def test_u103_no_more_blocks_than_the_sequences_can_use(size: int) -> None:
    with engine(num_blocks=None, block_size=size, max_model_len=200, max_num_seqs=1) as llm:
        memory = llm.engine.parts.memory
        assert memory.num_blocks == -(-200 // size) + 1, "what one sequence can fill, and the null block"
        assert "max_num_seqs=1 x max_model_len=200" in memory.rule


def test_u103_bytes_win_over_the_fraction() -> None:
    half = planned(Telling(ROOM), fraction=0.5)
    small = planned(Telling(ROOM), fraction=0.5, kv_cache_bytes=GIB)
    assert half.cache > 20 * GIB
    assert GIB - small.cost.per_block < small.cache <= GIB
    assert small.rule == "kv_cache_memory=1.0 GiB"
    with engine(num_blocks=None, kv_cache_memory="4MiB", gpu_memory_utilization=1.0) as llm:
        assert llm.engine.parts.memory.cache <= 4 << 20


def test_u103_a_larger_fraction_never_gives_less() -> None:
    caches = [planned(Telling(ROOM), fraction=f / 20).cache for f in range(4, 21)]
    assert caches == sorted(caches)
    assert caches[0] < caches[-1]
