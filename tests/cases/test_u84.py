"""U84: sizing uses a fixed formula, so a backend with a compressed cache gains nothing; here it says its own bytes."""

from __future__ import annotations

import pytest

from pagedkv.api.errors import ConfigError, OutOfDeviceMemory
from tests.helpers.cpu_plugins import cpu_plugin
from tests.helpers.engine_rig import engine, greedy, solo, some_prompts, token_ids

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


@pytest.mark.parametrize("blocks", [1, 9, 40])
@pytest.mark.parametrize("spare", [0, PER_BLOCK - 1])
def test_u84_so_is_that_of_the_swap(blocks, spare):
    """One pool on the host: its fixed part, its null block, and `blocks`."""
    size = 4096 + (blocks + 1) * PER_BLOCK + spare
    with engine(**RIG, kv_cache_memory="64KiB", swap_space=f"{size}B") as llm:
        host = llm.engine.parts.memory.host
        assert (host.blocks, host.cost.per_block, host.cost.fixed) == (blocks, PER_BLOCK, 4096)
        assert host.nbytes == size - spare
        assert llm.engine.scheduler.price.block_bytes == PER_BLOCK


def test_u84_a_swap_without_room_for_a_block_beside_the_fixed_part_is_refused():
    refused = pytest.raises(ConfigError, match="holds no block of 768 B; raise it")
    with refused, engine(**RIG, kv_cache_memory="64KiB", swap_space=f"{4096 + 2 * PER_BLOCK - 1}B"):
        pass


def test_u84_metrics_and_blocks_agree_when_it_swaps():
    prompts = some_prompts([8, 8])
    size = 4096 + 9 * PER_BLOCK
    settings = RIG | {"num_blocks": 7, "max_model_len": 25, "preemption_mode": "swap"}
    with engine(**settings, swap_space=f"{size}B") as llm:
        assert token_ids(llm.generate(prompts, greedy(16), use_tqdm=False)) == [solo(p, greedy(16)) for p in prompts]
        metrics = llm.metrics()
        assert metrics.swaps >= 1
        assert metrics.host.free + metrics.host.cached + metrics.host.moving == 8
        assert llm.engine._swap.nbytes == size
