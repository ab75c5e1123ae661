"""The law checker: a backend around a backend that looks at every call from both sides.

    core  --call-->  laws of the caller  -->  backend  -->  laws of the backend  --result-->  core

Each call costs a few times what it costs alone; what is remembered is bounded by the pools and their limits.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from pagedkv.api import (
    AttentionBackend,
    Batch,
    Capabilities,
    Communicator,
    ContractViolation,
    DeviceError,
    Event,
    MemoryInfo,
    OpSpec,
    Plan,
    Pool,
    PoolCost,
    PoolSpec,
    UnsupportedError,
)
from pagedkv.api.records import Int32
from pagedkv.checking import tensors
from pagedkv.checking.arguments import AttendLaws, check_bound, check_declared, check_pairs, check_spec
from pagedkv.checking.batch import BatchLaws, Ints, Reach, owners, private, spoil
from pagedkv.checking.capabilities import exceeds, undeclared
from pagedkv.checking.extensions import CheckedCanonicalKV, CheckedGraphs
from pagedkv.checking.guard import Around, Guard
from pagedkv.checking.objects import (
    CheckedCommunicator,
    CheckedEvent,
    CheckedOp,
    CheckedPlan,
    CheckedPool,
    close_twice,
)
from pagedkv.checking.order import Moment, Order, Transfer, ids
from pagedkv.checking.results import check_cost, check_memory, check_pool, expect, expect_none, is_bytes

_log = logging.getLogger("pagedkv.checking")
_NONE: Ints = np.zeros(0, np.int64)


def check(
    backend: AttentionBackend, offered: Capabilities | None = None, *, name: str = "", around: Around = nullcontext
) -> CheckedBackend:
    """Wrap a backend so that each call that breaks a law raises `ContractViolation` naming it, see `LAWS`.

    `offered` is what the descriptor said of the device; None leaves that comparison out. `name` stands in messages.
    Each call runs in what `around` makes of its name.
    """
    return CheckedBackend(backend, offered, name or type(backend).__name__, around)


class CheckedBackend(AttentionBackend):
    """Does what the backend inside does, and refuses what breaks a law."""

    def __init__(
        self, inner: AttentionBackend, offered: Capabilities | None, name: str, around: Around = nullcontext
    ) -> None:
        self._inner = inner
        self._guard = Guard(inner, name, around)
        self._order = Order(self._guard)
        self._can = self._first_capabilities(offered)
        self._extensions: dict[str, Any] = {}
        self._warned = False

    def _first_capabilities(self, offered: Capabilities | None) -> Capabilities:
        found = self._guard.ask("capabilities()", self._inner.capabilities)
        expect(self._guard, found, Capabilities, "capabilities()")
        more = [] if offered is None else exceeds(found, offered)
        if more:
            raise self._guard.backend("capabilities", f"beyond what describe() offered: {'; '.join(more)}")
        return found

    # -- what it is ----------------------------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        with self._guard.turn("capabilities()"):
            found = self._guard.ask("capabilities()", self._inner.capabilities, pure=True)
            if found != self._can:
                raise self._guard.backend("capabilities", f"at first {self._can!r}, now {found!r}")
            return found

    @property
    def torch_device(self) -> str:
        device: Any = self._guard.ask("torch_device", lambda: self._inner.torch_device, pure=True)
        expect(self._guard, device, str, "torch_device")
        return str(device)

    def reset_peak(self) -> None:
        with self._guard.turn("reset_peak()"):
            expect_none(self._guard, self._guard.ask("reset_peak()", self._inner.reset_peak), "reset_peak()")

    def memory(self) -> MemoryInfo:
        with self._guard.turn("memory()"):
            found = self._guard.ask("memory()", self._inner.memory)
            check_memory(self._guard, found)
            return found

    def kv_budget(self, fraction: float | None, reserved: int) -> int | None:
        with self._guard.turn("kv_budget()"):
            found = self._guard.ask("kv_budget()", self._inner.kv_budget, fraction, reserved)
            if found is not None and not is_bytes(found):
                raise self._guard.backend("results", f"kv_budget() returned {found!r}, must return bytes or None")
            return found

    def pool_cost(self, spec: PoolSpec) -> PoolCost:
        with self._guard.turn("pool_cost()"):
            check_spec(self._guard, spec, self._can)
            other = dataclasses.replace(spec, num_blocks=spec.num_blocks + 1)
            first, second, third = (self._cost(asked) for asked in (spec, other, spec))
            if not first == second == third:
                raise self._guard.backend("pool_cost", f"first {first}, one block more {second}, again {third}")
            return first

    def _cost(self, spec: PoolSpec) -> PoolCost:
        cost = self._guard.ask("pool_cost()", self._inner.pool_cost, spec, pure=True)
        check_cost(self._guard, cost)
        return cost

    # -- pools and plans -----------------------------------------------------------------------------------------------

    def alloc_pool(self, spec: PoolSpec) -> Pool:
        with self._guard.turn("alloc_pool()"):
            self._guard.not_in_capture("alloc_pool()")
            check_spec(self._guard, spec, self._can)
            pool = self._guard.ask("alloc_pool()", self._inner.alloc_pool, spec)
            check_pool(self._guard, pool, spec)
            return CheckedPool(pool, self._guard)

    def bind(self, pool: Pool, layer: int, params: Mapping[str, Any]) -> None:
        with self._guard.turn("bind()"):
            mine = self.own_pool(pool, "bind()")
            check_bound(self._guard, mine, layer, params)
            expect_none(self._guard, self._guard.ask("bind()", self._inner.bind, mine.inner, layer, params), "bind()")
            mine.bound.setdefault(layer, set()).update(params)

    def plan(self, pool: Pool, group: int, batch: Batch) -> Plan:
        with self._guard.turn("plan()"):
            self._guard.not_in_capture("plan()")
            mine = self.own_pool(pool, "plan()")
            reach = self.check_batch(mine, group, batch)
            made, kept = self.with_copies(
                "plan()", batch, lambda copy: self._guard.ask("plan()", self._inner.plan, mine.inner, group, copy)
            )
            plan = CheckedPlan(made, mine, group, reach)
            plan.kept = kept
            return plan

    def check_batch(self, pool: CheckedPool, group: int, batch: Batch) -> Reach:
        """The batch's laws; what it reads and writes."""
        self.check_group(pool, group)
        if pool.placement != "device":
            raise self._guard.core("placement", f"a pool with placement {pool.placement!r} was planned on")
        check_declared(self._guard, undeclared(self._can, batch), "a batch", self._can)
        return BatchLaws(self._guard, pool.spec, group, batch).check()

    def check_group(self, pool: CheckedPool, group: int) -> None:
        """Refuse a group that the pool does not have."""
        if not isinstance(group, int) or not 0 <= group < len(pool.spec.groups):
            raise self._guard.core("group", f"group {group!r} of a pool with {len(pool.spec.groups)}")

    def with_copies(self, call: str, batch: Batch, ask: Callable[[Batch], Any]) -> tuple[Any, list[Any]]:
        """(the answer, copies of host arrays that the backend still holds). All copies are overwritten after it."""
        copy, arrays = private(batch)
        try:
            answer = ask(copy)
        finally:
            spoil(arrays)
        held = owners(arrays)
        del copy, arrays
        kept = [array for ref in held if (array := ref()) is not None]
        if kept and not self._warned:
            self._warned = True
            _log.warning(
                "%s still holds host arrays of a batch after %s; the checker has overwritten them, as the core may",
                self._guard.backend_name,
                call,
            )
        return answer, kept

    # -- attention -----------------------------------------------------------------------------------------------------

    def attend(
        self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        with self._guard.turn("attend()"):
            mine = self._own_plan(plan)
            reach = mine.ready()
            laws = AttendLaws(self._guard, mine, layer, reach, self.torch_device)
            laws.check(q, k, v, out, extra, self._can)
            if self._guard.capturing:
                self._graphs.check_captured(mine)
            reads = _NONE if q is None else reach.reads(laws.layer)
            self._order.compute(mine.pool.blocks, reads, _NONE if k is None else reach.written, "attend()")
            # A captured call has no values yet to look at, and looking would wait for the device.
            watch = self._ask_attend if self._guard.capturing else self._watch_attend
            watch(mine, layer, q, k, v, out, extra)

    def _own_plan(self, plan: Any) -> CheckedPlan:
        if not isinstance(plan, CheckedPlan) or plan.pool.guard is not self._guard:
            raise self._guard.core("other instance", f"attend() got a {type(plan).__name__} of another instance")
        plan.check_alive()
        return plan

    def _watch_attend(
        self, plan: CheckedPlan, layer: int, q: Any, k: Any, v: Any, out: Any, extra: Mapping[str, Any] | None
    ) -> None:
        tokens = plan.ready().num_tokens
        inputs = {name: tensor for name, tensor in (("q", q), ("k", k), ("v", v)) if tensor is not None}
        before = {name: tensor.clone() for name, tensor in inputs.items()}
        if out is not None:
            out[:tokens].fill_(tensors.SENTINEL)
        self._ask_attend(plan, layer, q, k, v, out, extra)
        for name, tensor in inputs.items():
            if not tensors.same(tensor, before[name]):
                raise self._guard.backend("inputs", f"attend() on layer {layer} changed {name}")
        if out is not None:
            self._check_out(layer, out, tokens)

    def _check_out(self, layer: int, out: Any, tokens: int) -> None:
        missing = tensors.unwritten(out[:tokens]) if tokens else []
        if missing:
            what = f"attend() on layer {layer} left row {missing[0]}, head {missing[1]} of {tokens} rows unwritten"
            raise self._guard.backend("out rows", what)
        if out.shape[0] > tokens and not tensors.finite(out[tokens:]):
            what = f"attend() on layer {layer} left a value that is no number in a row past {tokens}"
            raise self._guard.backend("padding out", what)

    def _ask_attend(
        self, plan: CheckedPlan, layer: int, q: Any, k: Any, v: Any, out: Any, extra: Mapping[str, Any] | None
    ) -> None:
        # A backend need not know the keyword before it declares an extra.
        names: dict[str, Any] = {} if extra is None else {"extra": extra}
        try:
            result = self._guard.ask("attend()", self._inner.attend, plan.inner, layer, q, k, v, out, **names)
        except (DeviceError, UnsupportedError):
            raise
        except ContractViolation as error:
            if plan.kept:
                what = f"attend() on layer {layer} fails on a plan that still holds its batch's host arrays: {error}"
                raise self._guard.backend("host arrays", what) from error
            raise
        expect_none(self._guard, result, "attend()")

    # -- copies and events ---------------------------------------------------------------------------------------------

    def copy_blocks(self, src: Pool, dst: Pool, pairs: Int32, *, after: Event | None = None) -> Event:
        with self._guard.turn("copy_blocks()"):
            mine, other = self.own_pool(src, "copy_blocks()"), self.own_pool(dst, "copy_blocks()")
            check_pairs(self._guard, pairs, mine, other)
            first = None if after is None else self._own_event(after, "copy_blocks()")
            before = None if first is None else first.moment
            transfer, copy = _copy(mine, other, pairs), pairs.copy()
            self._order.check(transfer, before)
            event = self._ask_copy(mine, other, copy, None if first is None else first.inner)
            spoil([copy])
            return self.event(event, "copy_blocks()", self._order.start(transfer, before))

    def _ask_copy(self, src: CheckedPool, dst: CheckedPool, pairs: Int32, after: Event | None) -> Event:
        names: dict[str, Any] = {} if after is None else {"after": after}
        return self._guard.ask("copy_blocks()", self._inner.copy_blocks, src.inner, dst.inner, pairs, **names)

    def event(self, event: Any, call: str, moment: Moment, at_end: Callable[[], None] | None = None) -> CheckedEvent:
        """What the core gets for an event of the backend."""
        expect(self._guard, event, Event, call)
        return CheckedEvent(event, self._guard, self._order, moment, at_end)

    def _own_event(self, event: Any, call: str) -> CheckedEvent:
        if not isinstance(event, CheckedEvent) or event.guard is not self._guard:
            raise self._guard.core("other instance", f"{call} got a {type(event).__name__} of another instance")
        return event

    def own_pool(self, pool: Any, call: str) -> CheckedPool:
        """The pool, if it is one of this instance and open."""
        if not isinstance(pool, CheckedPool) or pool.guard is not self._guard:
            raise self._guard.core("other instance", f"{call} got a {type(pool).__name__} of another instance")
        if pool.closed:
            raise self._guard.core("use after close", f"{call} got a pool that was closed")
        return pool

    def record(self) -> Event:
        with self._guard.turn("record()"):
            return self.event(self._guard.ask("record()", self._inner.record), "record()", self._order.now())

    def wait(self, event: Event) -> None:
        with self._guard.turn("wait()"):
            self._guard.not_in_capture("wait()")
            mine = self._own_event(event, "wait()")
            expect_none(self._guard, self._guard.ask("wait()", self._inner.wait, mine.inner), "wait()")
            self._order.wait(mine.moment)

    def synchronize(self) -> None:
        with self._guard.turn("synchronize()"):
            self._guard.not_in_capture("synchronize()")
            expect_none(self._guard, self._guard.ask("synchronize()", self._inner.synchronize), "synchronize()")
            self._order.end_all()

    def to_host(self, tensor: Any) -> tuple[Event, Any]:
        with self._guard.turn("to_host()"):
            answer: Any = self._guard.ask("to_host()", self._inner.to_host, tensor)
            pair = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], np.ndarray)
            if not pair or answer[1].shape != tuple(tensor.shape):
                what = f"to_host() of {tensors.form(tensor)} returned no (Event, numpy array of this shape)"
                raise self._guard.backend("results", what)
            return self.event(answer[0], "to_host()", self._order.now()), answer[1]

    def close(self) -> None:
        with self._guard.turn("close()", closing=True):
            if not self._guard.closed:
                self._guard.closed = True
                close_twice(self._inner, "the backend", self._guard)

    # -- what only some have -------------------------------------------------------------------------------------------

    def communicator(self, group: Sequence[int]) -> Communicator:
        with self._guard.turn("communicator()"):
            made = self._guard.ask("communicator()", self._inner.communicator, group)
            for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
                if not callable(getattr(made, name, None)):
                    raise self._guard.backend("results", f"communicator() returned an object without {name}()")
            return CheckedCommunicator(made, len(group), self._guard)

    def op(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        with self._guard.turn("op()"):
            made = self._guard.ask("op()", self._inner.op, name, spec)
            if made is None:
                return None
            if not callable(made):
                raise self._guard.backend("results", f"op({name!r}) returned {type(made).__name__}, no callable")
            return CheckedOp(made, name, self._guard)

    def extension(self, name: str) -> Any | None:
        with self._guard.turn("extension()"):
            found = self._guard.ask("extension()", self._inner.extension, name)
            if (found is not None) != (name in self._can.extensions):
                what = f"extension({name!r}) returned {type(found).__name__}, declared: {sorted(self._can.extensions)}"
                raise self._guard.backend("results", what)
            if found is None:
                return None
            return self._extensions.setdefault(name, self._checked_extension(name, found))

    def _checked_extension(self, name: str, found: Any) -> Any:
        if name == "graph":
            return CheckedGraphs(found, self, self._guard, self._order, self._can)
        return CheckedCanonicalKV(found, self, self._guard, self._order) if name == "canonical_kv" else found

    @property
    def _graphs(self) -> CheckedGraphs:
        graphs: CheckedGraphs = self._extensions["graph"]
        return graphs


def _copy(src: CheckedPool, dst: CheckedPool, pairs: Int32) -> Transfer:
    return Transfer(
        source=src.blocks, reads=ids(pairs[:, 0]), target=dst.blocks, writes=ids(pairs[:, 1]), name="copy_blocks()"
    )
