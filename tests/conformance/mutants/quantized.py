"""Quantized caches: scales that are shared, stay behind or come too early, codes that are rounded in another way."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.conformance.mutants.table import mutant

SECTION = "test_quantized_kv.py::"


@mutant("_read", "quantized_kv: attention over codes and scales agrees", f"{SECTION}test_numbers")
def codes_are_read_without_scales(original: Any, self: Any, cache: Any, scale: Any, kv_dtype: str, blocks: Any) -> Any:
    """What is stored is taken for the number."""
    return original(self, cache, None, kv_dtype, blocks)


@mutant("_append", "quantized_kv: values are read as stored", f"{SECTION}test_values_are_read_as_stored")
def raw_values_are_read(original: Any, self: Any, layer: Any, slots: Any, keys: Any, values: Any) -> None:
    """Half of what rounding lost is made up for in the scale, where each token has one."""
    original(self, layer, slots, keys, values)
    if layer.v_scale is not None and layer.v_scale.ndim == 3:
        kept = np.flatnonzero(slots >= 0)
        at = np.divmod(slots[kept], layer.keys.shape[1])
        codes, raw = layer.values[at].astype(np.float64), values[kept].astype(np.float64)
        layer.v_scale[at] = (codes * raw).sum(-1) / np.maximum((codes * codes).sum(-1), 1)


@mutant(
    "_token_scales", "quantized_kv: each token and KV head has a scale", f"{SECTION}test_scales_of_tokens_and_heads"
)
def heads_share_a_scale(original: Any, self: Any, rows: Any) -> Any:
    """All heads of a token have the scale of its largest."""
    return original(self, rows) * 0 + original(self, rows).max(-1, keepdims=True, initial=0)


@mutant("_copy_pair", "quantized_kv: a copied block is read bit for bit", f"{SECTION}test_copies_take_the_scales")
def scales_stay_behind(original: Any, self: Any, src: Any, dst: Any, source: int, target: int) -> None:
    """A copy moves codes and leaves the scales of the target."""
    inside = [s for one in dst._layers.values() for s in (one.k_scale, one.v_scale) if s is not None and s.ndim == 3]
    before = [scale[target].copy() for scale in inside]
    original(self, src, dst, source, target)
    for scale, old in zip(inside, before, strict=True):
        scale[target] = old


@mutant("_to_stored", "quantized_kv: halfway between two codes the even one", f"{SECTION}test_ties_go_to_even")
def ties_go_up(original: Any, self: Any, values: Any, kv_dtype: str) -> Any:
    """Ties are rounded away from zero."""
    return original(self, np.nextafter(values, np.copysign(np.inf, values)), kv_dtype)


@mutant("_to_stored", "quantized_kv: what is too large is stored as the largest", f"{SECTION}test_saturation")
def overflow_is_nan(original: Any, self: Any, values: Any, kv_dtype: str) -> Any:
    """What is beyond the largest number becomes NaN, as conversions without saturation have it."""
    most = {"fp8_e4m3fn/tensor": 448.0, "fp8_e5m2/tensor": 57344.0}.get(kv_dtype, np.inf)
    return original(self, np.where(np.abs(values) > most, np.nan, values), kv_dtype)


@mutant("_token_scales", "quantized_kv: NaN is read as what is not finite", f"{SECTION}test_nan_stays")
def nan_is_hidden(original: Any, self: Any, rows: Any) -> Any:
    """The largest number of a row passes over NaN, and a code of NaN is a number."""
    return original(self, np.nan_to_num(rows))


@mutant("_token_scales", "quantized_kv: a row of zeros is read as zeros", f"{SECTION}test_zeros")
def zeros_have_no_scale(original: Any, self: Any, rows: Any) -> Any:
    """A row of zeros gets a scale that is not finite, as 127 / 0 has it."""
    made = original(self, rows)
    return np.where(np.abs(rows).max(-1) == 0, np.float32(np.inf), made)


@mutant("_bind_scale", "quantized_kv: work enqueued before a bind", f"{SECTION}test_bind_is_ordered")
def bind_does_not_wait_its_turn(original: Any, self: Any, scale: Any, values: Any) -> None:
    """A bound scale reaches appends that were enqueued before it."""
    np.copyto(scale, values)


@mutant("_bind_scale", "quantized_kv: a scale bound again counts from then on", f"{SECTION}test_bound_again")
def first_scale_stays(original: Any, self: Any, scale: Any, values: Any) -> None:
    """A scale that is no longer 1 is not changed any more."""
    if (scale == 1).all():
        original(self, scale, values)
        self._queues.finish(self._queues.record())


@mutant("_bind_scale", "quantized_kv: a bound scale is one number, or one for each", f"{SECTION}test_bound_scales")
def only_the_first_scale(original: Any, self: Any, scale: Any, values: Any) -> None:
    """The first head's scale serves all heads."""
    original(self, scale, values.ravel()[0])


@mutant("pool_cost", "quantized_kv: pool_cost includes the scales", f"{SECTION}test_cost")
def scales_cost_nothing(original: Any, self: Any, spec: Any) -> Any:
    """The scales in the blocks are not counted."""
    scales = [
        sum(2 * 4 * layer.kv_heads * group.block_size for layer in group.layers if layer.kv_of is None)
        for group in spec.groups
        if group.kv_dtype.endswith("/token_head")
    ]
    cost = original(self, spec)
    return dataclasses.replace(cost, per_block=cost.per_block - max(scales, default=0))


@mutant(
    "alloc_pool",
    "honesty: a quantized KV dtype that is not declared is refused",
    "test_honesty.py::test_undeclared_quantized_cache",
    base="template",
)
def undeclared_quantized_cache_is_approximated(original: Any, self: Any, spec: Any) -> Any:
    """A cache of int8 is asked for, and one of the numbers themselves is made."""
    plain = [
        dataclasses.replace(group, kv_dtype=group.kv_dtype.replace("int8/token_head", spec.dtype))
        for group in spec.groups
    ]
    return original(self, dataclasses.replace(spec, groups=tuple(plain)))


@mutant(
    "_bytes",
    "quantized_kv: exported bytes are codes, then scales",
    f"{SECTION}test_exported_bytes",
    part="_canonical",
)
def scales_are_exported_first(original: Any, self: Any, pool: Any, group: int, where: Any) -> Any:
    """The scales of keys and values change places."""
    layers = [pool._layer(layer.index) for layer in pool.spec.groups[group].layers]
    for one in layers:
        one.k_scale, one.v_scale = one.v_scale, one.k_scale
    made = original(self, pool, group, where)
    for one in layers:
        one.k_scale, one.v_scale = one.v_scale, one.k_scale
    return made
