"""The checker around the loopback backend: what may be bound to a quantized cache, and how long its bytes are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv.api import ContractViolation, Event, GroupSpec, PoolSpec, World
from pagedkv.checking import CheckedBackend, check
from pagedkv.conformance.loopback.canonical import LoopbackCanonicalKV
from pagedkv.conformance.loopback.descriptor import LoopbackDescriptor
from tests.backends.cpu.rig import layer_spec, pool_spec

FP8 = "fp8_e4m3fn/tensor"


def made(kv_dtype: str) -> tuple[CheckedBackend, Any]:
    """A checked instance and a pool with a layer, and one that reads its cache."""
    backend = check(LoopbackDescriptor().create(0, {}, World()))
    return backend, backend.alloc_pool(spec(kv_dtype))


def spec(kv_dtype: str) -> PoolSpec:
    group = GroupSpec(layers=(layer_spec(0), layer_spec(1, kv_of=0)), block_size=16, kv_dtype=kv_dtype)
    return pool_spec(groups=(group,))


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(2, np.float32), np.full(2, 0.1, np.float32)])
def test_scales_of_an_8_bit_float_cache_pass(value: Any) -> None:
    backend, pool = made(FP8)
    backend.bind(pool, 0, {"k_scale": value})
    backend.bind(pool, 0, {"k_scale": value, "v_scale": np.float32(1)})
    inner: Any = pool.inner
    assert np.array_equal(inner._layer(0).bound["k_scale"], value) and inner._layer(0).bound["v_scale"] == 1


@pytest.mark.parametrize(
    ("kv_dtype", "layer", "params", "text"),
    [
        (FP8, 0, {"k_scale": np.float32(0)}, "'k_scale' of layer 0 holds 0.0, must be finite and above 0"),
        (FP8, 0, {"v_scale": np.array([1, np.nan], np.float32)}, "holds nan, must be finite and above 0"),
        (FP8, 0, {"v_scale": np.array([1, -2], np.float32)}, "holds -2.0"),
        (FP8, 0, {"v_scale": np.float32(np.inf)}, "holds inf"),
        (FP8, 0, {"k_scale": np.ones(3, np.float32)}, r"float32 \(3,\), must be host float32 of shape \(\) or \(2,\)"),
        (FP8, 0, {"k_scale": np.float64(1)}, "is float64"),
        (FP8, 0, {"k_scale": 1.0}, "is float"),
        (FP8, 0, {"q_scale": np.float32(1)}, "layer 0 takes no 'q_scale'"),
        (FP8, 1, {"k_scale": np.float32(1)}, "layer 1 takes no 'k_scale'"),
        ("int8/token_head", 0, {"k_scale": np.float32(1)}, "layer 0 takes no 'k_scale'"),
        ("fp32", 0, {"v_scale": np.float32(1)}, "layer 0 takes no 'v_scale'"),
    ],
)
def test_other_scales_are_the_cores_mistake(kv_dtype: str, layer: int, params: dict[str, Any], text: str) -> None:
    backend, pool = made(kv_dtype)
    with pytest.raises(ContractViolation, match=text) as caught:
        backend.bind(pool, layer, params)
    assert caught.value.law == "bind" and "pagedkv itself" in str(caught.value)


class TooShort(LoopbackCanonicalKV):
    """Leaves the last scale out."""

    def export(self, *arguments: Any) -> tuple[Event, Any]:
        event, data = super().export(*arguments)
        return event, data[:-4]


@pytest.mark.parametrize("kv_dtype", [FP8, "fp8_e5m2/tensor", "int8/token_head"])
@pytest.mark.parametrize("broken", [False, True])
def test_exported_bytes_hold_the_scales(kv_dtype: str, broken: bool) -> None:
    inner: Any = LoopbackDescriptor().create(0, {}, World())
    if broken:
        inner._canonical = TooShort(inner)
    backend = check(inner)
    pool = backend.alloc_pool(spec(kv_dtype))
    canonical: Any = backend.extension("canonical_kv")
    ids, lengths = np.array([2, 1], np.int32), np.array([16, 5], np.int32)
    if broken:
        with pytest.raises(ContractViolation, match=r"export\(\) gave uint8") as caught:
            canonical.export(pool, 0, ids, lengths)
        assert caught.value.law == "canonical bytes"
        return
    event, data = canonical.export(pool, 0, ids, lengths)
    event.join()
    scales = 2 * 4 * (21 if kv_dtype.startswith("int8") else 1)
    assert len(data) == 32 + 2 * (21 * (16 + 16) + scales)
