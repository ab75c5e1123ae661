"""What keys and values take by formula: where a backend cannot be asked, and for what a step reads."""

from __future__ import annotations

from collections.abc import Iterable

from pagedkv.api import GroupSpec, LayerSpec, PoolCost, PoolSpec
from pagedkv.api.errors import ConfigError

FORMULA = "2 x KV heads x head dim x bytes of a number x layers x tokens of a block"

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8_e4m3fn": 1, "fp8_e5m2": 1}
_SCALE_BYTES = 4
"""A quantized dtype with a scale for each token and head keeps it in float32."""


def is_known(kv_dtype: str) -> bool:
    """Whether `number_bytes` has an answer."""
    return kv_dtype.partition("/")[0] in _BYTES


def number_bytes(kv_dtype: str) -> int:
    """Bytes of one stored number of "bf16", "int8/token_head" and their like. Raises `ConfigError` for others."""
    if not is_known(kv_dtype):
        raise ConfigError(f"the bytes of KV dtype {kv_dtype!r} are not known; known are {', '.join(_BYTES)}")
    return _BYTES[kv_dtype.partition("/")[0]]


def layer_bytes(layer: LayerSpec, kv_dtype: str) -> int:
    """Bytes of one token's keys and values in one layer, its scales included."""
    scales = 2 * _SCALE_BYTES if kv_dtype.endswith("/token_head") else 0
    return layer.kv_heads * ((layer.k_dim + layer.v_dim) * number_bytes(kv_dtype) + scales)


def token_bytes(layers: Iterable[LayerSpec], kv_dtype: str) -> int:
    """Bytes of one token in all layers that own bytes: 2 x KV heads x dim x bytes x layers."""
    return sum(layer_bytes(layer, kv_dtype) for layer in layers if layer.kv_of is None)


def formula_cost(spec: PoolSpec) -> PoolCost:
    """A pool's cost without any backend's padding or scratch, which only the backend knows."""
    per_block = max(group.block_size * token_bytes(group.layers, group.kv_dtype) for group in spec.groups)
    return PoolCost(per_block=per_block, fixed=0)


def read_bytes(group: GroupSpec, context: int) -> int:
    """Bytes of keys and values that one query at the end of `context` tokens sees in all layers."""
    return sum(min(context, layer.window or context) * layer_bytes(layer, group.kv_dtype) for layer in group.layers)
