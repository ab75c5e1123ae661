"""How many blocks the cache gets: one budget that weights, workspace and cache share, and a refusal that shows it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psutil

from pagedkv.api import MemoryInfo, PoolCost
from pagedkv.api.errors import BackendError, ConfigError, OutOfDeviceMemory, PagedKVError
from pagedkv.config import EngineConfig, show_bytes
from pagedkv.engine.swap import HostPlan, host_plan

_log = logging.getLogger("pagedkv.engine")
_T = TypeVar("_T")

AUTO_SWAP = 4 << 30
AUTO_PART = 4
"""Left to the engine, host memory for blocks is 4 GiB, or a quarter of what is available if that is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """What the user asked for, and what the engine needs besides the cache. Sizes in bytes; the note is for people.

    `host`: memory for blocks on the host; where that is the device's own, it is a part of the same budget. `graphs`:
    what recorded steps hold. `loaded`: the weights are in memory already, so that answers about it count them as used;
    `most_available`: what was available beside them when it was first asked.
    """

    num_blocks: int | None
    kv_cache_bytes: int | None
    fraction: float | None
    weights: int
    workspace: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    weights_note: str = ""
    host: HostPlan | None = None
    graphs: int = 0
    loaded: bool = False
    most_available: int | None = None

    @property
    def needed(self) -> int:
        """Bytes besides the cache that are still to be taken."""
        weights = 0 if self.loaded else self.weights
        return weights + self.workspace + self.graphs + shared_bytes(self.host)

    @property
    def useful_blocks(self) -> int:
        """Blocks that max_num_seqs sequences of max_model_len tokens can use, and the null block."""
        return self.max_num_seqs * -(-self.max_model_len // self.block_size) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The budget as decided. `rule` names the setting that decided; `room` is what the cache could have, if known."""

    num_blocks: int
    cost: PoolCost
    weights: int
    workspace: int
    memory: MemoryInfo
    room: int | None
    rule: str
    weights_note: str = ""
    host: HostPlan | None = None
    graphs: int = 0

    @property
    def cache(self) -> int:
        """Bytes of the pool, everything included."""
        return self.cost.fixed + self.num_blocks * self.cost.per_block

    @property
    def total(self) -> int:
        """Bytes of the device's memory that the engine will hold."""
        return self.weights + self.workspace + self.graphs + self.cache + shared_bytes(self.host)

    def table(self) -> str:
        """The budget as text, one part a line."""
        memory = self.memory
        shared = " (shared with the host)" if memory.unified else ""
        rows = [
            ("memory", f"{show_bytes(memory.total)}, {show_bytes(available(memory))} available{shared}"),
            ("weights", show_bytes(self.weights) + (f" ({self.weights_note})" if self.weights_note else "")),
            ("workspace", show_bytes(self.workspace)),
            *([("graphs", f"{show_bytes(self.graphs)} (enforce_eager=True leaves them out)")] if self.graphs else []),
            (
                "cache",
                f"{show_bytes(self.cache)} = {self.num_blocks} blocks of {show_bytes(self.cost.per_block)}"
                f" + {show_bytes(self.cost.fixed)} of the backend's own",
            ),
            *([("swap", _host_text(self.host))] if self.host is not None else []),
            ("together", f"{show_bytes(self.total)}, cache sized by {self.rule}"),
        ]
        return "\n".join(f"  {name:<10} {text}" for name, text in rows)


def shared_bytes(host: HostPlan | None) -> int:
    """What host memory for blocks takes of the device's own."""
    return host.nbytes if host is not None and host.shared else 0


def _beside_swap(host: HostPlan | None) -> str:
    shared = shared_bytes(host)
    return f", and what swap_space may take of it ({show_bytes(shared)})" if shared else ""


def _host_text(host: HostPlan) -> str:
    where = "in this same memory" if host.shared else "in host memory"
    return f"up to {show_bytes(host.nbytes)} = {host.blocks} blocks {where}, made when needed"


def choose_host(
    config: EngineConfig, placements: frozenset[str], memory: MemoryInfo, cost: Callable[[], PoolCost], name: str
) -> HostPlan | None:
    """Host memory for blocks, as asked for or as fits; None for none. Raises `ConfigError` where there can be none."""
    explicit = config.swap_blocks is not None or config.swap_bytes is not None
    if config.swap_blocks == 0 or config.swap_bytes == 0:
        return None
    if "host" not in placements:
        if explicit:
            which = "swap_space" if config.swap_blocks is None else "swap_blocks"
            raise ConfigError(
                f"{which}={getattr(config, which)!r}: backend {name} has no host memory beside its own; leave it out, "
                "and preempted requests are computed again"
            )
        return None
    if not explicit and memory.unified:
        if config.swap_space == "auto":
            _log.info("swap_space=auto is 0 here: the memory of %s is the host's", name)
        return None
    size = config.swap_bytes if explicit else min(AUTO_SWAP, psutil.virtual_memory().available // AUTO_PART)
    plan = host_plan(cost(), blocks=config.swap_blocks, nbytes=size or 0, shared=memory.unified)
    if plan is None and explicit:
        raise ConfigError(
            f"swap_space={config.swap_space!r} holds no block of {show_bytes(cost().per_block)}; raise it"
        )
    if plan is not None and plan.shared:
        _log.warning(
            "the host memory for %d blocks is the same memory that the cache of %s lies in: it costs up to %s of the "
            "one budget, and more cache would do as well (kv_cache_memory)",
            plan.blocks,
            name,
            show_bytes(plan.nbytes),
        )
    return plan


def read_memory(ask: Callable[[], _T], backend: str) -> _T:
    """The backend's answer about its memory; one that raises is reported as the backend's fault, by name."""
    try:
        return ask()
    except PagedKVError:
        raise
    except Exception as error:
        raise BackendError(
            f"backend {backend} failed to report its memory: {error!r}; this is for the backend's author to mend, "
            "another one can be chosen with backend=..."
        ) from error


def plan_memory(
    request: MemoryRequest, cost: PoolCost, memory: MemoryInfo, kv_budget: Callable[[float | None, int], int | None]
) -> MemoryPlan:
    """Decide the number of blocks. Raises `OutOfDeviceMemory` with the numbers when not even one block fits.

    An explicit num_blocks stands as it is, kv_cache_memory wins over the fraction, and neither may exceed what is
    available. What the engine sizes itself never exceeds what its sequences can use, nor what was available when it
    was first asked: the budget comes from a later question, and other processes take and give memory meanwhile.
    """
    there = available(memory)
    if there is not None and request.most_available is not None:
        there = min(there, request.most_available)
    room = None if there is None else there - request.needed
    if request.num_blocks is not None:
        blocks, rule = request.num_blocks, f"num_blocks={request.num_blocks}"
    else:
        size, rule = _size(request, room, kv_budget)
        if room is not None and size > room:
            size, rule = room, f"what is available, less than {rule}"
        blocks = min((size - cost.fixed) // cost.per_block, request.useful_blocks)
        if blocks == request.useful_blocks:
            rule = f"max_num_seqs={request.max_num_seqs} x max_model_len={request.max_model_len}, less than {rule}"
        room = size if room is None else min(room, size)
    plan = MemoryPlan(
        num_blocks=max(blocks, 2),
        cost=cost,
        weights=request.weights,
        workspace=request.workspace,
        memory=memory,
        room=room,
        rule=rule,
        weights_note=request.weights_note,
        host=request.host,
        graphs=request.graphs,
    )
    if blocks < 2 or (room is not None and plan.cache > room):
        raise _does_not_fit(plan, room)
    return plan


def available(memory: MemoryInfo) -> int | None:
    """Bytes that can be had now."""
    return None if memory.free is None else memory.free + (memory.reclaimable or 0)


def _size(
    request: MemoryRequest, room: int | None, kv_budget: Callable[[float | None, int], int | None]
) -> tuple[int, str]:
    if request.kv_cache_bytes is not None:
        if room is not None and request.kv_cache_bytes > room:
            raise OutOfDeviceMemory(
                f"kv_cache_memory={show_bytes(request.kv_cache_bytes)} does not fit: {show_bytes(max(room, 0))} "
                f"are left beside weights ({show_bytes(request.weights)}) and workspace "
                f"({show_bytes(request.workspace)}){_beside_swap(request.host)}",
                requested=request.kv_cache_bytes,
                free=max(room, 0),
            )
        return request.kv_cache_bytes, f"kv_cache_memory={show_bytes(request.kv_cache_bytes)}"
    size = kv_budget(request.fraction, request.needed)
    if size is None:
        raise ConfigError(
            'the backend cannot tell how much memory it has: set kv_cache_memory="1GiB" (or what you can spare), '
            "or num_blocks"
        )
    if request.fraction is None:
        return size, "the backend's default share"
    return size, f"gpu_memory_utilization={request.fraction}"


def _does_not_fit(plan: MemoryPlan, room: int | None) -> OutOfDeviceMemory:
    return OutOfDeviceMemory(
        f"the cache does not fit: {plan.num_blocks} blocks take {show_bytes(plan.cache)}, "
        f"{show_bytes(max(room or 0, 0))} are left\n{plan.table()}\n"
        "  lower max_num_batched_tokens or max_model_len, choose a smaller model or dtype, or give the engine more "
        "memory (gpu_memory_utilization, kv_cache_memory)",
        requested=plan.cache,
        free=max(room or 0, 0),
    )
