"""U84: sizing uses a fixed formula, so a backend with a compressed cache gains nothing; here it states its own bytes.

The host pool for swapped blocks comes with the tiers of the cache; there is none yet.
"""

from __future__ import annotations

import pytest

from pagedkv.api.errors import OutOfDeviceMemory
from tests.helpers.cpu_plugins import cpu_plugin
from tests.helpers.engine_rig import engine

# int8 keys and values with a float32 scale for each token and head, and a fixed part of its own.
COST = (
    "PoolCost(fixed=4096, per_block=sum("
    "group.block_size * layer.kv_heads * (layer.k_dim + layer.v_dim + 2 * 4)"
    " for group in spec.groups for layer in group.layers))"
)
PER_BLOCK = 4 * 2 * (12 + 12 + 8) * 3
"""The same by hand: block of 4 tokens, 2 KV heads of 12 numbers, 3 layers."""

RIG = {"backend": "compressed", "num_blocks": None}


@pytest.fixture(autouse=True)
def _installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(cpu_plugin(tmp_path, "compressed", cost=COST)))


@pytest.mark.parametrize("blocks", [9, 40])
@pytest.mark.parametrize("spare", [0, 1, PER_BLOCK - 1])
def test_u84_the_block_count_of_a_byte_budget_is_the_backends_own(blocks, spare):
    with engine(**RIG, kv_cache_memory=4096 + blocks * PER_BLOCK + spare) as llm:
        memory = llm.engine.parts.memory
        assert memory.num_blocks == blocks
        assert (memory.cost.per_block, memory.cost.fixed) == (PER_BLOCK, 4096)


def test_u84_its_fixed_part_counts_too():
    with pytest.raises(OutOfDeviceMemory), engine(**RIG, kv_cache_memory=4096 + PER_BLOCK - 1):
        pass
