"""Attention by Triton's kernels: the arguments of the contract brought to those of the launchers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagedkv.api import GroupSpec, OpSpec, PoolSpec
from pagedkv.api.torch_streams import Runtime
from pagedkv_cuda import copies
from pagedkv_cuda.kernels import arguments
from pagedkv_cuda.kernels.append import append
from pagedkv_cuda.kernels.attention import PROGRAMS_EACH, attend, scratch_floats
from pagedkv_cuda.ops import Ops
from pagedkv_cuda.path import Arrays, Path, Staged, table_bytes

if TYPE_CHECKING:
    from pagedkv_cuda.plans import CudaPlan
    from pagedkv_cuda.pool import Layer

MOST_PROCESSORS = 256
"""Multiprocessors of the largest GPU that scratch is sized for; on a larger one keys are split less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Upper bounds of a batch, for the sizes of launches."""

    num_seqs: int
    num_tokens: int
    max_ctx: int
    num_decode: int
    decode_q: int


class TritonPath(Path):
    """The kernels of `pagedkv_cuda.kernels`, for one compute capability as a number: 90 of 9.0."""

    name = "triton"
    discard_blocks = 0
    decode_q = 4

    def __init__(self, target: int, runtime: Runtime) -> None:
        self._target, self._ops = target, Ops(runtime)

    def working_bytes(self, spec: PoolSpec) -> int:
        return 4 * self._scratch(spec)

    def working(self, spec: PoolSpec, device: str) -> torch.Tensor:
        return torch.empty(self._scratch(spec), device=device)

    def _scratch(self, spec: PoolSpec) -> int:
        """Floats for splits: what all rows could use, at most what keeps every multiprocessor busy."""
        rows, wanted = max(1, spec.limits.rows), 1
        for layer in (layer for group in spec.groups for layer in group.layers):
            busy = 2 * PROGRAMS_EACH * MOST_PROCESSORS * self.decode_q * -(-layer.q_heads // layer.kv_heads)
            most = scratch_floats(layer.q_heads, layer.v_dim, rows, self.decode_q)
            wanted = max(wanted, min(most, busy * (layer.v_dim + 1)))
        return wanted

    def staging_bytes(self, spec: PoolSpec, group: GroupSpec) -> int:
        return table_bytes(spec, group, 4, 0)

    def arrays(self, batch: Staged, num_blocks: int) -> Arrays:
        return {
            "slots": batch.slots,
            "cu_q": batch.starts,
            "ctx_len": batch.contexts,
            "rows": np.arange(len(batch.contexts), dtype=np.int32),
            "table": batch.table,
        }

    def bounds(self, batch: Staged) -> Bounds:
        return Bounds(
            num_seqs=len(batch.counts),
            num_tokens=len(batch.slots) if batch.static else batch.num_tokens,
            max_ctx=batch.most_context,
            num_decode=batch.num_decode,
            decode_q=batch.decode_q,
        )

    def append(self, plan: CudaPlan, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> None:
        cache, _ = self._layer(layer)
        append(k, v, cache, plan.arrays["slots"])

    def attend(
        self, plan: CudaPlan, layer: Layer, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        cache, made = self._layer(layer)
        attend(q, out, cache, made, self._rows(plan), plan.pool.working, lse, target=self._target)

    def copy(self, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, device: str) -> None:
        copies.by_kernel(source, target, pairs, device)

    def op(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        return self._ops.get(name, spec)

    def _layer(self, layer: Layer) -> tuple[arguments.Cache, arguments.Layer]:
        """The records of a layer, made once: what they hold stays at its address."""
        if layer.record is None:
            spec = layer.spec
            made = arguments.Layer(
                q_heads=spec.q_heads,
                kv_heads=spec.kv_heads,
                scale=spec.scale,
                causal=spec.causal,
                window=spec.window,
                softcap=spec.softcap,
                sinks=layer.sinks if spec.sinks else None,
                alibi=layer.alibi if spec.alibi else None,
            )
            scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
            layer.record = (arguments.Cache(keys=layer.keys, values=layer.values, **scales), made)
        found: tuple[arguments.Cache, arguments.Layer] = layer.record
        return found

    def _rows(self, plan: CudaPlan) -> arguments.Rows:
        """The record of a batch, made for its first layer."""
        if plan.record is None:
            arrays, bounds = plan.arrays, plan.bounds
            plan.record = arguments.Rows(
                cu_q=arrays["cu_q"],
                ctx_len=arrays["ctx_len"],
                block_table=arrays["table"],
                rows=arrays["rows"],
                num_seqs=bounds.num_seqs,
                num_tokens=bounds.num_tokens,
                max_ctx=bounds.max_ctx,
                num_decode=bounds.num_decode,
                decode_q=bounds.decode_q,
            )
        found: arguments.Rows = plan.record
        return found
