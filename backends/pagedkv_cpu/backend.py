"""One CPU instance of the attention contract. Compute is done when a call returns; copies between pools may not be."""

from __future__ import annotations

import dataclasses
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
    MemoryInfo,
    OpSpec,
    Plan,
    Pool,
    PoolCost,
    PoolSpec,
    UnsupportedError,
    World,
)
from pagedkv.api.checks import (
    check_limits,
    check_size,
    checked_pairs,
    reasons_against,
    reasons_against_parameters,
)
from pagedkv.api.torch import DTYPES, OneRank, TorchCommunicator, communicator
from pagedkv.api.torch_checks import check_call, checked_lse
from pagedkv_cpu import host
from pagedkv_cpu.canonical import Canonical
from pagedkv_cpu.copies import AT_ONCE, Copy, CopyThread
from pagedkv_cpu.native import Kernels
from pagedkv_cpu.native_ops import NativeOps
from pagedkv_cpu.native_path import NativePath
from pagedkv_cpu.ops import Ops
from pagedkv_cpu.path import CpuPlan, Path
from pagedkv_cpu.pool import CpuPool, pool_cost
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
        self._refuse(self._against(spec))
        return pool_cost(spec, self._path.fixed_bytes)

    def alloc_pool(self, spec: PoolSpec) -> Pool:
        self._check_open()
        self._refuse(self._against(spec))
        check_size(spec)
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
        check_limits(batch, mine.spec.limits)
        return self._path.plan(mine, group, batch)

    def attend(
        self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        self._check_open()
        if not isinstance(plan, CpuPlan):
            raise ContractViolation("attend takes a plan made by this backend", law="plan")
        found = plan.pool.layer(layer)
        if found.group != plan.group:
            raise ContractViolation(f"layer {layer} is not in the plan's group {plan.group}", law="layer index")
        dtype = DTYPES[plan.pool.spec.dtype]
        check_call(found.spec, dtype, plan.num_tokens, plan.num_slots, (q, k, v, out), found.unbound())
        lse = checked_lse(extra, found.spec, plan.num_tokens, q)
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
        held = checked_pairs(pairs, mine, other).astype(np.int32)
        copy = Copy(mine.planes_to(other), held, self._path.copy)
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
        mine = self._mine(pool)
        found = mine.layer(layer)
        self._refuse(reasons_against_parameters(found.spec, mine.group(found.group).kv_dtype, params))
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

    def _against(self, spec: PoolSpec) -> list[str]:
        found = reasons_against(spec, self._capabilities)
        if "batch_invariant" in spec.features and spec.dtype != "fp32":
            found.append(f"feature 'batch_invariant' needs dtype 'fp32', not {spec.dtype!r}")
        return found

    def _refuse(self, reasons: list[str]) -> None:
        if reasons:
            raise UnsupportedError(reasons)


def _without_invariance(capabilities: Capabilities) -> Capabilities:
    return dataclasses.replace(capabilities, features=capabilities.features - {"batch_invariant"})
