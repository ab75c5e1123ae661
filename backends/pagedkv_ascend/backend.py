"""One Ascend instance of the attention contract."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pagedkv.api import Batch, Capabilities, OpSpec, Plan, PoolCost, PoolSpec, UnsupportedError, World
from pagedkv.api.extensions import GraphShape
from pagedkv.api.records import Int64
from pagedkv.api.torch_backend import DeviceBackend
from pagedkv.api.torch_graphs import Graphs
from pagedkv.api.torch_streams import copy_rows
from pagedkv_ascend import environment, limits
from pagedkv_ascend.attention import Attention, working_bytes
from pagedkv_ascend.ops import Ops
from pagedkv_ascend.plans import AscendPlan, Ring, StaticPlan, planned
from pagedkv_ascend.pool import STATIC_ROWS, AscendPool, discard_blocks, pool_cost
from pagedkv_ascend.runtime import Runtime, why_no_recordings

_log = logging.getLogger("pagedkv.backends.ascend")


class AscendBackend(DeviceBackend):
    """Paged attention by torch-npu's operators on one device. `note`: what failures of collectives are told with."""

    pool_type, plan_type = AscendPool, AscendPlan
    _runtime: Runtime

    def __init__(
        self, capabilities: Capabilities, runtime: Runtime, *, world: World | None = None, note: str = ""
    ) -> None:
        super().__init__(capabilities, runtime, world)
        self._attention, self._ops, self._note = Attention(runtime), Ops(), note
        self._graphs = Graphs(runtime, self._begin, self._mine, self._static_plan, StaticPlan, STATIC_ROWS)
        self._rings: weakref.WeakKeyDictionary[AscendPool, list[Ring]] = weakref.WeakKeyDictionary()
        self._told: set[int] = set()

    def against(self, spec: PoolSpec) -> list[str]:
        return [*super().against(spec), *limits.reasons_against_pool(spec)]

    def make_cost(self, spec: PoolSpec) -> PoolCost:
        return pool_cost(spec, working_bytes(spec))

    def make_pool(self, spec: PoolSpec, cost: PoolCost) -> AscendPool:
        if spec.placement == "device":
            self._attention.settle(spec, self.torch_device)
            self._tell(spec)
        pool = AscendPool(spec, cost, self._runtime)
        if spec.placement == "device" and (reasons := limits.reasons_against_size(spec, discard_blocks(spec))):
            pool.close()  # what does not fit the memory either was told before
            raise UnsupportedError(reasons)
        if spec.placement == "device":
            self._rings[pool] = [Ring(pool, number, self._runtime) for number in range(len(spec.groups))]
        return pool

    def _tell(self, spec: PoolSpec) -> None:
        """Say once of a block size that prompts are gathered with it."""
        sizes = {group.block_size for group in spec.groups if not limits.pages_prompts(group.block_size)}
        for size in sorted(sizes - self._told):
            _log.info(
                "block_size %d: what is cached of a prompt is gathered before its attention; 128 is the fast path, "
                "which reads it through the block table (so do 256, 384 and 512)",
                size,
            )
        self._told |= sizes

    def make_plan(self, pool: AscendPool, group: int, batch: Batch) -> Plan:
        return planned(pool, group, batch, self._rings[pool][group].next())

    def _static_plan(self, pool: AscendPool, group: int, shape: GraphShape) -> StaticPlan:
        if (reason := why_no_recordings()) is not None:
            raise UnsupportedError(reason)
        return StaticPlan(pool, group, shape, self._runtime)

    def append(self, plan: AscendPlan, layer: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self._attention.append(plan, layer, k, v)

    def rows(self, plan: AscendPlan, layer: Any, tensors: tuple[Any, Any, Any, Any], lse: torch.Tensor | None) -> None:
        q, k, v, out = tensors
        self._attention.attend(plan, layer, q, None if k is None else (k, v), out, lse)

    def copy(self, source: AscendPool, target: AscendPool, pairs: Int64) -> Callable[[], None]:
        staging = self._runtime.staging(pairs.nbytes).view(torch.int64).view(-1, 2)
        staging.copy_(torch.from_numpy(pairs))
        planes = source.planes_to(target)

        def work() -> None:
            for mine, other in planes:
                copy_rows(mine.view(torch.int32), other.view(torch.int32), staging)

        return work

    def op(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        self._begin()
        return self._ops.get(name, spec)

    def collectives_note(self) -> str:
        return self._note

    def collectives_timeout(self) -> float:
        """`HCCL_CONNECT_TIMEOUT`, where it is set."""
        given = environment.connect_timeout()
        return super().collectives_timeout() if given is None else given
