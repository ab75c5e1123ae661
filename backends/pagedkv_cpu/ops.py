"""The one op that is faster here than its reference: linear, on weights packed for this processor.

torch offers oneDNN's packed weights through operators without a promise of their own, so every use is proved on the
spot: the operator must exist, agree with torch's own linear, and give each row the same bits in every batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pagedkv.api import OpSpec
from pagedkv.api.torch import DTYPES

_log = logging.getLogger("pagedkv.backends.cpu")

PACK_ROWS = 32
"""Rows per call that oneDNN packs for: between a decode step's few and a prompt's many."""
TILE_ROWS = 32
"""Rows per call where a row's bits depend on their number: every call is padded to it."""
_PROBES = (1, 2, 3, 5, 8, 13, 16)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight in oneDNN's layout. `tiled`: its products run in tiles of `TILE_ROWS` rows."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    nbytes: int
    tiled: bool


class Linear:
    """x [T, K] times a packed weight [N, K], plus bias [N]; a row's bits depend on the row alone."""

    def __init__(self) -> None:
        self._steady: dict[tuple[int, int, torch.dtype, bool, int], bool] = {}

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """The weight [N, K] in oneDNN's layout; the given tensor is not kept."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        size = packed.nbytes + (0 if bias is None else bias.nbytes)
        steady = self._is_steady(packed, bias, weight)
        return PackedLinear(packed, bias, weight.shape[0], size, tiled=not steady)

    def __call__(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        rows = x.contiguous()
        if not len(rows):
            return rows.new_empty(0, packed.out_features)
        return _tiled(rows, packed) if packed.tiled else _product(rows, packed.weight, packed.bias)

    def _is_steady(self, packed: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor) -> bool:
        """Whether each row has the same bits among any number of rows; tried once per shape and thread count."""
        key = (weight.shape[0], weight.shape[1], weight.dtype, bias is not None, torch.get_num_threads())
        if key not in self._steady:
            self._steady[key] = _steady(packed, bias, weight)
            if not self._steady[key]:
                _log.info("linear %d x %d runs in tiles of %d rows to keep its bits steady", *key[:2], TILE_ROWS)
        return self._steady[key]


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _tiled(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """The product in calls of exactly `TILE_ROWS` rows, the last one filled up with zeros."""
    count = len(x)
    full = torch.nn.functional.pad(x, (0, 0, 0, -count % TILE_ROWS))
    out = x.new_empty(len(full), packed.out_features)
    for tile, target in zip(torch.split(full, TILE_ROWS), torch.split(out, TILE_ROWS), strict=True):
        target.copy_(_product(tile, packed.weight, packed.bias))
    return out[:count]


def _steady(packed: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor) -> bool:
    generator = torch.Generator().manual_seed(weight.shape[1])
    x = torch.randn(max(_PROBES) + TILE_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    whole = _product(x, packed, bias)
    starts = (0, TILE_ROWS - 1)
    return all(
        torch.equal(_product(x[start : start + rows].contiguous(), packed, bias), whole[start : start + rows])
        for rows in _PROBES
        for start in starts
    )


class Ops:
    """The ops of one backend instance."""

    def __init__(self) -> None:
        self._linear = Linear()
        self._works: dict[str, bool] = {}

    def get(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        """The op, or None where the reference is as good, and for an attribute that only another core knows."""
        if name == "linear" and not spec.attributes and spec.dtype in DTYPES and self._packs(spec.dtype):
            return self._linear
        return None

    def _packs(self, dtype: str) -> bool:
        if dtype not in self._works:
            reason = _why_not(dtype)
            self._works[dtype] = reason is None
            if reason is not None:
                _log.info("linear in %s uses torch's own product: %s", dtype, reason)
        return self._works[dtype]


def _why_not(dtype: str) -> str | None:
    """What keeps oneDNN's packed product from this dtype, None where it works here."""
    support = {"bf16": "_is_mkldnn_bf16_supported", "fp16": "_is_mkldnn_fp16_supported"}.get(dtype)
    try:
        if support is not None and not getattr(torch.ops.mkldnn, support)():
            return "this processor has no such product"
        weight, x = (torch.linspace(-1, 1, 64).view(8, 8).to(DTYPES[dtype]) for _ in range(2))
        product = _product(x, torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS), None)
        if not torch.allclose(product, torch.nn.functional.linear(x, weight), rtol=1e-2, atol=1e-3):
            return "it differs from torch's own"
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"packed weights do not work with torch {torch.__version__} ({error})"
    return None
