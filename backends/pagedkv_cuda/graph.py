"""Extension "graph": decode steps recorded as CUDA graphs, over static plans that are refreshed in place.

A recording that fails is no error: a warning says why, and the step runs eagerly at each replay.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedkv.api import Batch, ContractViolation, Plan, Pool, UnsupportedError
from pagedkv.api.extensions import Graph, GraphShape
from pagedkv_cuda.plans import StaticPlan, check_batch, check_limits, padded_batch
from pagedkv_cuda.runtime import Recording

if TYPE_CHECKING:
    from pagedkv_cuda.backend import CudaBackend

_log = logging.getLogger("pagedkv.backends.cuda")


class CudaGraphs:
    """The extension's object."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._open: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    def static_plan(self, pool: Pool, group: int, shape: GraphShape) -> Plan:
        self._backend._begin("plans nothing")
        mine = self._backend._mine(pool)
        mine.group(group)
        limits = mine.spec.limits
        if shape.rows > limits.rows or shape.tokens > limits.tokens or shape.max_ctx > limits.context:
            raise ContractViolation(f"{shape} is larger than the pool's {limits}", law="limits")
        if shape.decode_q != 1 or shape.tokens != shape.rows:
            raise UnsupportedError(
                "graphs here hold decode steps of one token a row: give tokens = rows and decode_q = 1"
            )
        with self._backend._runtime.here(), torch.inference_mode(False):  # its buffers are written in either mode
            return StaticPlan(mine, group, shape, self._backend._path, self._backend._runtime)

    def refresh(self, plan: Plan, batch: Batch) -> None:
        backend = self._backend
        backend._begin("plans nothing")
        mine = self._static(plan)
        size = mine.pool.spec.groups[mine.group].block_size
        check_shape(batch, mine.shape)
        check_batch(batch, size, mine.pool.num_blocks)
        with backend._runtime.here():
            mine.refresh(backend._path, padded_batch(batch, size, mine.shape))

    def capture(self, fn: Callable[[], None], plans: Sequence[Plan]) -> Graph:
        backend = self._backend
        backend._begin("captures nothing")
        mine = tuple(self._static(plan) for plan in plans)
        graph = CudaGraph(self, fn, mine, self._recording(fn))
        self._open.add(graph)
        return graph

    def _recording(self, fn: Callable[[], None]) -> Recording | None:
        """None where the device would not record it; what `fn` itself does wrong is raised."""
        try:
            return self._backend._runtime.capture(lambda: self.run(fn))
        except RuntimeError as error:
            _log.warning(
                "a decode step could not be captured into a graph and runs eagerly (%s); enforce_eager leaves the "
                "attempt out",
                error,
            )
            return None

    def run(self, fn: Callable[[], None]) -> None:
        """Call `fn` under the rules of a recording."""
        self._backend._recording = True
        try:
            fn()
        finally:
            self._backend._recording = False

    def end(self) -> None:
        """Close what is open."""
        for graph in list(self._open):
            graph.close()

    def _static(self, plan: Plan) -> StaticPlan:
        if not isinstance(plan, StaticPlan):
            raise ContractViolation("this is no plan of static_plan", law="graph")
        self._backend._mine(plan.pool)
        return plan


class CudaGraph(Graph):
    """A recorded step; without a recording, the step itself."""

    def __init__(
        self, owner: CudaGraphs, fn: Callable[[], None], plans: tuple[StaticPlan, ...], recording: Recording | None
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
        backend = self._owner._backend
        backend._begin("replays nothing")
        for plan in self._plans:
            plan.pool.check_open()
        with backend._runtime.here():
            if self._recording is None:
                self._owner.run(self._fn)
            else:
                self._recording.replay()

    def close(self) -> None:
        if not self._closed and self._recording is not None:
            self._recording.close()
        self._closed = True


def check_shape(batch: Batch, shape: GraphShape) -> None:
    """`ContractViolation` for a batch that was not padded to the shape, or that is larger."""
    check_limits(batch, shape.rows, shape.tokens, shape.max_ctx)
    rows, slots = len(batch.ctx_len), shape.tokens if batch.slots is None else len(batch.slots)
    most = int(np.diff(batch.cu_q[: batch.num_seqs + 1]).max(initial=0))
    if (rows, slots) != (shape.rows, shape.tokens) or most > shape.decode_q:
        raise ContractViolation(
            f"the batch has {rows} rows, {slots} slots and up to {most} query tokens a row; pad it to {shape}",
            law="graph",
        )
