"""The least time that a decode step can take on this machine: what it must read, over how fast memory is read."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pagedkv.api import AttentionBackend, GroupSpec, LayerSpec
from pagedkv.config import show_bytes
from pagedkv.core.negotiation import is_quantized
from pagedkv.models.packing import element_bytes

if TYPE_CHECKING:
    from pagedkv.engine.setup import Parts

_log = logging.getLogger("pagedkv.cli")

_ARRAY_BYTES = 1 << 29
"""More than any processor's caches hold."""
_READS = 5


def read_bandwidth(backend: AttentionBackend) -> float:
    """Bytes a second: a sum over one large array of the backend's memory by all its threads, the fastest of a few."""
    array = torch.ones(_ARRAY_BYTES // 4, device=backend.torch_device)
    seconds = min(_sum(array, backend) for _ in range(_READS))
    _log.info(
        "memory is read at %.1f GB/s: a sum over %s, the fastest of %d",
        _ARRAY_BYTES / seconds / 1e9,
        show_bytes(_ARRAY_BYTES),
        _READS,
    )
    return _ARRAY_BYTES / seconds


def _sum(array: torch.Tensor, backend: AttentionBackend) -> float:
    backend.synchronize()
    began = time.perf_counter()
    array.sum()
    backend.synchronize()
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Bytes that a decode step of a batch reads: weights as they are held, keys and values at the middle of the run."""

    weights: int
    cache: int
    bandwidth: float

    @property
    def seconds(self) -> float:
        """The least time of the step."""
        return (self.weights + self.cache) / self.bandwidth

    def figures(self, between: float | None) -> dict[str, Any]:
        """As JSON values; `between` is the measured time between tokens, `achieved` the share of it that is floor."""
        return {
            "weight_bytes": self.weights,
            "cache_bytes": self.cache,
            "read_bandwidth": self.bandwidth,
            "seconds": self.seconds,
            "achieved": None if between is None else self.seconds / between,
        }


def floor(parts: Parts, batch: int, input_len: int, output_len: int, bandwidth: float) -> Floor:
    """The floor of a decode step of `batch` requests, half of their answers done."""
    cached = sum(cache_read(group, input_len + output_len // 2) for group in parts.runner.pool.spec.groups)
    return Floor(weights=parts.runner.model.bytes_per_step, cache=batch * cached, bandwidth=bandwidth)


def cache_read(group: GroupSpec, context: int) -> int:
    """Bytes of keys and values that one query at the end of `context` tokens sees in all layers."""
    seen = ((min(context, layer.window or context), layer) for layer in group.layers)
    return sum(n * layer.kv_heads * _head_bytes(layer, group.kv_dtype) for n, layer in seen)


def _head_bytes(layer: LayerSpec, kv_dtype: str) -> int:
    """Bytes of a token's keys and values in one KV head, with the scales that lie beside them."""
    number = 1 if is_quantized(kv_dtype) else element_bytes(kv_dtype)
    return number * (layer.k_dim + layer.v_dim) + (2 * 4 if kv_dtype.endswith("/token_head") else 0)
