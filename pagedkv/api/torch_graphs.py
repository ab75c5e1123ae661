"""Extension "graph" over a runtime that records: decode steps over static plans, refreshed in place. Loads torch.

A recording that fails is no error: a warning says why, and the step runs eagerly at each replay.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from pagedkv.api.backend import Plan, Pool
from pagedkv.api.checks import check_batch, check_limits
from pagedkv.api.errors import ContractViolation, UnsupportedError
from pagedkv.api.extensions import Graph, GraphShape
from pagedkv.api.records import Batch, Limits
from pagedkv.api.torch_streams import Recording, Runtime

_log = logging.getLogger("pagedkv.api.graphs")


class Static(Protocol):
    """A static plan: `refresh` gives it a batch at the same addresses, `nbytes` are those of its buffers."""

    pool: Any
    group: int
    shape: GraphShape
    nbytes: int

    def refresh(self, batch: Batch) -> None: ...


class Graphs:
    """The extension's object, for steps of one token a row.

    `begin`: what each call of the backend starts with, told what a recorded function may not do. `mine`: the pool, if
    it is one of the backend's. `make`: a static plan of a pool, a group and a shape, of `kind`. `most_rows`: of one.
    """

    def __init__(
        self,
        runtime: Runtime,
        begin: Callable[[str], None],
        mine: Callable[[Pool], Any],
        make: Callable[[Any, int, GraphShape], Any],
        kind: type,
        most_rows: int | None = None,
    ) -> None:
        self.recording = False
        self._runtime, self._begin, self._mine, self._make = runtime, begin, mine, make
        self._kind, self._most_rows = kind, most_rows
        self._open: weakref.WeakSet[_Recorded] = weakref.WeakSet()

    def static_plan(self, pool: Pool, group: int, shape: GraphShape) -> Plan:
        self._begin("plans nothing")
        mine = self._mine(pool)
        mine.group(group)
        limits = mine.spec.limits
        if shape.rows > limits.rows or shape.tokens > limits.tokens or shape.max_ctx > limits.context:
            raise ContractViolation(f"{shape} is larger than the pool's {limits}", law="limits")
        if shape.decode_q != 1 or shape.tokens != shape.rows:
            raise UnsupportedError(
                "graphs here hold decode steps of one token a row: give tokens = rows and decode_q = 1"
            )
        if self._most_rows is not None and shape.rows > self._most_rows:
            raise UnsupportedError(f"graphs here hold up to {self._most_rows} rows, not {shape.rows}")
        with self._runtime.here(), torch.inference_mode(False):  # its buffers are written in either mode
            made: Plan = self._make(mine, group, shape)
            return made

    def refresh(self, plan: Plan, batch: Batch) -> None:
        self._begin("plans nothing")
        mine = self._static(plan)
        _check_shape(batch, mine.shape)
        check_batch(batch, mine.pool.spec.groups[mine.group].block_size, mine.pool.num_blocks)
        with self._runtime.here():
            mine.refresh(batch)

    def capture(self, fn: Callable[[], None], plans: Sequence[Plan]) -> Graph:
        self._begin("captures nothing")
        mine = tuple(self._static(plan) for plan in plans)
        graph = _Recorded(self, fn, mine, self._recorded(fn))
        self._open.add(graph)
        return graph

    def replay(self, fn: Callable[[], None], plans: Sequence[Static], recording: Recording | None) -> None:
        """What a graph does at a replay."""
        self._begin("replays nothing")
        for plan in plans:
            plan.pool.check_open()
        with self._runtime.here():
            if recording is None:
                self._run(fn)
            else:
                recording.replay()

    def end(self) -> None:
        """Close what is open."""
        for graph in list(self._open):
            graph.close()

    def _recorded(self, fn: Callable[[], None]) -> Recording | None:
        """None where the device would not record it; what `fn` itself does wrong is raised."""
        try:
            return self._runtime.capture(lambda: self._run(fn))
        except RuntimeError as error:
            _log.warning(
                "a decode step could not be captured into a graph and runs eagerly (%s); enforce_eager leaves the "
                "attempt out",
                error,
            )
            return None

    def _run(self, fn: Callable[[], None]) -> None:
        """Call `fn` under the rules of a recording."""
        self.recording = True
        try:
            fn()
        finally:
            self.recording = False

    def _static(self, plan: Plan) -> Any:
        if not isinstance(plan, self._kind):
            raise ContractViolation("this is no plan of static_plan", law="graph")
        found: Any = plan
        self._mine(found.pool)
        return found


class _Recorded(Graph):
    """A recorded step; without a recording, the step itself."""

    def __init__(
        self, owner: Graphs, fn: Callable[[], None], plans: tuple[Static, ...], recording: Recording | None
    ) -> None:
        self._owner, self._fn, self._plans, self._recording = owner, fn, plans, recording
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Of the recording, and of the buffers of its plans."""
        own = 0 if self._recording is None else self._recording.nbytes
        return own + sum(plan.nbytes for plan in self._plans)

    def replay(self) -> None:
        if self._closed:
            raise ContractViolation("this graph was closed; capture again", law="use after close")
        self._owner.replay(self._fn, self._plans, self._recording)

    def close(self) -> None:
        if not self._closed and self._recording is not None:
            self._recording.close()
        self._closed = True


def _check_shape(batch: Batch, shape: GraphShape) -> None:
    """`ContractViolation` for a batch that was not padded to the shape, or that is larger."""
    check_limits(batch, Limits(rows=shape.rows, tokens=shape.tokens, context=shape.max_ctx))
    rows, slots = len(batch.ctx_len), shape.tokens if batch.slots is None else len(batch.slots)
    most = int(np.diff(batch.cu_q[: batch.num_seqs + 1]).max(initial=0))
    if (rows, slots) != (shape.rows, shape.tokens) or most > shape.decode_q:
        raise ContractViolation(
            f"the batch has {rows} rows, {slots} slots and up to {most} query tokens a row; pad it to {shape}",
            law="graph",
        )
