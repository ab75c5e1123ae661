"""Which format a cache's bytes have, as the kernels name it, and its scales as one tensor by slot."""

from __future__ import annotations

import torch

from pagedkv.api.errors import UnsupportedError
from pagedkv_cuda.kernels.arguments import Cache

QUANTIZED = {torch.int8: "int8", torch.float8_e5m2: "e5m2", torch.float8_e4m3fn: "e4m3"}
HALVES = (torch.float16, torch.bfloat16)
NATIVE_E4M3 = 89
"""The first compute capability that converts e4m3 itself."""


def format_of(cache: Cache, dtype: torch.dtype) -> str:
    """The format's name for queries (or new keys) of `dtype`. Raises `UnsupportedError`, with every reason."""
    stored_as = cache.keys.dtype
    found = []
    if cache.values.dtype != stored_as:
        found.append(f"keys are {stored_as} and values {cache.values.dtype}; both need one dtype")
    if dtype not in (*HALVES, torch.float32):
        found.append(f"queries of {dtype}: give float16, bfloat16 or float32")
    scales = (cache.k_scale is not None, cache.v_scale is not None)
    if stored_as in QUANTIZED and scales != (True, True):
        found.append(f"a cache of {stored_as} needs k_scale and v_scale")
    if stored_as not in QUANTIZED:
        if any(scales):
            found.append(f"a cache of {stored_as} has no scales; leave k_scale and v_scale out")
        if stored_as != dtype and not (dtype == torch.float32 and stored_as in HALVES):
            found.append(f"a cache of {stored_as} under queries of {dtype}: make them one dtype")
    if found:
        raise UnsupportedError(found)
    return QUANTIZED.get(stored_as, "plain")


def stored(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The tensor as kernels see it: fp8 as bytes."""
    return tensor.view(torch.uint8) if kind in ("e5m2", "e4m3") else tensor


def scale_of(scale: torch.Tensor | None, cache: torch.Tensor) -> torch.Tensor:
    """Scales [num_blocks, kv_heads, block_size] as a view, strides of 0 where they are shared.

    Without scales something of the cache's own that no kernel reads.
    """
    if scale is None:
        return cache[..., 0]
    if scale.ndim == 3:
        return scale
    return scale.reshape(1, -1, 1).expand(cache.shape[:3])
