"""Quantized caches of the CUDA backend: bytes by hand, and what the torch path stores beside the kit's own formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.api import GroupSpec, LayerSpec, Limits, PoolSpec
from pagedkv.conformance import quantized
from pagedkv.conformance.quantized import FLOAT8, QUANTIZED, TOKEN_HEAD
from pagedkv.conformance.rig import Rig
from pagedkv.errors import UnsupportedError
from pagedkv_cuda import limits
from pagedkv_cuda.capabilities import declared, offered
from pagedkv_cuda.pool import row_bytes
from tests.backends.cuda.double import double


def layer(index=0, **changes):
    return LayerSpec(index=index, **{"q_heads": 4, "kv_heads": 2, "k_dim": 48, "v_dim": 16, "scale": 0.2} | changes)


def spec(*layers, kv_dtype=TOKEN_HEAD, block_size=16, **changes):
    group = GroupSpec(layers=layers or (layer(),), block_size=block_size, kv_dtype=kv_dtype)
    fields = {"groups": (group,), "num_blocks": 8, "dtype": "fp32", "limits": Limits(rows=4, tokens=64, context=96)}
    return PoolSpec(**fields | changes)


def written(kv_dtype, dtype="fp32"):
    """A rig with one written sequence, and the keys and values that it holds."""
    rig = Rig(double(), spec(kv_dtype=kv_dtype, dtype=dtype))
    rig.bind(rig.layer())
    seq = rig.sequence(19)
    rig.write(seq, 0, 19)
    return rig, seq, seq.qkv(rig.layer())[1:]


def test_u84_a_block_is_codes_and_scales_each_padded_to_128_bytes():
    # keys 16 tokens x 2 heads x 48, values x 16, then 4 bytes for each token and head, twice
    assert row_bytes(spec()) == 1536 + 512 + 128 + 128
    assert row_bytes(spec(kv_dtype="fp8_e5m2/tensor")) == 1536 + 512
    # 3 tokens: 288 -> 384, 96 -> 128, 24 -> 128 twice; a layer that reads another one's cache has none
    assert row_bytes(spec(layer(), layer(1, kv_of=0), block_size=3)) == 384 + 128 + 128 + 128


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_u84_a_pool_takes_what_its_cost_says(kernels, kv_dtype):
    made, asked = double(kernels), spec(layer(), layer(1), kv_dtype=kv_dtype, num_blocks=50)
    cost = made.pool_cost(asked)
    pool = made.alloc_pool(asked)
    assert pool.rows.shape[1] == cost.per_block == row_bytes(asked)
    inside = pool.rows.untyped_storage().nbytes()
    bound = [one for found in pool.layers.values() for one in (found.k_scale, found.v_scale) if one.ndim == 1]
    assert inside + sum(one.nbytes for one in bound) <= cost.fixed + 50 * cost.per_block


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_codes_and_scales_are_those_of_the_contract(kv_dtype, dtype):
    rig, seq, given = written(kv_dtype, dtype)
    found = rig.pool.layer(0)
    block, slot = np.array(seq.blocks)[np.arange(19) // 16], np.arange(19) % 16
    for cache, scale, name, x in zip(
        (found.keys, found.values), (found.k_scale, found.v_scale), ("k_scale", "v_scale"), given, strict=True
    ):
        wanted = rig.scale(rig.layer(), name, x)
        mine = scale.numpy()[block, :, slot] if kv_dtype == TOKEN_HEAD else np.broadcast_to(scale.numpy(), (19, 2))
        assert np.array_equal(mine, wanted)
        stored = cache if kv_dtype == TOKEN_HEAD else cache.view(torch.uint8)
        assert np.array_equal(stored.numpy()[block, :, slot], quantized.codes(kv_dtype, x.float().numpy(), wanted))


@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_bound_scales_stay_at_their_address(kv_dtype):
    rig, _, _ = written(kv_dtype)
    found = rig.pool.layer(0)
    before = found.k_scale.data_ptr()
    rig.bind_scales(rig.layer(), {"k_scale": 0.5, "v_scale": [0.25, 4.0]})
    assert found.k_scale.data_ptr() == before
    assert (found.k_scale.tolist(), found.v_scale.tolist()) == ([0.5, 0.5], [0.25, 4.0])


def test_what_cannot_be_bound_is_refused_with_the_reason():
    rig, _, _ = written("fp8_e5m2/tensor")
    for params, text in (
        ({"k_scale": np.float32(0)}, "'k_scale' must be finite and above 0"),
        ({"v_scale": np.ones(3, np.float32)}, r"'v_scale' must have shape \(\) or \(2,\), got \(3,\)"),
        ({"q_scale": np.float32(1)}, "layer 0 takes no 'q_scale' with a cache of fp8_e5m2/tensor"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            rig.backend.bind(rig.pool, 0, params)
    with pytest.raises(UnsupportedError, match="layer 0 takes no 'k_scale' with a cache of int8/token_head"):
        other, _, _ = written(TOKEN_HEAD)
        other.backend.bind(other.pool, 0, {"k_scale": np.float32(1)})


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (12, 0)])
def test_every_generation_declares_them(capability):
    generation = limits.generation(capability)
    assert generation is not None
    for can in (offered(generation), declared(generation, "torch")):
        assert set(QUANTIZED) < set(can.kv_dtypes)
        assert not set(can.kv_dtypes[: len(generation.dtypes)]) & set(QUANTIZED), "plain ones come first"
