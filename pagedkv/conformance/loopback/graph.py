"""Extension "graph": a recording is the function itself, called again at each replay and held to its first run.

What a device would keep from the first run, the calls of `attend` and their order, must be the same in each replay: a
function that decides anything at replay is a mistake of the core.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pagedkv.api import Batch, ContractViolation, OutOfDeviceMemory, Plan, Pool
from pagedkv.api.extensions import Graph, GraphShape
from pagedkv.conformance.loopback import checks
from pagedkv.conformance.loopback.plans import LoopbackPlan, Staged, StaticPlan

if TYPE_CHECKING:
    from pagedkv.conformance.loopback.backend import LoopbackBackend

CALL_BYTES = 256
"""Device memory that a recorded call is said to take, and the graph around them likewise."""

Call = tuple[int, int, tuple[bool, bool]]
"""(number of the plan, layer, whether q and k are given)."""


class LoopbackGraphs:
    """The extension's object: static plans, and the graphs that are open."""

    def __init__(self, backend: LoopbackBackend) -> None:
        self._backend = backend
        self._open: weakref.WeakSet[LoopbackGraph] = weakref.WeakSet()
        self._plans: tuple[StaticPlan, ...] = ()
        self._calls: list[Call] = []

    @property
    def nbytes(self) -> int:
        """Device memory of all open graphs."""
        return sum(graph.nbytes for graph in self._open)

    def static_plan(self, pool: Pool, group: int, shape: GraphShape) -> Plan:
        self._backend._begin("plans nothing")
        mine = self._backend._plannable(pool, group)
        limits = mine.spec.limits
        if shape.rows > limits.rows or shape.tokens > limits.tokens or shape.max_ctx > limits.context:
            raise ContractViolation(f"{shape} is larger than the pool's {limits}", law="limits")
        return StaticPlan(mine, group, shape)

    def refresh(self, plan: Plan, batch: Batch) -> None:
        """The check and the copy now, the change of the plan in its turn."""
        self._backend._begin("plans nothing")
        mine = self._static(plan)
        check_shape(batch, mine._shape)
        staged = self._backend._checked(mine._pool, mine._group, batch)
        mine._next = staged
        self._backend._queues.compute(lambda: _take(mine, staged))

    def capture(self, fn: Callable[[], None], plans: Sequence[Plan]) -> Graph:
        """Run `fn` once, and keep it with the calls that it made."""
        self._backend._begin("captures nothing")
        mine = tuple(self._static(plan) for plan in plans)
        graph = LoopbackGraph(self, fn, mine, self.run(fn, mine))
        if graph.nbytes > self._backend._free():
            raise OutOfDeviceMemory(requested=graph.nbytes, free=self._backend._free())
        self._open.add(graph)
        return graph

    def run(self, fn: Callable[[], None], plans: tuple[StaticPlan, ...]) -> tuple[Call, ...]:
        """Call `fn` under the rules of a recording: the calls it made."""
        queues = self._backend._queues
        self._plans, self._calls, queues.recording = plans, [], True
        try:
            fn()
            return tuple(self._calls)
        finally:
            queues.recording = False

    def note(self, plan: LoopbackPlan, layer: int, forms: tuple[bool, bool]) -> None:
        """Called for each `attend`."""
        if not self._backend._queues.recording:
            return
        if plan not in self._plans:
            raise ContractViolation("a recorded function attends with the plans given to capture only", law="graph")
        self._calls.append((self._plans.index(plan), layer, forms))

    def begin_replay(self) -> None:
        """What a replay checks first."""
        self._backend._begin("replays nothing")

    def end(self) -> None:
        """Close what is open."""
        for graph in list(self._open):
            graph.close()

    def forget(self, graph: LoopbackGraph) -> None:
        self._open.discard(graph)

    def _static(self, plan: Plan) -> StaticPlan:
        if not isinstance(plan, StaticPlan):
            raise ContractViolation("this is no plan of static_plan", law="graph")
        self._backend._my_plan(plan)
        return plan


class LoopbackGraph(Graph):
    """A function with the plans and calls of its recording."""

    def __init__(
        self,
        owner: LoopbackGraphs,
        fn: Callable[[], None],
        plans: tuple[StaticPlan, ...],
        calls: tuple[Call, ...],
    ) -> None:
        self._owner, self._fn, self._plans, self._calls = owner, fn, plans, calls
        self._closed = False

    @property
    def nbytes(self) -> int:
        return CALL_BYTES * (1 + len(self._calls))

    def replay(self) -> None:
        if self._closed:
            raise ContractViolation("this graph was closed; capture again", law="use after close")
        self._owner.begin_replay()
        for plan in self._plans:
            plan._check()
        calls = self._owner.run(self._fn, self._plans)
        if calls != self._calls:
            raise ContractViolation(
                f"a replay made the calls {calls}, the recording {self._calls}: decide outside of the function",
                law="graph",
            )

    def close(self) -> None:
        self._closed = True
        self._owner.forget(self)


def check_shape(batch: Batch, shape: GraphShape) -> None:
    """`ContractViolation` for a batch that was not padded to the shape, or that is larger."""
    checks.check_limits(batch, shape.rows, shape.tokens, shape.max_ctx)
    rows, slots = len(batch.ctx_len), shape.tokens if batch.slots is None else len(batch.slots)
    if (rows, slots) != (shape.rows, shape.tokens) or batch.decode_q > shape.decode_q:
        raise ContractViolation(
            f"the batch has {rows} rows, {slots} slots and decode_q {batch.decode_q}; pad it to {shape}", law="graph"
        )


def _take(plan: StaticPlan, staged: Staged) -> None:
    plan._now = staged
