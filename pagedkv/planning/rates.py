"""A device's limits: measured where it is here, published where it is not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from pagedkv.api import AttentionBackend
from pagedkv.config import show_bytes
from pagedkv.models.packing import torch_dtype
from pagedkv.planning.speed import Rates
from pagedkv.planning.target import Target

_log = logging.getLogger("pagedkv.planning")

ARRAY_BYTES = 1 << 29
"""More than any processor's caches hold."""
QUICK_BYTES = 1 << 27
"""For a first idea."""
SIDE = 1024
"""Rows and columns of the matrices whose product is timed."""
REPEATS = 5


def read_bandwidth(backend: AttentionBackend, nbytes: int | None = None) -> float:
    """Bytes a second: a sum over one large array of the backend's memory by all its threads, the fastest of a few."""
    size = nbytes or ARRAY_BYTES
    array = torch.ones(size // 4, device=backend.torch_device)
    seconds = _fastest(array.sum, backend)
    _log.info(
        "memory is read at %.1f GB/s: a sum over %s, the fastest of %d",
        size / seconds / 1e9,
        show_bytes(size),
        REPEATS,
    )
    return size / seconds


def product_rate(backend: AttentionBackend, dtype: str) -> float:
    """Operations a second: a product of two square matrices by torch, the fastest of a few."""
    matrix = torch.ones(SIDE, SIDE, dtype=torch_dtype(dtype), device=backend.torch_device)
    seconds = _fastest(lambda: torch.mm(matrix, matrix), backend)
    _log.info("products reach %.1f GFLOP/s in %s", 2 * SIDE**3 / seconds / 1e9, dtype)
    return 2 * SIDE**3 / seconds


def _fastest(call: Callable[[], object], backend: AttentionBackend) -> float:
    return min(_seconds(call, backend) for _ in range(REPEATS))


def _seconds(call: Callable[[], object], backend: AttentionBackend) -> float:
    backend.synchronize()
    began = time.perf_counter()
    call()
    backend.synchronize()
    return time.perf_counter() - began


def rates_of(target: Target, dtype: str) -> Rates | None:
    """The target's limits in `dtype`; None where they are unknown, which is told."""
    if target.here and target.selected.device.score == 0:
        _log.info("no speed is predicted: backend %s is for tests", target.selected.name)
        return None
    if target.here:
        return Rates(
            bandwidth=read_bandwidth(target.backend, QUICK_BYTES),
            peak=product_rate(target.backend, dtype),
            basis="here",
            source="measured here just now: a plain sum, a large product",
        )
    device = target.device
    if device is None or dtype not in device.peak:
        _log.warning("no speed is predicted: there is no rate of %s for %s", target.title, dtype)
        return None
    return Rates(bandwidth=device.bandwidth, peak=device.peak[dtype], basis="published", source=device.source)
