"""A backend that says of its memory what a test wants, and the planner over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

from pagedkv.api import MemoryInfo, PoolCost
from pagedkv.engine.memory import MemoryPlan, MemoryRequest, plan_memory, read_memory
from tests.helpers.plain import OpsOnlyBackend

GIB = 1 << 30


class Telling(OpsOnlyBackend):
    """Each question about memory takes the next answer; the last one stands. An exception is raised."""

    def __init__(self, *answers: MemoryInfo | Exception) -> None:
        super().__init__()
        self._answers: Iterator[MemoryInfo | Exception] = chain(answers, repeat(answers[-1]))

    def memory(self) -> MemoryInfo:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def request(**names: Any) -> MemoryRequest:
    defaults: dict[str, Any] = {
        "num_blocks": None,
        "kv_cache_bytes": None,
        "fraction": None,
        "weights": 2 * GIB,
        "workspace": GIB // 2,
        "block_size": 16,
        "max_num_seqs": 256,
        "max_model_len": 8192,
    }
    return MemoryRequest(**defaults | names)


def planned(backend: Telling, cost: PoolCost | None = None, **names: Any) -> MemoryPlan:
    """What the engine does with these answers."""
    memory = read_memory(backend.memory, "telling")

    def kv_budget(fraction: float | None, reserved: int) -> int | None:
        ask: Callable[[], int | None] = lambda: backend.kv_budget(fraction, reserved)  # noqa: E731
        return read_memory(ask, "telling")

    return plan_memory(request(**names), cost or PoolCost(per_block=1 << 20, fixed=1 << 20), memory, kv_budget)
