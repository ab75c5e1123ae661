"""Host memory behind the device's pool, made on demand, and the copies to it and back, beside compute."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagedkv.api import AttentionBackend, Event, Pool, PoolCost, PoolSpec
from pagedkv.api.errors import DeviceError, OutOfDeviceMemory
from pagedkv.config import show_bytes
from pagedkv.core.price import Price
from pagedkv.core.tiers import Transfer

_log = logging.getLogger("pagedkv.engine")

SEGMENT_BYTES = 64 << 20
_TIMED_BYTES = 16 << 20
_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """Host memory for blocks: `blocks` of them at most, in pools of `segment` and a null block each.

    `shared`: it is the same memory that the device's pool lies in.
    """

    blocks: int
    segment: int
    cost: PoolCost
    shared: bool

    @property
    def nbytes(self) -> int:
        """Bytes once all of it has been made."""
        pools = -(-self.blocks // self.segment)
        return pools * (self.cost.fixed + self.cost.per_block) + self.blocks * self.cost.per_block


def host_plan(cost: PoolCost, *, blocks: int | None = None, nbytes: int = 0, shared: bool) -> HostPlan | None:
    """So many blocks, or as many as `nbytes` hold; None for none."""
    segment = max(1, SEGMENT_BYTES // cost.per_block)
    if blocks is None:
        pool = cost.fixed + (segment + 1) * cost.per_block
        whole, rest = divmod(nbytes, pool)
        blocks = whole * segment + max(0, (rest - cost.fixed) // cost.per_block - 1)
    return HostPlan(blocks=blocks, segment=min(segment, blocks), cost=cost, shared=shared) if blocks > 0 else None


@dataclass(slots=True, eq=False)
class _Copy:
    """A transfer under way since `began`, and for how long it was seen not to have ended."""

    transfer: Transfer
    events: list[Event]
    began: float
    least: float = 0.0


class Swap:
    """Carries out transfers. A host block's id, from 1 on, tells the pool and the block in it."""

    def __init__(self, backend: AttentionBackend, pool: Pool, plan: HostPlan, price: Price) -> None:
        self.plan, self.price = plan, price
        self._backend, self._pool = backend, pool
        self._spec: PoolSpec = dataclasses.replace(pool.spec, placement="host")
        self._pools: list[Pool] = []
        self._made, self._most = 0, plan.blocks
        self._copies: deque[_Copy] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of the host pools made so far."""
        cost = self.plan.cost
        return len(self._pools) * (cost.fixed + cost.per_block) + self._made * cost.per_block

    def more(self) -> int:
        """Make another pool; returns its blocks, 0 when all were made or memory has run out."""
        count = min(self.plan.segment, self._most - self._made)
        pool = self._alloc(count) if count > 0 else None
        if pool is None:
            return 0
        self._pools.append(pool)
        self._made += count
        return count

    def _alloc(self, count: int) -> Pool | None:
        """A host pool of `count` blocks; None, said once, where memory has run out: none is asked for again."""
        try:
            return self._backend.alloc_pool(dataclasses.replace(self._spec, num_blocks=count + 1))
        except OutOfDeviceMemory as error:
            self._most = self._made
            left = f"{show_bytes(self.nbytes)} remain" if self._made else "preempted requests are computed again"
            _log.warning("no more host memory for blocks: %s; %s", left, error)
            return None

    def begin(self, outbox: deque[Transfer]) -> None:
        """Begin all of `outbox`, after the compute enqueued so far."""
        while outbox:
            began = time.perf_counter()
            self._copies.append(_Copy(outbox[0], self._enqueue(outbox[0]), began))
            outbox.popleft()

    def _enqueue(self, transfer: Transfer) -> list[Event]:
        side = 1 if transfer.to_host else 0
        pool, block = np.divmod(transfer.pairs[:, side] - 1, self.plan.segment)
        pairs = transfer.pairs.copy()
        pairs[:, side] = block + 1
        events = []
        for number in np.unique(pool).tolist():
            host, some = self._pools[number], np.ascontiguousarray(pairs[pool == number])
            source, target = (self._pool, host) if transfer.to_host else (host, self._pool)
            events.append(self._backend.copy_blocks(source, target, some))
        return events

    def land(self, landed: Callable[[Transfer], None], *, wait: bool = False) -> None:
        """Tell `landed` of every transfer that has ended; `wait` for the oldest one."""
        for copy in list(self._copies):
            if wait:
                for event in copy.events:
                    event.join()
                wait = False
            elif any(not event.done() for event in copy.events):
                copy.least = time.perf_counter() - copy.began
                continue
            self.price.saw_copy(len(copy.transfer.pairs), copy.least, time.perf_counter() - copy.began)
            for event in copy.events:
                self._backend.wait(event)
            landed(copy.transfer)
            self._copies.remove(copy)

    # -- a first price -------------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Time copies of empty blocks each way, before anything lies in the pool, if there is memory to copy to."""
        if "bandwidth" in self.price.fixed:
            return
        size = self.plan.cost.per_block
        count = max(1, min(self.plan.segment, self._pool.num_blocks - 1, _TIMED_BYTES // size))
        host = self._alloc(count)
        if host is None:
            return
        try:
            one, many = self.round_trip(host, 1), self.round_trip(host, count)
        finally:
            host.close()
        self.price.latency = one if count == 1 else max(0.0, one - (many - one) / (count - 1))
        rest = many if count == 1 or many <= self.price.latency else many - self.price.latency
        self.price.bandwidth = count * size / max(rest, 1e-9)

    def round_trip(self, host: Pool, count: int) -> float:
        """Seconds for `count` blocks, the mean of both directions, the best of some rounds."""
        there = np.stack([np.zeros(count, np.int32), np.arange(1, count + 1, dtype=np.int32)], axis=1)
        back = np.repeat(there[:, 1:], 2, axis=1)
        seconds = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            self._backend.copy_blocks(self._pool, host, there).join()
            self._backend.copy_blocks(host, self._pool, back).join()
            seconds.append((time.perf_counter() - began) / 2)
        return min(seconds)

    def close(self) -> None:
        """Let what is under way end, and give host memory back."""
        for copy in self._copies:
            for event in copy.events:
                with contextlib.suppress(DeviceError):  # of which the engine has died, and said so
                    event.join()
        self._copies.clear()
        for pool in self._pools:
            pool.close()
