"""Pools for tests of the Ascend backend."""

from __future__ import annotations

from typing import Any

from pagedkv.api import GroupSpec, LayerSpec, Limits, PoolSpec
from pagedkv_ascend.pool import AscendPool, pool_cost
from pagedkv_ascend.runtime import Runtime


def layer(index: int = 0, **changes: Any) -> LayerSpec:
    fields: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "k_dim": 32, "v_dim": 32, "scale": 0.25}
    return LayerSpec(index=index, **(fields | changes))


def spec(*layers: LayerSpec, block_size: int = 32, dtype: str = "fp16", **changes: Any) -> PoolSpec:
    group = GroupSpec(layers=layers or (layer(),), block_size=block_size, kv_dtype=dtype)
    limits = Limits(rows=4, tokens=64, context=256)
    return PoolSpec(**({"groups": (group,), "num_blocks": 8, "dtype": dtype, "limits": limits} | changes))


def made_pool(runtime: Runtime, wanted: PoolSpec) -> AscendPool:
    """A pool without the backend around it."""
    return AscendPool(wanted, pool_cost(wanted, 0), runtime)
