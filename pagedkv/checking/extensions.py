"""The extensions' laws: recorded steps, and blocks as bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.api import Batch, Capabilities, Event, GroupSpec, LayerSpec, Plan, Pool
from pagedkv.api.extensions import Graph, GraphShape, canonical_fingerprint
from pagedkv.api.records import Int32
from pagedkv.checking.batch import Reach, spoil
from pagedkv.checking.guard import Guard
from pagedkv.checking.objects import CheckedPlan, CheckedPool, close_twice
from pagedkv.checking.order import Order, Transfer, ids
from pagedkv.checking.results import expect, expect_none, is_bytes

if TYPE_CHECKING:
    from pagedkv.checking.backend import CheckedBackend

_ITEM = {"fp32": 4, "bf16": 2, "fp16": 2, "int8/token_head": 1, "fp8_e4m3fn/tensor": 1, "fp8_e5m2/tensor": 1}
_FINGERPRINT = 32


class CheckedGraphs:
    """The extension "graph"."""

    def __init__(self, inner: Any, owner: CheckedBackend, guard: Guard, order: Order, can: Capabilities) -> None:
        self.guard, self.order = guard, order
        self._inner, self._owner, self._can = inner, owner, can
        self._open: weakref.WeakSet[CheckedGraph] = weakref.WeakSet()
        self._captured: tuple[CheckedPlan, ...] = ()

    def static_plan(self, pool: Pool, group: int, shape: GraphShape) -> Plan:
        """A plan of fixed size, to be refreshed before its use."""
        with self.guard.turn("static_plan()"):
            self.guard.not_in_capture("static_plan()")
            mine = self._owner.own_pool(pool, "static_plan()")
            self._owner.check_group(mine, group)
            limits = mine.spec.limits
            if shape.rows > limits.rows or shape.tokens > limits.tokens or shape.max_ctx > limits.context:
                raise self.guard.core("limits", f"{shape} in a pool with {limits}")
            made = self.guard.ask("static_plan()", self._inner.static_plan, mine.inner, group, shape)
            return CheckedPlan(made, mine, group, None, shape)

    def refresh(self, plan: Plan, batch: Batch) -> None:
        """Another batch for a static plan."""
        with self.guard.turn("refresh()"):
            self.guard.not_in_capture("refresh()")
            mine = self._static(plan, "refresh()")
            reach = self._owner.check_batch(mine.pool, mine.group, batch)
            self._check_shape(mine, batch)
            self._check_level(batch)
            answer, mine.kept = self._owner.with_copies(
                "refresh()", batch, lambda copy: self.guard.ask("refresh()", self._inner.refresh, mine.inner, copy)
            )
            expect_none(self.guard, answer, "refresh()")
            mine.reach = reach

    def _static(self, plan: Any, call: str) -> CheckedPlan:
        if not isinstance(plan, CheckedPlan) or plan.pool.guard is not self.guard:
            raise self.guard.core("other instance", f"{call} got a {type(plan).__name__} of another instance")
        if plan.shape is None:
            raise self.guard.core("static plan", f"{call} got a plan that static_plan() did not make")
        plan.check_alive()
        return plan

    def _check_shape(self, plan: CheckedPlan, batch: Batch) -> None:
        shape = plan.shape
        if shape is None:
            return
        slots = shape.tokens if batch.slots is None else len(batch.slots)
        fits = batch.num_tokens <= shape.tokens and batch.max_ctx <= shape.max_ctx and batch.decode_q <= shape.decode_q
        if len(batch.rows) != shape.rows or slots != shape.tokens or not fits:
            given = f"{len(batch.rows)} rows, {slots} slots, {batch.num_tokens} tokens, context {batch.max_ctx}"
            raise self.guard.core("static plan", f"a batch of {given}, decode_q {batch.decode_q} for {shape}")

    def _check_level(self, batch: Batch) -> None:
        counts = np.diff(batch.cu_q[: batch.num_seqs + 1])
        level = self._can.graph
        decode = batch.num_decode == batch.num_seqs
        uniform = len(np.unique(counts)) < 2
        if (level == "decode" and not decode) or (level == "uniform" and not uniform) or level == "none":
            raise self.guard.core("graphs", f"rows of {counts[:16].tolist()} query tokens at graph level {level!r}")

    def capture(self, fn: Callable[[], None], plans: Sequence[Plan]) -> Graph:
        """Record what `fn` enqueues."""
        with self.guard.turn("capture()"):
            self.guard.not_in_capture("capture()")
            mine = tuple(self._static(plan, "capture()") for plan in plans)
            still, most = [graph for graph in self._open if not graph.closed], self._can.max_graphs
            if most is not None and len(still) >= most:
                raise self.guard.core("graphs", f"{len(still)} graphs are open, max_graphs is {most}")
            recorded = _Recorded(fn, lambda: self._recording(mine))
            made = recorded.within(
                lambda: self.guard.ask("capture()", self._inner.capture, recorded, [p.inner for p in mine])
            )
            expect(self.guard, made, Graph, "capture()")
            graph = CheckedGraph(made, mine, recorded, self)
            self._open.add(graph)
            return graph

    @contextmanager
    def _recording(self, plans: tuple[CheckedPlan, ...]) -> Iterator[None]:
        before, self._captured = self._captured, plans
        self.guard.capturing += 1
        try:
            yield
        finally:
            self.guard.capturing -= 1
            self._captured = before

    def check_captured(self, plan: CheckedPlan) -> None:
        """Refuse a plan that the function being captured was not captured with."""
        if plan not in self._captured:
            raise self.guard.core("capture", "attend() got a plan that is not among those of capture()")


class _Recorded:
    """The core's function with the laws of a capture. What it raises is the core's own, not the backend's."""

    def __init__(self, fn: Callable[[], None], recording: Callable[[], Any]) -> None:
        self._fn, self._recording = fn, recording
        self._raised: Exception | None = None

    def __call__(self) -> None:
        with self._recording():
            try:
                self._fn()
            except Exception as error:
                self._raised = error
                raise

    def within(self, ask: Callable[[], Any]) -> Any:
        """Ask the backend; an error of the function comes out as it is."""
        self._raised = None
        try:
            return ask()
        except Exception as error:
            if self._raised is not None and error is not self._raised:
                raise self._raised from error
            raise


class CheckedGraph(Graph):
    """A graph: it ends with its pools, and its plans obey the waits at each replay."""

    def __init__(self, inner: Graph, plans: tuple[CheckedPlan, ...], recorded: _Recorded, owner: CheckedGraphs) -> None:
        self._inner, self._plans, self._recorded, self._owner = inner, plans, recorded, owner
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed or self._owner.guard.closed

    @property
    def nbytes(self) -> int:
        size = self._owner.guard.ask("nbytes of a graph", lambda: self._inner.nbytes, pure=True)
        if not is_bytes(size):
            raise self._owner.guard.backend("results", f"a graph's nbytes is {size!r}")
        return size

    def replay(self) -> None:
        guard = self._owner.guard
        with guard.turn("replay()"):
            if self.closed:
                raise guard.core("use after close", "replay() of a graph that was closed")
            for plan in self._plans:
                plan.check_alive()
                self._check_waits(plan, plan.ready())
            answer = self._recorded.within(lambda: guard.ask("replay()", self._inner.replay))
            expect_none(guard, answer, "replay()")

    def _check_waits(self, plan: CheckedPlan, reach: Reach) -> None:
        group = plan.pool.spec.groups[plan.group]
        reads = ids(np.concatenate([reach.reads(layer) for layer in group.layers]))
        self._owner.order.compute(plan.pool.blocks, reads, reach.written, "replay()")

    def close(self) -> None:
        if not self.closed:
            with self._owner.guard.turn("close of a graph"):
                self._closed = True
                close_twice(self._inner, "a graph", self._owner.guard)


class CheckedCanonicalKV:
    """The extension "canonical_kv"."""

    def __init__(self, inner: Any, owner: CheckedBackend, guard: Guard, order: Order) -> None:
        self._inner, self._owner, self._guard, self._order = inner, owner, guard, order

    def export(self, pool: Pool, group: int, ids_: Int32, lengths: Int32) -> tuple[Event, Any]:
        """Blocks as bytes: their number and fingerprint are compared once they are there."""
        with self._guard.turn("export()"):
            mine, spec = self._blocks("export()", pool, group, ids_, lengths, 0)
            none = np.zeros(0, np.int64)
            read = Transfer(source=mine.blocks, reads=ids(ids_), target=None, writes=none, name="export()")
            self._order.check(read, None)
            answer: Any = self._lend("export()", self._inner.export, mine, group, ids_, lengths)
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise self._guard.backend("results", "export() returned no (Event, bytes)")
            data = answer[1]
            self._check_size(data, spec, int(lengths.sum()))
            at_end = lambda: self._check_fingerprint(data, spec)  # noqa: E731
            return self._owner.event(answer[0], "export()", self._order.start(read, None), at_end), data

    def import_(self, pool: Pool, group: int, ids_: Int32, lengths: Int32, data: Any) -> Event:
        """Bytes into blocks."""
        with self._guard.turn("import_()"):
            mine, _ = self._blocks("import_()", pool, group, ids_, lengths, 1)
            none = np.zeros(0, np.int64)
            write = Transfer(source=None, reads=none, target=mine.blocks, writes=ids(ids_), name="import_()")
            self._order.check(write, None)
            copy = np.array(data)
            event = self._lend("import_()", self._inner.import_, mine, group, ids_, lengths, copy)
            copy.fill(0x6B)
            return self._owner.event(event, "import_()", self._order.start(write, None))

    def _lend(self, call: str, method: Callable[..., Any], pool: CheckedPool, group: int, *arrays: Any) -> Any:
        """Ask with copies of ids and lengths, which are overwritten at once."""
        first, second, *rest = arrays
        copies = [first.copy(), second.copy()]
        answer = self._guard.ask(call, method, pool.inner, group, *copies, *rest)
        spoil(copies)
        return answer

    def _blocks(
        self, call: str, pool: Pool, group: int, blocks: Int32, lengths: Int32, first: int
    ) -> tuple[CheckedPool, GroupSpec]:
        """The pool and group, when the blocks are `first`..num_blocks - 1; as targets (first 1) distinct, too."""
        mine = self._owner.own_pool(pool, call)
        self._owner.check_group(mine, group)
        spec = mine.spec.groups[group]
        for name, array in (("ids", blocks), ("lengths", lengths)):
            if not isinstance(array, np.ndarray) or array.dtype != "int32" or array.ndim != 1:
                raise self._guard.core("canonical ids", f"{name} of {call} are no int32 array of one dimension")
        fine = len(blocks) == len(lengths) and bool(((blocks >= first) & (blocks < mine.num_blocks)).all())
        fine = fine and bool(((lengths >= 0) & (lengths <= spec.block_size)).all())
        if not fine or (first and len(np.unique(blocks)) < len(blocks)):
            what = f"ids {blocks[:16].tolist()} and lengths {lengths[:16].tolist()} of {call}"
            raise self._guard.core("canonical ids", f"{what}, block size {spec.block_size}, {mine.num_blocks} blocks")
        return mine, spec

    def _check_size(self, data: Any, spec: GroupSpec, tokens: int) -> None:
        fine = isinstance(data, np.ndarray) and data.dtype == "uint8" and data.ndim == 1
        if fine and spec.kv_dtype in _ITEM:
            fine = len(data) == _FINGERPRINT + sum(_bytes(layer, spec.kv_dtype, tokens) for layer in spec.layers)
        if not fine:
            what = f"export() gave {getattr(data, 'dtype', type(data).__name__)} {np.shape(data)} for {tokens} tokens"
            raise self._guard.backend("canonical bytes", what)

    def _check_fingerprint(self, data: Any, spec: GroupSpec) -> None:
        if data[:_FINGERPRINT].tobytes() != canonical_fingerprint(spec):
            raise self._guard.backend("canonical bytes", "the first 32 bytes are not canonical_fingerprint(group)")


def _bytes(layer: LayerSpec, kv_dtype: str, tokens: int) -> int:
    """What an export holds of a layer: keys, values, and their float32 scales, by token or bound."""
    if layer.kv_of is not None:
        return 0
    scales = {"token_head": tokens, "tensor": 1}.get(kv_dtype.partition("/")[2], 0)
    return layer.kv_heads * (tokens * (layer.k_dim + layer.v_dim) * _ITEM[kv_dtype] + 2 * 4 * scales)
