"""One null instance: pools without bytes, plans without contents, attention and ops that give zeros."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedkv.api import (
    AttentionBackend,
    Batch,
    Capabilities,
    Event,
    MemoryInfo,
    OpSpec,
    Plan,
    Pool,
    PoolCost,
    PoolSpec,
)
from pagedkv.api.records import Int32

_log = logging.getLogger("pagedkv.backends.null")

MEMORY = 1 << 50
"""Bytes that the device claims: any number of blocks of `BLOCK_BYTES` fits."""
BLOCK_BYTES = 1
_PLAN = Plan()
_DONE = Event()


class NullPool(Pool):
    """Ids with nothing behind them."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec

    def close(self) -> None:
        return


class NullBackend(AttentionBackend):
    """Accepts every call and does as little as it can: answers are finite, and mean nothing."""

    def __init__(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities
        _log.warning("backend null computes nothing: times are the core's own, and answers mean nothing")

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def pool_cost(self, spec: PoolSpec) -> PoolCost:
        return PoolCost.of(per_block=BLOCK_BYTES, fixed=0)

    def alloc_pool(self, spec: PoolSpec) -> Pool:
        return NullPool(spec)

    def plan(self, pool: Pool, group: int, batch: Batch) -> Plan:
        return _PLAN

    def attend(
        self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        if out is not None:
            out.zero_()  # what an array held before might be NaN

    def copy_blocks(self, src: Pool, dst: Pool, pairs: Int32, *, after: Event | None = None) -> Event:
        return _DONE

    def memory(self) -> MemoryInfo:
        return MemoryInfo.of(free=MEMORY, total=MEMORY, reclaimable=0, unified=False)

    def bind(self, pool: Pool, layer: int, params: Mapping[str, Any]) -> None:
        return

    def op(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        """Every op of today, without its arithmetic; what came later falls to its reference."""
        return None if spec.features or spec.attributes.keys() - {"wide"} else _OPS.get(name)


# -- ops: the shapes of their references in `pagedkv.ops`, and nothing else --------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NullLinear:
    """What is left of a weight [N, K]: N."""

    width: int
    nbytes: int = 0


class Linear:
    """Zeros [T, N]."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> NullLinear:
        return NullLinear(width=len(weight))

    def __call__(self, x: Tensor, packed: NullLinear) -> Tensor:
        return x.new_zeros(len(x), packed.width)


def _same(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x


def _sum(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    return


def _half(x: Tensor) -> Tensor:
    return x[..., : x.shape[-1] // 2]


def _embedding(ids: Tensor, table: Tensor) -> Tensor:
    return table.new_zeros(len(ids), table.shape[1])


def _first_ids(logits: Tensor, *row_values: Tensor) -> Tensor:
    return torch.zeros(len(logits), dtype=torch.int32)


_OPS: Mapping[str, Callable[..., Any]] = {
    "linear": Linear(),
    "rms_norm": _same,
    "add_rms_norm": _sum,
    "rope": _rope,
    "silu_mul": _half,
    "gelu_tanh_mul": _half,
    "embedding": _embedding,
    "greedy": _first_ids,
    "sample": _first_ids,
}
