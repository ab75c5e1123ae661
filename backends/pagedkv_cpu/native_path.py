"""Attention with the kernels in C++ (`csrc/attention.h`)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api import Batch, ContractViolation, GroupSpec, PoolSpec
from pagedkv_cpu.copies import Planes
from pagedkv_cpu.native import DTYPES, BatchStruct, Kernels, LayerStruct
from pagedkv_cpu.path import CpuPlan, Path
from pagedkv_cpu.pool import CpuPool, Layer
from pagedkv_cpu.torch_path import checked_slots


class NativePlan(CpuPlan):
    """One batch of one group as the kernels read it: its own copies of the host arrays."""

    def __init__(self, pool: CpuPool, group: int, batch: Batch) -> None:
        super().__init__(pool, group, batch)
        spec, rows = pool.spec.groups[group], batch.num_seqs
        self._cu_q = batch.cu_q[: rows + 1].astype(np.int32)
        self._ctx_len = batch.ctx_len[:rows].astype(np.int32)
        self._table = _table(batch, pool.num_blocks)
        slots = np.empty(0, np.int64) if batch.slots is None else batch.slots
        self._slots = checked_slots(slots, pool.num_blocks * spec.block_size, spec.block_size)
        _check_rows(self._cu_q, self._ctx_len, batch.num_tokens, self._table.shape[1] * spec.block_size)
        self._struct = BatchStruct(
            cu_q=self._cu_q.ctypes.data,
            ctx_len=self._ctx_len.ctypes.data,
            table=self._table.ctypes.data,
            slots=self._slots.ctypes.data,
            table_stride=self._table.shape[1],
            num_slots=len(self._slots),
            num_seqs=rows,
            num_tokens=batch.num_tokens,
            block_size=spec.block_size,
        )
        self.address = ctypes.addressof(self._struct)


def _table(batch: Batch, num_blocks: int) -> np.ndarray:
    """The rows' block ids [num_seqs, W], copied; `ContractViolation` for one outside the pool."""
    table: np.ndarray = batch.block_table[batch.rows[: batch.num_seqs]].astype(np.int32)
    if table.size and (table.min() < 0 or table.max() >= num_blocks):
        raise ContractViolation(
            f"the block table must hold ids 0..{num_blocks - 1}, got {table.min()}..{table.max()}", law="block table"
        )
    return table


def _check_rows(cu_q: np.ndarray, ctx_len: np.ndarray, num_tokens: int, room: int) -> None:
    """What the kernels rely on when they compute addresses."""
    counts = np.diff(cu_q)
    if cu_q[0] != 0 or cu_q[-1] != num_tokens or counts.min(initial=0) < 0:
        raise ContractViolation(f"cu_q must rise from 0 to num_tokens={num_tokens}, got {cu_q.tolist()}", law="cu_q")
    if ctx_len.min(initial=0) < 0 or ctx_len.max(initial=0) > room:
        raise ContractViolation(f"ctx_len must fit the table's {room} slots, got {ctx_len.tolist()}", law="ctx_len")


class NativeScratch:
    """Working memory of the kernels, and every layer's planes as they read them."""

    def __init__(self, size: int) -> None:
        self.work = torch.empty(size, dtype=torch.uint8)
        self.address = self.work.data_ptr()
        self._layers: dict[int, tuple[LayerStruct, int]] = {}

    def layer(self, layer: Layer, dtype: str) -> int:
        """The address of the layer's struct, made at its first use."""
        found = self._layers.get(layer.spec.index)
        if found is None:
            struct = _layer_struct(layer, dtype)
            found = self._layers[layer.spec.index] = (struct, ctypes.addressof(struct))
        return found[1]


def _layer_struct(layer: Layer, dtype: str) -> LayerStruct:
    spec, keys, values = layer.spec, layer.keys, layer.values
    kv_dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[keys.dtype]
    return LayerStruct(
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        sinks=layer.sinks.data_ptr() if spec.sinks else None,
        slopes=layer.alibi.data_ptr() if spec.alibi else None,
        slots=keys.shape[1],
        q_heads=spec.q_heads,
        kv_heads=spec.kv_heads,
        k_dim=spec.k_dim,
        v_dim=spec.v_dim,
        k_width=keys.shape[2],
        v_width=values.shape[2],
        kv_dtype=DTYPES[kv_dtype],
        dtype=DTYPES[dtype],
        causal=int(spec.causal),
        window=spec.window or 0,
        scale=spec.scale,
        softcap=spec.softcap or 0.0,
    )


class NativePath(Path):
    """One call of the library for each append and each attend."""

    name = "native"
    steady = True

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._context = kernels.context

    def fixed_bytes(self, spec: PoolSpec) -> int:
        plans = spec.limits.plans * sum(_plan_bytes(group, spec) for group in spec.groups)
        return self._work_bytes(spec) + plans

    def scratch(self, spec: PoolSpec) -> NativeScratch:
        return NativeScratch(self._work_bytes(spec))

    def unsteady(self, spec: PoolSpec) -> list[str]:
        return []

    def plan(self, pool: CpuPool, group: int, batch: Batch) -> NativePlan:
        return NativePlan(pool, group, batch)

    def append(self, plan: Any, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> None:
        where = plan.pool.scratch().layer(layer, plan.pool.spec.dtype)
        self._kernels.append(self._context, where, plan.address, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0))

    def attend(self, plan: Any, layer: Layer, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        scratch = plan.pool.scratch()
        where, sums = scratch.layer(layer, plan.pool.spec.dtype), None if lse is None else lse.data_ptr()
        self._kernels.attend(
            self._context, where, plan.address, q.data_ptr(), q.stride(0), out.data_ptr(), sums, scratch.address
        )

    def copy(self, planes: Planes, pairs: npt.NDArray[np.int32]) -> None:
        for mine, theirs in planes:
            count, _, size = mine.shape
            self._kernels.copy(
                mine.data_ptr(),
                mine.stride(0),
                theirs.data_ptr(),
                theirs.stride(0),
                count,
                size,
                pairs.ctypes.data,
                len(pairs),
            )

    def _work_bytes(self, spec: PoolSpec) -> int:
        limits, widest = spec.limits, max(layer.v_dim for group in spec.groups for layer in group.layers)
        return int(self._kernels.attend_work(self._context, limits.rows, limits.tokens, limits.context, widest))


def _plan_bytes(group: GroupSpec, spec: PoolSpec) -> int:
    """An upper bound of what one live plan of `group` holds."""
    limits = spec.limits
    return 4 * limits.rows * (-(-limits.context // group.block_size) + 4) + 8 * limits.tokens + 4096
