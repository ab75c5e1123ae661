"""A batch as a plan keeps it, and the two kinds of plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.api import ContractViolation, Plan
from pagedkv.api.extensions import GraphShape
from pagedkv.api.records import Int32, Int64
from pagedkv.conformance.loopback.pool import LoopbackPool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """One batch in the backend's own arrays: starts [n + 1], contexts [n], tables [n, columns], slots [A]."""

    num_tokens: int
    starts: Int32
    contexts: Int32
    tables: Int32
    slots: Int64


EMPTY = Staged(
    num_tokens=0,
    starts=np.zeros(1, np.int32),
    contexts=np.zeros(0, np.int32),
    tables=np.zeros((0, 0), np.int32),
    slots=np.zeros(0, np.int64),
)


class LoopbackPlan(Plan):
    """One batch. `_now` is what work that runs now reads, `_next` what was last given; they differ in static plans."""

    def __init__(self, pool: LoopbackPool, group: int, staged: Staged) -> None:
        self._pool, self._group = pool, group
        self._now = self._next = staged
        self._spent = False

    def _check(self) -> None:
        """Raise `ContractViolation` when its pool is closed, or as many plans as the limits say came after it."""
        self._pool._check_open()
        if self._spent:
            raise ContractViolation(
                f"this plan is over: {self._pool.spec.limits.plans} later ones of its group were made, as many as "
                "limits.plans lets live; attend before, or raise limits.plans",
                law="limits.plans",
            )


class StaticPlan(LoopbackPlan):
    """A plan of fixed shape whose batch is given by `refresh`; empty at first."""

    def __init__(self, pool: LoopbackPool, group: int, shape: GraphShape) -> None:
        super().__init__(pool, group, EMPTY)
        self._shape = shape
