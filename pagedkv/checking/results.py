"""What a backend returns: one predicate for each type of the contract."""

from __future__ import annotations

from typing import Any

from pagedkv.api import MemoryInfo, Pool, PoolCost, PoolSpec
from pagedkv.checking.guard import Guard


def is_bytes(value: Any) -> bool:
    """Whether it is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_cost(guard: Guard, cost: Any) -> None:
    """Two numbers of bytes."""
    if not isinstance(cost, PoolCost) or not is_bytes(cost.per_block) or not is_bytes(cost.fixed):
        raise guard.backend("results", f"pool_cost() returned {cost!r}, must return PoolCost of bytes from 0 on")


def check_memory(guard: Guard, memory: Any) -> None:
    """Bytes or None, and no more free than there is."""
    fine = isinstance(memory, MemoryInfo) and all(
        value is None or is_bytes(value)
        for value in (memory.free, memory.total, memory.reclaimable, memory.allocated, memory.peak)
    )
    if fine and memory.free is not None and memory.total is not None:
        fine = memory.free <= memory.total
    if not fine:
        raise guard.backend(
            "results", f"memory() returned {memory!r}, must return MemoryInfo of bytes or None, free <= total"
        )


def check_pool(guard: Guard, pool: Any, spec: PoolSpec) -> None:
    """A pool that is what was asked for."""
    if not isinstance(pool, Pool):
        raise guard.backend("results", f"alloc_pool() returned {type(pool).__name__}, must return a Pool")
    for name, wanted in (("spec", spec), ("num_blocks", spec.num_blocks), ("placement", spec.placement)):
        given = getattr(pool, name, None)
        if given != wanted:
            raise guard.backend("results", f"the pool's {name} is {given!r}, was asked to be {wanted!r}")


def expect(guard: Guard, value: Any, cls: type, call: str) -> None:
    """An instance of a class."""
    if not isinstance(value, cls):
        raise guard.backend("results", f"{call} returned {type(value).__name__}, must return {cls.__name__}")


def expect_none(guard: Guard, value: Any, call: str) -> None:
    """Nothing."""
    if value is not None:
        raise guard.backend("results", f"{call} returned {type(value).__name__}, must return None")
