"""One CUDA instance of the attention contract."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pagedkv.api import (
    AttentionBackend,
    Batch,
    Capabilities,
    ContractViolation,
    DeviceError,
    Event,
    LayerSpec,
    MemoryInfo,
    OpSpec,
    Plan,
    Pool,
    PoolCost,
    PoolSpec,
    UnsupportedError,
    World,
    needs,
)
from pagedkv.api.torch import DTYPES, OneRank, TorchCommunicator, communicator
from pagedkv_cuda import copies
from pagedkv_cuda.graph import CudaGraphs
from pagedkv_cuda.path import Path
from pagedkv_cuda.plans import CudaPlan, Ring, check_batch, check_limits, staged
from pagedkv_cuda.pool import PARAMETERS, SCALES, CudaPool, Layer, pool_cost, reasons_against, scaled_by_tensor
from pagedkv_cuda.runtime import Runtime, check_not_recording

_log = logging.getLogger("pagedkv.backends.cuda")


class CudaBackend(AttentionBackend):
    """Attention, pools, copies and graphs on one device. `path` computes, `runtime` is the device."""

    def __init__(
        self,
        capabilities: Capabilities,
        runtime: Runtime,
        path: Path,
        *,
        world: World | None = None,
    ) -> None:
        self._capabilities, self._runtime, self._path = capabilities, runtime, path
        self._world = world or World()
        self._graphs = CudaGraphs(self)
        self._pools: weakref.WeakSet[CudaPool] = weakref.WeakSet()
        self._rings: weakref.WeakKeyDictionary[CudaPool, list[Ring]] = weakref.WeakKeyDictionary()
        self._communicators: list[OneRank | TorchCommunicator] = []
        self._recording = False
        self._closed = False

    # -- pure ----------------------------------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def pool_cost(self, spec: PoolSpec) -> PoolCost:
        self._refuse(reasons_against(spec, self._capabilities))
        return pool_cost(spec, self._path)

    @property
    def torch_device(self) -> str:
        return self._runtime.torch_device

    # -- memory --------------------------------------------------------------------------------------------------------

    def alloc_pool(self, spec: PoolSpec) -> Pool:
        self._begin("allocates no pool")
        cost = self.pool_cost(spec)
        limits = spec.limits
        if spec.num_blocks < 1 or min(limits.rows, limits.tokens, limits.context, limits.plans) < 0:
            raise ContractViolation("a pool has at least block 0, and limits are not negative", law="pool spec")
        with self._runtime.here(), torch.inference_mode(False):  # or its tensors could be written in that mode only
            pool = CudaPool(spec, cost, self._runtime, self._path)
            if spec.placement == "device":
                groups = range(len(spec.groups))
                self._rings[pool] = [Ring(pool, number, self._path, self._runtime) for number in groups]
        self._pools.add(pool)
        return pool

    def memory(self) -> MemoryInfo:
        self._begin()
        with self._runtime.here():
            return self._runtime.memory()

    def reset_peak(self) -> None:
        self._begin()
        with self._runtime.here():
            self._runtime.reset_peak()

    def bind(self, pool: Pool, layer: int, params: Mapping[str, Any]) -> None:
        """Sinks and ALiBi slopes, each float32 [q_heads], and scales; at the same addresses: recordings see them."""
        self._begin()
        mine = self._mine(pool)
        found = mine.layer(layer)
        self._refuse(_reasons_against_params(found, mine.group(found.group).kv_dtype, params))
        with self._runtime.here():
            for name, values in params.items():
                getattr(found, name).copy_(torch.from_numpy(np.array(values, dtype=np.float32)))
        found.bound |= params.keys()

    # -- a step --------------------------------------------------------------------------------------------------------

    def plan(self, pool: Pool, group: int, batch: Batch) -> Plan:
        self._begin("plans nothing")
        mine = self._mine(pool)
        size, limits = mine.group(group).block_size, mine.spec.limits
        self._refuse([f"the batch uses {name!r}, which was not declared" for name in self._undeclared(batch)])
        check_limits(batch, limits.rows, limits.tokens, limits.context)
        check_batch(batch, size, mine.num_blocks)
        plan = CudaPlan(mine, group)
        with self._runtime.here():
            plan.take(self._path, staged(batch, size, self._path), self._rings[mine][group].next())
        return plan

    def _undeclared(self, batch: Batch) -> list[str]:
        return sorted(set(needs(batch)) - self._capabilities.features)

    def attend(
        self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        self._begin()
        if not isinstance(plan, CudaPlan) or plan.pool not in self._pools:
            raise ContractViolation("attend takes a plan made by this backend", law="plan")
        found = plan.pool.layer(layer)
        check_call(plan, found, q, k, v, out)
        lse = checked_lse(extra, plan, found, q) if extra else None
        with self._runtime.here():
            if k is not None and plan.num_slots:
                self._path.append(plan, found, k, v)
            if q is not None:
                self._attend(plan, found, q, out, lse)

    def _attend(self, plan: CudaPlan, layer: Layer, q: torch.Tensor, out: torch.Tensor, lse: Any) -> None:
        """A static plan's batch may end anywhere below its shape: zeros first, where no row of it will write."""
        tokens = plan.num_tokens
        past = out if plan.static else out[tokens:]
        if len(past):
            past.zero_()
        if tokens:
            self._path.attend(plan, layer, q, out, lse)

    def copy_blocks(self, src: Pool, dst: Pool, pairs: Any, *, after: Event | None = None) -> Event:
        self._begin("copies nothing")
        mine, other = self._mine(src), self._mine(dst)
        if mine.spec.groups != other.spec.groups:
            raise ContractViolation("blocks are copied between pools of equal groups only", law="copy_blocks")
        held = copies.checked(pairs, mine, other)
        with self._runtime.here():
            staging = self._runtime.staging(held.nbytes).view(torch.int64).view(-1, 2)
            staging.copy_(torch.from_numpy(held))
            rows, targets, device = mine.rows, other.rows, self.torch_device

            def work() -> None:
                if len(staging):
                    self._path.copy(rows, targets, staging, device)

            return self._runtime.copy(work, after)

    # -- time ----------------------------------------------------------------------------------------------------------

    def record(self) -> Event:
        self._begin()
        with self._runtime.here():
            return self._runtime.record()

    def wait(self, event: Event) -> None:
        self._begin("waits for nothing")
        with self._runtime.here():
            self._runtime.wait(event)

    def synchronize(self) -> None:
        self._begin("waits for nothing")
        with self._runtime.here():
            self._runtime.synchronize()

    def to_host(self, tensor: Any) -> tuple[Event, Any]:
        """(event, array), the array in pinned memory; bf16 comes as float32."""
        self._begin("reads nothing")
        with self._runtime.here():
            values = tensor.detach()
            values = (values.float() if values.dtype == torch.bfloat16 else values).contiguous()
            host = self._runtime.staging(values.nbytes).view(values.dtype).view(values.shape)
            host.copy_(values, non_blocking=True)
            return self._runtime.record(), host.numpy()

    # -- everything else -----------------------------------------------------------------------------------------------

    def communicator(self, group: Sequence[int]) -> OneRank | TorchCommunicator:
        self._begin()
        with self._runtime.here():
            made = communicator(self._runtime.collectives, self._world, group)
        self._communicators.append(made)
        return made

    def op(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        self._begin()
        return self._path.op(name, spec)

    def extension(self, name: str) -> Any | None:
        self._begin()
        return self._graphs if name == "graph" and name in self._capabilities.extensions else None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._graphs.end()
        for made in self._communicators:
            made.close()
        for pool in list(self._pools):
            try:
                pool.close()
            except DeviceError as error:
                _log.warning("closing after a failure of the device: %s", error)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin(self, unrecordable: str = "") -> None:
        """What each call starts with. `unrecordable`: what a recorded function may not do, this call being one."""
        if self._closed:
            raise ContractViolation("this backend was closed; create a new one", law="use after close")
        self._runtime.check()
        for made in self._communicators:
            if made.failure is not None:
                raise DeviceError(str(made.failure))
        if unrecordable:
            check_not_recording(self._recording, unrecordable)

    def _mine(self, pool: Pool) -> CudaPool:
        if not isinstance(pool, CudaPool) or pool not in self._pools:
            raise ContractViolation("this pool belongs to another backend instance", law="pool")
        pool.check_open()
        return pool

    def _refuse(self, reasons: list[str]) -> None:
        if reasons:
            raise UnsupportedError(reasons)


# -- checks of one call ------------------------------------------------------------------------------------------------


def check_call(plan: CudaPlan, layer: Layer, q: Any, k: Any, v: Any, out: Any) -> None:
    """Everything about `attend`'s arguments, before anything is written."""
    spec, dtype = layer.spec, DTYPES[plan.pool.spec.dtype]
    if layer.group != plan.group:
        raise ContractViolation(f"layer {spec.index} is not in the plan's group {plan.group}", law="layer index")
    if (k is None) != (v is None) or (q is None) != (out is None):
        raise ContractViolation("k and v come together, and so do q and out", law="attend forms")
    if k is not None:
        if spec.kv_of is not None:
            raise ContractViolation(f"layer {spec.index} reads layer {spec.kv_of}'s cache: k = v = None", law="kv_of")
        _check_tensor("k", k, plan.num_slots, spec.kv_heads, spec.k_dim, dtype)
        _check_tensor("v", v, plan.num_slots, spec.kv_heads, spec.v_dim, dtype)
    if q is not None:
        _check_tensor("q", q, plan.num_tokens, spec.q_heads, spec.k_dim, dtype)
        _check_tensor("out", out, plan.num_tokens, spec.q_heads, spec.v_dim, dtype)
        if not out.is_contiguous():
            raise ContractViolation("out must be contiguous", law="attend tensors")
        if missing := layer.unbound():
            raise ContractViolation(f"bind {missing} of layer {spec.index} before attend", law="bind")


def _check_tensor(name: str, tensor: Any, rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    shape = tensor.shape
    if len(shape) != 3 or shape[0] < rows or shape[1] != heads or shape[2] != dim or tensor.dtype != dtype:
        raise ContractViolation(
            f"{name} must be {dtype} [>= {rows}, {heads}, {dim}], got {tensor.dtype} {list(shape)}",
            law="attend tensors",
        )
    _, between, inside = tensor.stride()
    if (heads > 1 and between != dim) or (dim > 1 and inside != 1):
        raise ContractViolation(
            f"each token's [{heads}, {dim}] of {name} must be contiguous, got strides {tensor.stride()}",
            law="attend tensors",
        )


def checked_lse(extra: Mapping[str, Any], plan: CudaPlan, layer: Layer, q: Any) -> torch.Tensor:
    """The tensor that takes the log-sum-exp, before anything is written."""
    unknown = sorted(extra.keys() - {"lse"})
    if unknown:
        raise UnsupportedError(f"attend takes no extra {', '.join(map(repr, unknown))}; it accepts 'lse'")
    if q is None:
        raise ContractViolation("an append has no log-sum-exp: give 'lse' together with q and out", law="lse")
    lse, tokens, heads = extra["lse"], plan.num_tokens, layer.spec.q_heads
    shaped = isinstance(lse, torch.Tensor) and lse.dim() == 2 and len(lse) >= tokens and lse.shape[1] == heads
    if not shaped or lse.dtype != torch.float32 or not lse.is_contiguous():
        given = f"{lse.dtype} {list(lse.shape)}" if isinstance(lse, torch.Tensor) else type(lse).__name__
        raise ContractViolation(f"lse must be contiguous float32 [>= {tokens}, {heads}], got {given}", law="lse")
    checked: torch.Tensor = lse
    return checked


def _reasons_against_params(layer: Layer, kv_dtype: str, params: Mapping[str, Any]) -> list[str]:
    found = []
    for name, values in params.items():
        shapes = _param_shapes(layer.spec, kv_dtype, name)
        if not shapes:
            found.append(f"layer {layer.spec.index} takes no {name!r} with a cache of {kv_dtype}")
        elif np.shape(values) not in shapes:
            found.append(f"{name!r} must have shape {' or '.join(map(str, shapes))}, got {np.shape(values)}")
        elif name in SCALES and not all(0 < value < np.inf for value in np.ravel(values)):
            found.append(f"{name!r} must be finite and above 0")
    return found


def _param_shapes(spec: LayerSpec, kv_dtype: str, name: str) -> list[tuple[int, ...]]:
    """The shapes of such a value; none where the layer takes none."""
    if name in PARAMETERS:
        return [(spec.q_heads,)] if getattr(spec, name) else []
    bound = name in SCALES and scaled_by_tensor(kv_dtype) and spec.kv_of is None
    return [(), (spec.kv_heads,)] if bound else []
