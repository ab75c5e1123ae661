"""One CUDA instance of the attention contract."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pagedkv.api import Batch, Capabilities, OpSpec, Plan, PoolCost, PoolSpec, World
from pagedkv.api.records import Int64
from pagedkv.api.torch_backend import DeviceBackend
from pagedkv.api.torch_graphs import Graphs
from pagedkv.api.torch_streams import Runtime
from pagedkv_cuda.path import Path
from pagedkv_cuda.plans import CudaPlan, Ring, StaticPlan, staged
from pagedkv_cuda.pool import CudaPool, pool_cost


class CudaBackend(DeviceBackend):
    """Attention, pools, copies and graphs on one device. `path` computes, `runtime` is the device."""

    pool_type, plan_type = CudaPool, CudaPlan

    def __init__(
        self,
        capabilities: Capabilities,
        runtime: Runtime,
        path: Path,
        *,
        world: World | None = None,
    ) -> None:
        super().__init__(capabilities, runtime, world)
        self._path = path
        self._graphs = Graphs(
            runtime, self._begin, self._mine, partial(StaticPlan, path=path, runtime=runtime), StaticPlan
        )
        self._rings: weakref.WeakKeyDictionary[CudaPool, list[Ring]] = weakref.WeakKeyDictionary()

    def make_cost(self, spec: PoolSpec) -> PoolCost:
        return pool_cost(spec, self._path)

    def make_pool(self, spec: PoolSpec, cost: PoolCost) -> CudaPool:
        pool = CudaPool(spec, cost, self._runtime, self._path)
        if spec.placement == "device":
            groups = range(len(spec.groups))
            self._rings[pool] = [Ring(pool, number, self._path, self._runtime) for number in groups]
        return pool

    def make_plan(self, pool: CudaPool, group: int, batch: Batch) -> Plan:
        plan = CudaPlan(pool, group)
        size = pool.spec.groups[group].block_size
        plan.take(self._path, staged(batch, size, self._path), self._rings[pool][group].next())
        return plan

    def append(self, plan: CudaPlan, layer: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self._path.append(plan, layer, k, v)

    def rows(self, plan: CudaPlan, layer: Any, tensors: tuple[Any, Any, Any, Any], lse: torch.Tensor | None) -> None:
        q, _, _, out = tensors
        self._path.attend(plan, layer, q, out, lse)

    def copy(self, source: CudaPool, target: CudaPool, pairs: Int64) -> Callable[[], None]:
        staging = self._runtime.staging(pairs.nbytes).view(torch.int64).view(-1, 2)
        staging.copy_(torch.from_numpy(pairs))
        rows, targets, device = source.rows, target.rows, self.torch_device
        return lambda: self._path.copy(rows, targets, staging, device)

    def op(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        self._begin()
        return self._path.op(name, spec)
