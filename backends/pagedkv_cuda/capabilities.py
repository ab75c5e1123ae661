"""What an instance declares, by generation and by the way that it computes."""

from __future__ import annotations

from typing import Any

from pagedkv.api import Capabilities
from pagedkv.api.extensions import GRAPH_VERSION
from pagedkv_cuda.limits import Generation

KERNELS = ("triton", "torch")
FEATURES = frozenset(
    {
        "window",
        "softcap",
        "sinks",
        "alibi",
        "non_causal",
        "kv_sharing",
        "multi_token_decode",
        "mixed_batch",
        "prefix_hit",
        "nan_safe",
        "deterministic",
        "lse",
    }
)
QUANTIZED = ("int8/token_head", "fp8_e4m3fn/tensor", "fp8_e5m2/tensor")
"""Kept by both ways to compute, on every generation: where there is no conversion of 8-bit floats, code does it."""
COLLECTIVES = frozenset({"all_reduce", "all_gather", "broadcast", "barrier"})
MIXED = "Triton's kernels read a cache of the queries' dtype, or a 16-bit one under float32"
TRITON_GROUP = 128
"""Query heads that can share a KV head there."""
MOST_GRAPHS = 64


def offered(generation: Generation) -> Capabilities:
    """The most that an instance may declare, whichever way it computes."""
    return _capabilities(generation, block_sizes=((1, 1, 1024),), head_dims=((1, 1, 512),))


def declared(generation: Generation, kernels: str) -> Capabilities:
    """What an instance with these kernels declares."""
    if kernels == "torch":
        return _capabilities(generation, block_sizes=((1, 1, 1024),), head_dims=((1, 1, 512),))
    return _capabilities(
        generation,
        block_sizes=((16, 16, 256),),
        head_dims=((8, 8, 256),),
        max_group=TRITON_GROUP,
        exclusions=(
            ({"dtype": "bf16", "kv_dtype": frozenset({"fp16", "fp32"})}, MIXED),
            ({"dtype": "fp16", "kv_dtype": frozenset({"bf16", "fp32"})}, MIXED),
        ),
    )


def _capabilities(generation: Generation, **fields: Any) -> Capabilities:
    common: dict[str, Any] = {
        "dtypes": generation.dtypes,
        "native_dtypes": generation.native_dtypes,
        "kv_dtypes": (*generation.dtypes, *QUANTIZED),
        "preferred_block_size": 64 if generation.name in ("Hopper", "Blackwell") else 16,
        "features": FEATURES,
        "placements": frozenset({"device", "host"}),
        "extensions": {"graph": GRAPH_VERSION},
        "graph": "decode",
        "max_graphs": MOST_GRAPHS,
        "async_copy": True,
        "collectives": COLLECTIVES,
    }
    return Capabilities.of(**(common | fields))
