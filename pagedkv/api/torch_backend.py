"""An `AttentionBackend` over one torch device, all but its cache and its attention. Loads torch; optional.

    DeviceBackend   calls checked against the contract, streams, events, collectives, graphs, failure and end
    DevicePool      what every such pool answers

A backend on it says what a pool costs and is made of, makes plans, appends, attends and copies: the methods that begin
with `make_`, `append`, `rows` and `copy`.
"""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pagedkv.api.backend import AttentionBackend, Event, Plan, Pool
from pagedkv.api.checks import (
    PARAMETERS,
    check_batch,
    check_limits,
    check_size,
    checked_pairs,
    reasons_against,
    reasons_against_parameters,
    undeclared,
)
from pagedkv.api.errors import ContractViolation, DeviceError, UnsupportedError
from pagedkv.api.records import (
    Batch,
    Capabilities,
    GroupSpec,
    Int64,
    LayerSpec,
    MemoryInfo,
    PoolCost,
    PoolSpec,
    World,
)
from pagedkv.api.torch import DEFAULT_TIMEOUT, DTYPES, OneRank, TorchCommunicator, communicator
from pagedkv.api.torch_checks import check_call, checked_lse
from pagedkv.api.torch_graphs import Graphs
from pagedkv.api.torch_streams import Runtime, check_not_recording

_log = logging.getLogger("pagedkv.api.backend")


class DevicePool(Pool):
    """A pool's bytes and layers. `layers`: by index, empty in a host pool; each has spec, group, bound, unbound()."""

    def __init__(self, spec: PoolSpec, cost: PoolCost, runtime: Runtime) -> None:
        self.spec, self.cost, self._runtime = spec, cost, runtime
        self.layers: dict[int, Any] = {}
        self._closed = False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._runtime.failure is None:  # copies run on a stream that torch's allocator does not look at
            with self._runtime.here():
                self._runtime.synchronize()
        self.layers = {}
        self.free()

    @abstractmethod
    def free(self) -> None:
        """Give the bytes back; nothing runs on them any more."""

    def check_open(self) -> None:
        """Raise `ContractViolation` after close."""
        if self._closed:
            raise ContractViolation("this pool was closed; allocate a new one", law="use after close")

    def group(self, index: int) -> GroupSpec:
        """The group `index`; `ContractViolation` when the pool has none, or holds blocks only."""
        if self.placement == "host":
            raise ContractViolation(
                "this pool has placement 'host' and holds blocks only; plan on a pool with placement 'device'",
                law="placement",
            )
        if not 0 <= index < len(self.spec.groups):
            raise ContractViolation(f"the pool has groups 0..{len(self.spec.groups) - 1}, not {index}", law="group")
        return self.spec.groups[index]

    def layer(self, index: int) -> Any:
        """The layer `index`; `ContractViolation` when the pool has none."""
        self.check_open()
        found = self.layers.get(index)
        if found is None:
            raise ContractViolation(f"the pool has no layer {index}; it has {sorted(self.layers)}", law="layer index")
        return found


def unbound(layer: LayerSpec, bound: frozenset[str]) -> list[str]:
    """What a layer needs by `bind` and nobody has bound."""
    return [name for name in PARAMETERS if getattr(layer, name) and name not in bound]


class DeviceBackend(AttentionBackend):
    """One device by its runtime. A subclass sets `pool_type` and `plan_type`, and `_graphs` where it records."""

    pool_type: type[DevicePool]
    plan_type: type[Plan]
    """Plans have pool, group, num_tokens, num_slots and static."""

    def __init__(self, capabilities: Capabilities, runtime: Runtime, world: World | None = None) -> None:
        self._capabilities, self._runtime, self._world = capabilities, runtime, world or World()
        self._graphs: Graphs | None = None
        self._pools: weakref.WeakSet[DevicePool] = weakref.WeakSet()
        self._communicators: list[OneRank | TorchCommunicator] = []
        self._closed = False

    # -- what a subclass is --------------------------------------------------------------------------------------------

    @abstractmethod
    def make_cost(self, spec: PoolSpec) -> PoolCost:
        """`pool_cost` of a spec that was checked."""

    @abstractmethod
    def make_pool(self, spec: PoolSpec, cost: PoolCost) -> DevicePool:
        """`alloc_pool` of a spec that was checked."""

    @abstractmethod
    def make_plan(self, pool: Any, group: int, batch: Batch) -> Plan:
        """`plan` of a batch that was checked."""

    @abstractmethod
    def append(self, plan: Any, layer: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v; there are slots."""

    @abstractmethod
    def rows(self, plan: Any, layer: Any, tensors: tuple[Any, Any, Any, Any], lse: torch.Tensor | None) -> None:
        """Attend: `tensors` are `attend`'s q, k, v and out; rows of out past the tokens are left alone."""

    @abstractmethod
    def copy(self, source: Any, target: Any, pairs: Int64) -> Callable[[], None]:
        """What copies these blocks, N >= 1, once it is called; the pairs stay as they are."""

    def against(self, spec: PoolSpec) -> list[str]:
        """Every reason against a pool; more than what was not declared, where a subclass has more."""
        return reasons_against(spec, self._capabilities)

    # -- pure ----------------------------------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def pool_cost(self, spec: PoolSpec) -> PoolCost:
        self._refuse(self.against(spec))
        return self.make_cost(spec)

    @property
    def torch_device(self) -> str:
        return self._runtime.torch_device

    # -- memory --------------------------------------------------------------------------------------------------------

    def alloc_pool(self, spec: PoolSpec) -> Pool:
        self._begin("allocates no pool")
        cost = self.pool_cost(spec)
        check_size(spec)
        with self._runtime.here(), torch.inference_mode(False):  # or its tensors could be written in that mode only
            pool = self.make_pool(spec, cost)
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
        """Into tensors of the layer that have these names, at the same addresses: recordings see them."""
        self._begin()
        mine = self._mine(pool)
        found = mine.layer(layer)
        self._refuse(reasons_against_parameters(found.spec, mine.group(found.group).kv_dtype, params))
        with self._runtime.here():
            for name, values in params.items():
                getattr(found, name).copy_(torch.from_numpy(np.array(values, dtype=np.float32)))
        found.bound |= params.keys()

    # -- a step --------------------------------------------------------------------------------------------------------

    def plan(self, pool: Pool, group: int, batch: Batch) -> Plan:
        self._begin("plans nothing")
        mine = self._mine(pool)
        size = mine.group(group).block_size
        self._refuse(undeclared(batch, self._capabilities))
        check_limits(batch, mine.spec.limits)
        check_batch(batch, size, mine.num_blocks)
        with self._runtime.here():
            return self.make_plan(mine, group, batch)

    def attend(
        self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        self._begin()
        if not isinstance(plan, self.plan_type) or plan.pool not in self._pools:  # type: ignore[attr-defined]
            raise ContractViolation("attend takes a plan made by this backend", law="plan")
        made: Any = plan
        found = made.pool.layer(layer)
        if found.group != made.group:
            raise ContractViolation(f"layer {layer} is not in the plan's group {made.group}", law="layer index")
        dtype = DTYPES[made.pool.spec.dtype]
        check_call(found.spec, dtype, made.num_tokens, made.num_slots, (q, k, v, out), found.unbound())
        lse = checked_lse(extra, found.spec, made.num_tokens, q)
        with self._runtime.here():
            if k is not None and made.num_slots:
                self.append(made, found, k, v)
            if q is not None:
                self._attend(made, found, (q, k, v, out), lse)

    def _attend(self, plan: Any, layer: Any, tensors: tuple[Any, Any, Any, Any], lse: torch.Tensor | None) -> None:
        """A static plan's batch may end anywhere below its shape: zeros first, where no row of it will write."""
        out, tokens = tensors[3], plan.num_tokens
        past = out if plan.static else out[tokens:]
        if len(past):
            past.zero_()
        if tokens:
            self.rows(plan, layer, tensors, lse)

    def copy_blocks(self, src: Pool, dst: Pool, pairs: Any, *, after: Event | None = None) -> Event:
        self._begin("copies nothing")
        mine, other = self._mine(src), self._mine(dst)
        held = checked_pairs(pairs, mine, other)
        with self._runtime.here():
            return self._runtime.copy(self.copy(mine, other, held) if len(held) else _nothing, after)

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
            made = communicator(
                self._runtime.collectives,
                self._world,
                group,
                timeout=self.collectives_timeout(),
                note=self.collectives_note(),
            )
        self._communicators.append(made)
        return made

    def collectives_note(self) -> str:
        """What a failure of the collectives is told with: this rank's device and what shapes its network."""
        return ""

    def collectives_timeout(self) -> float:
        """Seconds that ranks wait for each other when they meet, and in a collective."""
        return DEFAULT_TIMEOUT

    def extension(self, name: str) -> Any | None:
        self._begin()
        return self._graphs if name == "graph" and name in self._capabilities.extensions else None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._graphs is not None:
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
        if unrecordable and self._graphs is not None:
            check_not_recording(self._graphs.recording, unrecordable)

    def _mine(self, pool: Pool) -> Any:
        if not isinstance(pool, self.pool_type) or pool not in self._pools:
            raise ContractViolation("this pool belongs to another backend instance", law="pool")
        pool.check_open()
        return pool

    def _refuse(self, reasons: list[str]) -> None:
        if reasons:
            raise UnsupportedError(reasons)


def _nothing() -> None:
    return
