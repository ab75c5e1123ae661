"""Launches `append`: new keys and values into the cache, rounded to its format."""

from __future__ import annotations

import torch

from pagedkv_cuda.kernels.arguments import Cache
from pagedkv_cuda.kernels.formats import format_of, scale_of, stored
from pagedkv_cuda.kernels.grids import one_axis, power_of_two
from pagedkv_cuda.kernels.jit_append import append_tile

BLOCK_T = 4
"""Tokens of one program."""


def append(k: torch.Tensor, v: torch.Tensor, cache: Cache, slots: torch.Tensor) -> None:
    """Write row j of k [A, kv_heads, k_dim] and v [A, kv_heads, v_dim] to slot `slots[j]`; -1 is not written.

    slots [A] int64 on the device, slot = block * block_size + offset; k and v may have any token stride, and more rows
    than `slots` has. A quantized cache rounds to nearest even what its scale leaves, and keeps its largest number where
    that is exceeded; scales per token and head are set to the largest entry over the format's largest number.
    Raises `UnsupportedError` for dtypes that do not go together.
    """
    count = len(slots)
    if count == 0:
        return
    _, heads, block_size, k_dim = cache.keys.shape
    v_dim = cache.values.shape[3]
    kind = format_of(cache, k.dtype)
    k_scale, v_scale = scale_of(cache.k_scale, cache.keys), scale_of(cache.v_scale, cache.values)
    keys, values = stored(cache.keys, kind), stored(cache.values, kind)
    grid = one_axis(-(-count // BLOCK_T) * heads, "append")
    append_tile[grid](
        k, v, keys, values, k_scale, v_scale, slots, count, k.stride(0), v.stride(0),
        *keys.stride()[:3], *values.stride()[:3], *k_scale.stride(), *v_scale.stride(),
        HEADS=heads, DK=k_dim, DV=v_dim, BLOCK_DK=power_of_two(k_dim), BLOCK_DV=power_of_two(v_dim),
        BLOCK_SIZE=block_size, BLOCK_T=BLOCK_T, FORMAT=kind,
        PER_TOKEN=cache.k_scale is not None and cache.k_scale.ndim == 3, num_warps=4,
    )  # fmt: skip
