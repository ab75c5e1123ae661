"""One CPU instance of the attention contract. Compute is done when a call returns; copies between pools may not be."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api import (
    AttentionBackend,
    Batch,
    Capabilities,
    ContractViolation,
    DeviceError,
    Event,
    MemoryInfo,
    OpSpec,
    Plan,
    Pool,
    PoolCost,
    PoolSpec,
    UnsupportedError,
    World,
)
from pagedkv.api.torch import DTYPES, OneRank, TorchCommunicator, communicator
from pagedkv_cpu import host
from pagedkv_cpu.canonical import Canonical
from pagedkv_cpu.copies import AT_ONCE, Copy, CopyThread
from pagedkv_cpu.native import Kernels
from pagedkv_cpu.native_ops import NativeOps
from pagedkv_cpu.native_path import NativePath
from pagedkv_cpu.ops import Ops
from pagedkv_cpu.path import CpuPlan, Path
from pagedkv_cpu.pool import CpuPool, Layer, pool_cost, reasons_against
from pagedkv_cpu.torch_path import TorchPath

_log = logging.getLogger("pagedkv.backends.cpu")

DEFAULT_CACHE_BYTES = 4 << 30
"""The cache takes no more of a machine's own memory unless the user says how much."""
DEFAULT_CACHE_SHARE = 0.4
"""And no more than this part of what is available."""


class CpuBackend(AttentionBackend):
    """Attention, pools and ops on the processor: with the kernels in C++, or with torch alone where they are None."""

    def __init__(
        self, capabilities: Capabilities, *, threads: int, kernels: Kernels | None = None, world: World | None = None
    ) -> None:
        self._closed = False
        self._world = world or World()
        self._communicators: list[OneRank | TorchCommunicator] = []
        self._pools: weakref.WeakSet[CpuPool] = weakref.WeakSet()
        self._copies = CopyThread()
        self._ops = Ops()
        self._native_ops = None if kernels is None else NativeOps(kernels)
        torch.set_num_threads(threads)
        self._path: Path = TorchPath() if kernels is None else NativePath(kernels)
        kept = capabilities if self._path.steady else _without_invariance(capabilities)
        self._capabilities = kept if kernels else dataclasses.replace(kept, weight_formats=frozenset())

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def pool_cost(self, spec: PoolSpec) -> PoolCost:
        self._refuse(reasons_against(spec, self._capabilities))
        return pool_cost(spec, self._path.fixed_bytes)

    def alloc_pool(self, spec: PoolSpec) -> Pool:
        self._check_open()
        self._refuse(reasons_against(spec, self._capabilities))
        if spec.num_blocks < 1 or min(spec.limits.rows, spec.limits.tokens, spec.limits.context) < 0:
            raise ContractViolation("a pool has at least block 0, and limits are not negative", law="pool spec")
        if "batch_invariant" in spec.features:
            self._refuse(self._path.unsteady(spec))
        with torch.inference_mode(False):  # or its tensors could be written in that mode only
            cost = pool_cost(spec, self._path.fixed_bytes)
            pool = CpuPool(spec, cost, self._path.scratch, self._copies.drain)
        self._pools.add(pool)
        return pool

    def plan(self, pool: Pool, group: int, batch: Batch) -> Plan:
        mine = self._mine(pool)
        mine.scratch()
        mine.group(group)
        _check_limits(batch, mine.spec)
        return self._path.plan(mine, group, batch)

    def attend(
        self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        self._check_open()
        if not isinstance(plan, CpuPlan):
            raise ContractViolation("attend takes a plan made by this backend", law="plan")
        found = plan.pool.layer(layer)
        _check_call(plan, found, q, k, v, out)
        lse = _checked_lse(extra, plan, found, q) if extra else None
        if k is not None:
            self._path.append(plan, found, k, v)
        if q is None:
            return
        tokens = plan.num_tokens
        if tokens:
            self._path.attend(plan, found, q, out, lse)
        if len(out) > tokens:
            out[tokens:].zero_()

    def copy_blocks(self, src: Pool, dst: Pool, pairs: Any, *, after: Event | None = None) -> Event:
        mine, other = self._mine(src), self._mine(dst)
        if mine.spec.groups != other.spec.groups:
            raise ContractViolation("blocks are copied between pools of equal groups only", law="copy_blocks")
        copy = Copy(mine.planes_to(other), _checked_pairs(pairs, mine, other), self._path.copy)
        if mine is not other and self._goes_beside(copy, after):
            return self._copies.begin(copy, after)
        self._copies.run(copy, after)
        return Event()

    def record(self) -> Event:
        self._check_open()
        return Event()

    def wait(self, event: Event) -> None:
        """Compute begins when it is called for, so that whoever calls waits."""
        self._check_open()
        event.join()

    def synchronize(self) -> None:
        self._check_open()
        self._copies.drain()
        self._check_open()

    def memory(self) -> MemoryInfo:
        memory = host.memory()
        return MemoryInfo.of(free=memory.available, total=memory.total, reclaimable=0, unified=True)

    def kv_budget(self, fraction: float | None, reserved: int) -> int | None:
        """As the base class; unset: the least of 4 GiB, 40 % of what is available, and what `reserved` leaves of it."""
        if fraction is not None:
            return super().kv_budget(fraction, reserved)
        available = self.memory().free
        if available is None:
            return None
        return max(0, min(DEFAULT_CACHE_BYTES, int(DEFAULT_CACHE_SHARE * available), available - reserved))

    def close(self) -> None:
        self._closed = True
        self._copies.close()
        for pool in list(self._pools):
            pool.close()
        for made in self._communicators:
            made.close()

    def bind(self, pool: Pool, layer: int, params: Mapping[str, Any]) -> None:
        """Sinks and ALiBi slopes, each float32 [q_heads]."""
        found = self._mine(pool).layer(layer)
        self._refuse(_reasons_against_params(found, params))
        for name, values in params.items():
            getattr(found, name).copy_(torch.from_numpy(np.array(values, dtype=np.float32)))
        found.bound |= params.keys()

    def op(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        self._check_open()
        native = None if self._native_ops is None else self._native_ops.get(name, spec)
        return native or self._ops.get(name, spec)

    def communicator(self, group: Sequence[int]) -> OneRank | TorchCommunicator:
        """Over Gloo, in sums of a fixed order: those of its own rings depend on a tensor's length."""
        self._check_open()
        made = communicator("gloo", self._world, group, ordered=True)
        self._communicators.append(made)
        return made

    def extension(self, name: str) -> Any | None:
        self._check_open()
        return Canonical(self._mine) if name in self._capabilities.extensions else None

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ContractViolation("this backend was closed; create a new one", law="use after close")
        for failed in (made.failure for made in (self._copies, *self._communicators)):
            if failed is not None:
                raise DeviceError(str(failed))

    def _goes_beside(self, copy: Copy, after: Event | None) -> bool:
        """Whether a copy goes to the thread: a large one, or one that would have to wait here."""
        ready = self._copies.idle and (after is None or after.done())
        return not ready or copy.nbytes > AT_ONCE

    def _mine(self, pool: Pool) -> CpuPool:
        self._check_open()
        if not isinstance(pool, CpuPool) or pool not in self._pools:
            raise ContractViolation("this pool belongs to another backend instance", law="pool")
        pool.check_open()
        return pool

    def _refuse(self, reasons: list[str]) -> None:
        if reasons:
            raise UnsupportedError(reasons)


def _without_invariance(capabilities: Capabilities) -> Capabilities:
    return dataclasses.replace(capabilities, features=capabilities.features - {"batch_invariant"})


def _check_limits(batch: Batch, spec: PoolSpec) -> None:
    """`ContractViolation` where a batch is larger than what the pool's scratch was sized for."""
    context = int(batch.ctx_len[: batch.num_seqs].max(initial=0))
    for name, value, limit in (
        ("rows", batch.num_seqs, spec.limits.rows),
        ("tokens", batch.num_tokens, spec.limits.tokens),
        ("context", context, spec.limits.context),
    ):
        if value > limit:
            raise ContractViolation(f"the batch has {name} {value}, the pool's limit is {limit}", law="limits")


def _check_call(plan: CpuPlan, layer: Layer, q: Any, k: Any, v: Any, out: Any) -> None:
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
        if layer.unbound():
            raise ContractViolation(f"bind {layer.unbound()} of layer {spec.index} before attend", law="bind")


def _checked_lse(extra: Mapping[str, Any], plan: CpuPlan, layer: Layer, q: Any) -> torch.Tensor:
    """The tensor that takes the log-sum-exp, before anything is written."""
    unknown = sorted(extra.keys() - {"lse"})
    if unknown:
        raise UnsupportedError(f"attend takes no extra {', '.join(map(repr, unknown))}; it accepts 'lse'")
    if q is None:
        raise ContractViolation("an append has no log-sum-exp: give 'lse' together with q and out", law="lse")
    lse, tokens, heads = extra["lse"], plan.num_tokens, layer.spec.q_heads
    if not isinstance(lse, torch.Tensor) or lse.dtype != torch.float32 or not _has_rows(lse, tokens, heads):
        given = f"{lse.dtype} {list(lse.shape)}" if isinstance(lse, torch.Tensor) else type(lse).__name__
        raise ContractViolation(f"lse must be float32 [>= {tokens}, {heads}], got {given}", law="lse")
    if not lse.is_contiguous():
        raise ContractViolation("lse must be contiguous, as out is", law="lse")
    return lse


def _has_rows(tensor: torch.Tensor, rows: int, columns: int) -> bool:
    return tensor.dim() == 2 and tensor.shape[0] >= rows and tensor.shape[1] == columns


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


def _checked_pairs(pairs: Any, src: CpuPool, dst: CpuPool) -> npt.NDArray[np.int32]:
    """A copy of the pairs, contiguous [N, 2], or `ContractViolation` with what is wrong."""
    array = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    sources, targets = array[:, 0], array[:, 1]
    problem = None
    if array.size and not (sources.min() >= 0 and sources.max() < src.num_blocks):
        problem = f"a source outside 0..{src.num_blocks - 1}"
    elif array.size and not (targets.min() > 0 and targets.max() < dst.num_blocks):
        problem = f"a destination outside 1..{dst.num_blocks - 1} (block 0 is never written)"
    elif len(np.unique(targets)) != len(targets):
        problem = "a destination twice"
    elif src is dst and np.intersect1d(sources, targets).size:
        problem = "an id on both sides within one pool"
    if problem is not None:
        raise ContractViolation(f"copy_blocks got {problem}", law="copy_blocks")
    return array.astype(np.int32)


def _reasons_against_params(layer: Layer, params: Mapping[str, Any]) -> list[str]:
    found = []
    for name, values in params.items():
        if name not in ("sinks", "alibi") or not getattr(layer.spec, name):
            found.append(f"layer {layer.spec.index} takes no {name!r}")
        elif np.shape(values) != (layer.spec.q_heads,):
            found.append(f"{name!r} must have shape ({layer.spec.q_heads},), got {np.shape(values)}")
    return found
