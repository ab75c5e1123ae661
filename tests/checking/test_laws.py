"""Each law broken alone: by a core around a good backend, or by a backend under a good core."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import (
    ContractViolation,
    DeviceError,
    Event,
    Limits,
    MemoryInfo,
    OpSpec,
    OutOfDeviceMemory,
    PoolCost,
    UnsupportedError,
    needs,
)
from pagedkv.api.extensions import canonical_fingerprint
from pagedkv.checking import LAWS, check
from tests.backends.cpu.rig import layer_spec, shared_backend
from tests.checking.rig import BLOCK, CAPABILITIES, SHAPE, SPEC, Alone, Around, Core, Recorded, batch, static_batch

Wrong = Callable[[Core], Any]


def i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def planned(**changes: Any) -> Wrong:
    return lambda core: core.plan(**changes)


def attended(layer: int = 0, **changes: Any) -> Wrong:
    return lambda core: core.attend(layer=layer, **changes)


def spec(**changes: Any) -> Wrong:
    return lambda core: core.checked.alloc_pool(dataclasses.replace(SPEC, **changes))


def group_of(*layers: Any) -> Wrong:
    return spec(groups=(dataclasses.replace(SPEC.groups[0], layers=layers),))


def copied(*pairs: tuple[int, int]) -> Wrong:
    return lambda core: core.copy(*pairs)


def out_in_q(core: Core) -> None:
    both = torch.zeros(12, 4, 16)
    core.attend(q=both[:6], out=both[5:11])


def table(*rows: Any) -> np.ndarray:
    return i32(*rows)


def late_plan(core: Core) -> None:
    first = core.plan()
    core.plan()
    core.attend(first)  # still alive: limits.plans is 2
    core.plan()
    core.attend(first)


def pool_of_another(core: Core) -> None:
    core.checked.plan(Core().pool, 0, batch())


def event_of_another(core: Core) -> None:
    core.checked.wait(Core().checked.record())


def closed_pool(core: Core) -> None:
    plan = core.plan()
    core.pool.close()
    core.attend(plan)


def closed_backend(core: Core) -> None:
    core.checked.close()
    core.checked.close()  # legal
    core.checked.memory()


def closed_graph(core: Core) -> None:
    graph = core.capture(core.refreshed())
    graph.close()
    graph.close()  # legal
    graph.replay()


def graph_of_a_closed_pool(core: Core) -> None:
    graph = core.capture(core.refreshed())
    core.pool.close()
    graph.replay()


def two_threads(core: Core) -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow() -> MemoryInfo:
        inside.set()
        leave.wait(10)
        return MemoryInfo()

    core.inner.memory = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=core.checked.memory)
    thread.start()
    inside.wait(10)
    try:
        core.checked.record()
    finally:
        leave.set()
        thread.join()


def write_before_wait(core: Core) -> None:
    core.copy((2, 9))
    core.attend()  # writes block 2, which the copy reads


def read_before_wait(core: Core) -> None:
    core.copy((9, 1))
    core.attend(k=None, v=None)


def chain_without_after(core: Core) -> None:
    core.copy((9, 10))
    core.copy((10, 11))


def replay_before_wait(core: Core) -> None:
    graph = core.capture(core.refreshed())
    core.copy((9, 1))
    graph.replay()


def copy_after_too_early(core: Core) -> None:
    early = core.checked.record()
    core.attend()
    core.copy((2, 9), after=early)


def foreign_plan_in_capture(core: Core) -> None:
    listed, other = core.refreshed(), core.refreshed()
    q, k, v, out = core.tensors(SHAPE.tokens)
    core.graphs().capture(lambda: core.checked.attend(other, 0, q, k, v, out), [listed])


def exported(**changes: Any) -> Wrong:
    arguments = {"ids": i32(1, 2), "lengths": i32(16, 4)} | changes
    return lambda core: core.checked.extension("canonical_kv").export(core.pool, 0, *arguments.values())


def imported(*ids: int) -> Wrong:
    data = np.zeros(0, np.uint8)
    return lambda core: core.checked.extension("canonical_kv").import_(core.pool, 0, i32(*ids), i32(1, 1), data)


def bound(layer: int = 2, **params: Any) -> Wrong:
    return lambda core: core.checked.bind(core.pool, layer, params)


CALLERS: dict[str, list[Wrong]] = {
    "batch arrays": [
        planned(ctx_len=np.array([20, 5])),
        planned(slots=i32(*batch().slots)),
        planned(rows=i32(1)),
        planned(num_seqs=3),
        planned(block_table=i32(1, 2)),
        planned(max_q=-1),
    ],
    "cu_q": [planned(cu_q=i32(1, 1, 6)), planned(cu_q=i32(0, 7, 6)), planned(cu_q=i32(0, 1, 7))],
    "padding rows": [
        planned(cu_q=i32(0, 1, 5, 6), ctx_len=i32(20, 5, 0), rows=i32(1, 2, 0)),
        planned(cu_q=i32(0, 1, 6, 6), ctx_len=i32(20, 5, 9), rows=i32(1, 2, 0)),
    ],
    "context": [planned(ctx_len=i32(20, 4)), planned(ctx_len=i32(49, 5), max_ctx=49)],
    "rows": [planned(rows=i32(1, 3)), planned(rows=i32(-1, 2))],
    "row 0": [planned(block_table=table([0, 1, 0], [1, 2, 0], [3, 0, 0]))],
    "block table": [
        planned(block_table=table([0, 0, 0], [1, 2, 0], [3, 0, 32])),
        planned(block_table=table([0, 0, 0], [1, 2, 0], [3, -1, 0])),
    ],
    "visible blocks": [
        planned(block_table=table([0, 0, 0], [0, 2, 0], [3, 0, 0])),
        planned(group=1, block_table=table([0, 0, 0], [1, 0, 0], [3, 0, 0]), slots=None),
    ],
    "slots": [
        planned(slots=np.array([15, 48, 49, 50, 51, 52])),
        planned(slots=np.array([32 * BLOCK, 48, 49, 50, 51, 52])),
        planned(slots=np.array([-2, 48, 49, 50, 51, 52])),
        planned(slots=np.array([35, 48, 48, 50, 51, 52])),
    ],
    "slot places": [
        planned(slots=np.array([36, 48, 49, 50, 51, 52])),  # one place behind row A's context
        planned(slots=np.array([35, 48, 49, 50, 51, 9 * BLOCK])),  # nobody's block
    ],
    "bounds": [planned(max_q=4), planned(max_ctx=19)],
    "num_decode": [
        planned(num_decode=2),
        planned(num_decode=3),
        planned(cu_q=i32(0, 0, 6), ctx_len=i32(20, 6), max_q=6),
    ],
    "limits": [
        planned(cu_q=i32(0, 1, 6, 6, 6, 6), ctx_len=i32(20, 5, 0, 0, 0), rows=i32(1, 2, 0, 0, 0)),
        planned(num_tokens=65, cu_q=i32(0, 1, 65), max_q=64),
        planned(slots=np.full(65, -1)),
        planned(ctx_len=i32(129, 5), max_ctx=129, block_table=np.zeros((3, 9), np.int32)),
    ],
    "pool spec": [
        spec(num_blocks=0),
        spec(limits=Limits(rows=-1, tokens=1, context=1)),
        group_of(layer_spec(0), layer_spec(0)),
        group_of(layer_spec(0), layer_spec(1, kv_of=3)),
    ],
    "group": [planned(group=2), planned(group=-1)],
    "placement": [
        lambda core: core.checked.plan(core.checked.alloc_pool(dataclasses.replace(SPEC, placement="host")), 0, batch())
    ],
    "G1": [
        group_of(layer_spec(0, alibi=True)),
        spec(features=frozenset({"lse"})),
        attended(extra={"lse": torch.zeros(6, 4)}),
        attended(extra={"unheard_of": 1}),
    ],
    "attend forms": [
        attended(v=None),
        attended(out=None),
        lambda core: core.attend(core.plan(slots=None)),
    ],
    "attend tensors": [
        attended(q=torch.zeros(5, 4, 16)),
        attended(k=torch.zeros(6, 4, 16)),
        attended(v=torch.zeros(6, 2, 16, dtype=torch.float64)),
        attended(out=torch.zeros(6, 64)),
        attended(q=torch.zeros(6, 16, 4).transpose(1, 2)),
        attended(k=torch.zeros(6, 2, 16, device="meta")),
        attended(q=[[1.0]]),
    ],
    "out overlap": [attended(out=torch.zeros(12, 4, 16)[::2]), out_in_q],
    "layer": [attended(layer=4), attended(layer=9)],
    "kv_of": [lambda core: core.attend(core.plan(group=1), layer=5)],
    "plans alive": [late_plan],
    "other instance": [
        pool_of_another,
        event_of_another,
        lambda core: core.attend(Core().plan()),
        lambda core: core.attend(object()),
        lambda core: core.copy((1, 2), after=Event()),
    ],
    "use after close": [closed_pool, closed_backend, closed_graph, graph_of_a_closed_pool],
    "bind": [
        bound(sinks=np.zeros(4)),
        bound(sinks=np.zeros(3, np.float32)),
        bound(layer=0, sinks=np.zeros(4, np.float32)),
        bound(layer=9),
        bound(something=np.zeros(4, np.float32)),
    ],
    "unbound": [lambda core: Core(bound=False).attend(layer=2)],
    "copy_blocks": [
        copied((1, 0)),
        copied((1, 32)),
        copied((-1, 3)),
        copied((1, 3), (2, 3)),
        copied((1, 2), (2, 3)),
        lambda core: core.checked.copy_blocks(core.pool, core.pool, np.array([[1, 2]])),
        lambda core: core.copy((1, 2), to=core.checked.alloc_pool(dataclasses.replace(SPEC, groups=SPEC.groups[:1]))),
    ],
    "wait": [write_before_wait, read_before_wait, chain_without_after, replay_before_wait],
    "after": [copy_after_too_early],
    "one at a time": [two_threads],
    "static plan": [
        lambda core: core.attend(core.static_plan()),
        lambda core: core.refreshed(slots=np.array([35])),
        lambda core: core.refreshed(cu_q=i32(0, 1), ctx_len=i32(20), rows=i32(1)),
        lambda core: core.graphs().refresh(core.plan(), static_batch()),
        lambda core: core.capture(core.static_plan()),
    ],
    "capture": [
        foreign_plan_in_capture,
        lambda core: core.capture(core.refreshed(), core.plan),
        lambda core: core.capture(core.refreshed(), core.checked.synchronize),
        lambda core: core.capture(core.refreshed(), lambda: core.checked.wait(core.checked.record())),
        lambda core: core.capture(core.refreshed(), lambda: core.checked.record().join()),
    ],
    "graphs": [
        lambda core: core.refreshed(num_decode=0),
        lambda core: [core.capture(core.refreshed()) for _ in range(2)],
    ],
    "canonical ids": [
        exported(ids=i32(-1, 2)),
        exported(ids=i32(1, 32)),
        exported(lengths=i32(-1, 4)),
        imported(0, 2),
        imported(2, 2),
        exported(lengths=i32(17, 4)),
        exported(ids=np.array([1, 2])),
        exported(lengths=i32(1)),
    ],
}
"""Law -> calls of a core that break it alone, on a backend that keeps every law."""


# -- backends, each wrong in one way -----------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **names: Any) -> Any:
        raise error

    return method


def giving(value: Any) -> Callable[..., Any]:
    return lambda self, *args, **names: value


class Refusing(Around):
    """Never recovers from a refusal."""

    refused = False

    def alloc_pool(self, spec: Any) -> Any:
        if spec.num_blocks > 1000:
            self.refused = True
            raise OutOfDeviceMemory(requested=1, free=0)
        return super().alloc_pool(spec)

    def memory(self) -> Any:
        if self.refused:
            raise RuntimeError("in a bad state")
        return super().memory()


class Forgetting(Around):
    """Fails once, then goes on as if nothing had been."""

    failed = False

    def record(self) -> Event:
        if not self.failed:
            self.failed = True
            raise DeviceError("gone")
        return Event()


class KeepingHostArrays(Around):
    """Plans when it attends."""

    def plan(self, pool: Any, group: int, batch: Any) -> Any:
        return pool, group, batch

    def attend(self, plan: Any, *args: Any, **names: Any) -> None:
        self.inner.attend(self.inner.plan(*plan), *args, **names)


class Changing(Around):
    asked = 0

    def capabilities(self) -> Any:
        self.asked += 1
        return dataclasses.replace(CAPABILITIES, preferred_block_size=self.asked)


class Growing(Around):
    def pool_cost(self, spec: Any) -> Any:
        return PoolCost(per_block=1, fixed=spec.num_blocks)


class Normalizing(Around):
    def attend(self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Any = None) -> None:
        super().attend(plan, layer, q, k, v, out)
        q.mul_(2)


class SkippingAHead(Around):
    def attend(self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Any = None) -> None:
        before = out[2, 3].clone()
        super().attend(plan, layer, q, k, v, out)
        out[2, 3] = before


class LeavingPadding(Around):
    def attend(self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Any = None) -> None:
        super().attend(plan, layer, q[:6], k, v, out[:6])


class Flickering(Event):
    answers = (True, False)

    def done(self) -> bool:
        first, *rest = self.answers
        self.answers = tuple(rest)
        return first


class Once(Around):
    def close(self) -> None:
        super().close()
        if self.closes > 1:
            raise RuntimeError("closed already")


class Narrow(Alone):
    def all_gather(self, tensor: Any, dim: int = -1) -> Any:
        return tensor


def gone(core: Core) -> None:
    with pytest.raises(DeviceError):
        core.checked.record()
    core.checked.record()


def ask_twice(core: Core) -> None:
    event = core.checked.record()
    event.done()
    event.done()


def padded_out(core: Core) -> None:
    q, k, v, out = core.tensors(8)
    core.attend(q=q, k=k, v=v, out=out)


def closed(core: Core) -> None:
    core.checked.close()


def gather(core: Core) -> None:
    core.checked.communicator([0, 1]).all_gather(torch.zeros(2, 3))


def export_and_join(core: Core) -> None:
    exported()(core)[0].join()


def large_pool(core: Core) -> None:
    spec(num_blocks=2000)(core)


def plain(name: str) -> Wrong:
    return lambda core: getattr(core.checked, name)()


def made(method: str, value: Any) -> type[Around]:
    return type("Broken", (Around,), {method: giving(value)})


def good_size(fingerprint: bytes) -> np.ndarray:
    real = Around().export(type("P", (), {"spec": SPEC})(), 0, i32(1, 2), i32(16, 4))[1].copy()
    real[:32] = np.frombuffer(fingerprint, np.uint8)
    return real


class WrongDevice(Around):
    torch_device = None  # type: ignore[assignment]


class GraphSize(Recorded):
    nbytes = -1  # type: ignore[assignment]


BACKENDS: dict[str, list[tuple[type[Around], Wrong]]] = {
    "results": [
        (made("pool_cost", PoolCost(per_block=-1, fixed=0)), lambda core: core.checked.pool_cost(SPEC)),
        (made("pool_cost", 5), lambda core: core.checked.pool_cost(SPEC)),
        (made("memory", MemoryInfo(free=2, total=1)), plain("memory")),
        (made("memory", None), plain("memory")),
        (made("kv_budget", -1), lambda core: core.checked.kv_budget(0.5, 0)),
        (made("kv_budget", 1.5), lambda core: core.checked.kv_budget(0.5, 0)),
        (made("record", None), plain("record")),
        (made("synchronize", 1), plain("synchronize")),
        (made("copy_blocks", None), copied((1, 2))),
        (made("to_host", np.zeros(3)), lambda core: core.checked.to_host(torch.zeros(3))),
        (made("to_host", (Event(), np.zeros(2))), lambda core: core.checked.to_host(torch.zeros(3))),
        (made("op", 5), lambda core: core.checked.op("linear", OpSpec(dtype="fp32"))),
        (made("extension", None), lambda core: core.graphs()),
        (made("communicator", None), gather),
        (made("capture", None), lambda core: core.capture(core.refreshed())),
        (made("capture", GraphSize(int)), lambda core: core.capture(core.refreshed()).nbytes),
        (WrongDevice, attended()),
    ],
    "capabilities": [(Changing, plain("capabilities"))],
    "pool_cost": [(Growing, lambda core: core.checked.pool_cost(SPEC))],
    "errors": [
        (type("Broken", (Around,), {"attend": raising(IndexError("x"))}), attended()),
        (type("Broken", (Around,), {"plan": raising(NotImplementedError())}), planned()),
        (type("Broken", (Around,), {"record": raising(AssertionError())}), plain("record")),
    ],
    "usable": [(Refusing, large_pool)],
    "device error": [(Forgetting, gone)],
    "inputs": [(Normalizing, attended())],
    "out rows": [(SkippingAHead, attended()), (made("attend", None), attended())],
    "padding out": [(LeavingPadding, padded_out)],
    "host arrays": [(KeepingHostArrays, attended())],
    "events": [
        (made("record", Flickering()), ask_twice),
        (made("record", type("E", (Event,), {"done": giving(1)})()), ask_twice),
    ],
    "close": [(Once, closed)],
    "collectives": [(made("communicator", Narrow()), gather)],
    "canonical bytes": [
        (made("export", (Event(), np.zeros(40, np.uint8))), exported()),
        (made("export", (Event(), good_size(bytes(32)))), export_and_join),
    ],
}
"""Law -> backends that break it alone, and the call of a good core that shows it."""


def cases(table: dict[str, list[Any]]) -> list[Any]:
    return [pytest.param(law, wrong, id=f"{law}-{at}") for law in table for at, wrong in enumerate(table[law])]


def test_every_law_has_a_test_that_breaks_it():
    assert CALLERS.keys() | BACKENDS.keys() == LAWS.keys()
    assert not CALLERS.keys() & BACKENDS.keys()
    assert all(CALLERS.values()) and all(BACKENDS.values())


@pytest.mark.parametrize(("law", "wrong"), cases(CALLERS))
def test_a_law_broken_by_the_core_is_named(law, wrong):
    with pytest.raises(ContractViolation) as caught:
        wrong(Core())
    assert caught.value.law == law, caught.value
    assert f"the core broke the law {law!r}" in str(caught.value) and LAWS[law] in str(caught.value)


@pytest.mark.parametrize(("law", "wrong"), cases(BACKENDS))
def test_a_law_broken_by_the_backend_is_named(law, wrong):
    backend, call = wrong
    with pytest.raises(ContractViolation) as caught:
        call(Core(backend()))
    assert caught.value.law == law, caught.value
    assert f"backend 'around' broke the law {law!r}" in str(caught.value)


@pytest.mark.parametrize(("law", "wrong"), cases(BACKENDS))
def test_the_same_calls_on_a_good_backend_break_nothing(law, wrong):
    _, call = wrong
    expected = {"usable": OutOfDeviceMemory, "device error": pytest.fail.Exception}.get(law)
    if law == "usable":
        call = lambda core: spec(num_blocks=1 << 40)(core)  # noqa: E731
    if expected is None:
        call(Core())
    else:
        with pytest.raises(expected):
            call(Core())


# -- what keeps the laws -----------------------------------------------------------------------------------------------


def test_a_checked_step_gives_the_bits_of_an_unchecked_one():
    core, alone = Core(), Around()
    pool = alone.alloc_pool(SPEC)
    alone.bind(pool, 2, {"sinks": np.zeros(4, np.float32)})
    alone.copy_blocks(pool, pool, i32([0, 1], [0, 2]))
    plan, own = core.plan(), alone.plan(pool, 0, batch())
    for layer in (0, 1, 2):
        q, k, v, out = core.tensors(8, seed=layer)
        alone.attend(own, layer, q, k, v, out)
        got = torch.full((8, 4, 16), float("nan"))
        core.checked.attend(plan, layer, q, k, v, got)
        assert torch.equal(got, out)


def test_append_only_and_attend_only_are_legal():
    core = Core()
    q, k, v, out = core.tensors()
    plan = core.plan()
    whole = core.attend(plan, q=q, k=k, v=v)
    core.attend(plan, q=None, out=None, k=k, v=v)
    core.attend(plan, k=None, v=None, q=q, out=out)
    assert torch.equal(core.attend(plan, q=q, k=k, v=v), whole) and not out.isnan().any()


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": np.full(6, -1), "block_table": np.zeros((3, 3), np.int32)},  # profiling, warm-up, an idle rank
        {"slots": None, "block_table": np.zeros((3, 3), np.int32)},
        {  # append only, no sequence
            "num_seqs": 0,
            "num_tokens": 0,
            "cu_q": i32(0),
            "ctx_len": i32(),
            "rows": i32(),
            "slots": np.array([7 * BLOCK, 30 * BLOCK + 15]),
            "num_decode": 0,
        },
        {"cu_q": i32(0, 1, 6, 6), "ctx_len": i32(20, 5, 0), "rows": i32(1, 2, 0)},
        {"rows": i32(1, 1), "ctx_len": i32(20, 19), "slots": None},  # two rows of one sequence
        {"group": 1, "block_table": i32([0, 0, 0], [1, 2, 0], [3, 0, 0])},
        {"slots": np.array([9 * BLOCK, *batch().slots])},  # more than query tokens: a sequence of no row here
        {"block_table": np.zeros((3, 7), np.int32)[:, :3], "slots": np.full(6, -1)},
    ],
)
def test_legal_batches(changes):
    core = Core()
    assert core.plan(**changes).ready().num_tokens == changes.get("num_tokens", 6)


def test_an_entry_wholly_behind_every_window_may_be_null():
    # Row A stands at position 39 and sees keys 32..39, all of them in its third block.
    arrays = {
        "num_seqs": 1,
        "num_tokens": 1,
        "cu_q": i32(0, 1),
        "ctx_len": i32(40),
        "rows": i32(1),
        "block_table": i32([0, 0, 0], [0, 0, 5]),
        "slots": np.array([5 * BLOCK + 7]),
        "max_q": 1,
        "max_ctx": 40,
    }
    core = Core()
    plan = core.plan(group=1, **arrays)
    q, k, v, out = core.tensors(1)
    core.attend(plan, 4, q=q, k=k, v=v, out=out)
    core.attend(plan, 5, q=q, k=None, v=None, out=out)
    with pytest.raises(ContractViolation, match="visible blocks"):
        core.plan(group=1, **arrays | {"ctx_len": i32(39)})  # key 31 is seen, too
    with pytest.raises(ContractViolation, match="visible blocks"):
        core.plan(group=0, **arrays)  # layer 0 has no window


def test_slices_of_one_tensor_are_legal_inputs():
    core = Core()
    joined = torch.randn(6, 8 * 16)
    q, k, v = (joined[:, a * 16 : b * 16].view(6, b - a, 16) for a, b in ((0, 4), (4, 6), (6, 8)))
    assert not core.attend(q=q, k=k, v=v).isnan().any()


def test_the_log_sum_exp_is_taken_where_it_is_declared():
    backend = shared_backend()
    if "lse" not in backend.capabilities().features:
        pytest.skip("the CPU backend does not declare lse")
    core = Core()
    core.checked = check(backend, name="cpu")
    core.pool = core.checked.alloc_pool(SPEC)
    lse = torch.full((8, 4), -7.0)  # no log-sum-exp of keys, whatever the unwritten slots hold, zeros included
    core.attend(
        core.plan(cu_q=i32(0, 0, 5), num_tokens=5, num_decode=0, slots=None), k=None, v=None, extra={"lse": lse}
    )
    assert (lse[:5] != -7).all() and (lse[5:] == -7).all()
    with pytest.raises(ContractViolation, match="attend forms"):
        core.attend(q=None, out=None, extra={"lse": lse})
    for wrong in (torch.zeros(8, 4, dtype=torch.float64), torch.zeros(2, 4), torch.zeros(4, 8).T):
        with pytest.raises(ContractViolation, match="attend tensors"):
            core.attend(extra={"lse": wrong})


def test_a_nan_of_the_caller_is_no_fault_of_the_backend():
    core = Core()
    q, k, v, _ = core.tensors(8)
    q[:] = float("nan")
    out = torch.zeros(8, 4, 16)
    core.attend(q=q, k=k, v=v, out=out)
    assert out[:6].isnan().all() and out[6:].isfinite().all()


def test_host_arrays_that_are_kept_are_reported_and_overwritten(caplog):
    caplog.set_level(logging.WARNING, logger="pagedkv.checking")
    core = Core(KeepingHostArrays())
    plan = core.plan()
    assert "still holds host arrays of a batch after plan()" in caplog.text
    assert (plan.inner[2].cu_q == 0x6B6B6B6B).all()
    caplog.clear()
    core.plan()
    assert caplog.text == ""  # once an instance


def test_arrays_of_the_caller_are_left_alone():
    core, mine = Core(), batch()
    core.checked.plan(core.pool, 0, mine)
    pairs = i32([4, 5])
    core.checked.copy_blocks(core.pool, core.pool, pairs)
    assert all(np.array_equal(getattr(mine, n), getattr(batch(), n)) for n in ("cu_q", "rows", "slots", "block_table"))
    assert pairs.tolist() == [[4, 5]] and needs(mine) == ()


def test_the_original_error_is_the_cause():
    core = Core(type("Broken", (Around,), {"plan": raising(KeyError("k"))})())
    with pytest.raises(ContractViolation, match="KeyError") as caught:
        core.plan()
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("error", [UnsupportedError("no"), OutOfDeviceMemory("no"), ContractViolation("x", law="own")])
def test_errors_of_the_contract_come_through_and_leave_it_usable(error):
    core = Core(type("Broken", (Around,), {"record": raising(error)})())
    with pytest.raises(type(error)) as caught:
        core.checked.record()
    assert caught.value is error
    core.attend()


def test_a_device_error_stays_and_close_works():
    core = Core(
        type("Lost", (Around,), {"record": raising(DeviceError("gone")), "plan": raising(DeviceError("gone"))})()
    )
    for call in (core.checked.record, core.plan):
        with pytest.raises(DeviceError):
            call()
    assert core.checked.capabilities() == CAPABILITIES  # pure
    core.checked.close()
    assert core.inner.closes == 2


def test_what_a_captured_function_raises_is_its_own():
    class Swallowing(Around):
        def capture(self, fn: Any, plans: Any) -> Any:
            try:
                fn()
            except Exception as error:
                raise RuntimeError("capture failed") from error

    for backend in (Around(), Swallowing()):
        core = Core(backend)
        with pytest.raises(ZeroDivisionError):
            core.capture(core.refreshed(), lambda: 1 // 0)
        core.plan()  # the capture is over


def test_a_graph_is_captured_refreshed_and_replayed():
    core = Core()
    plan = core.refreshed()
    q, k, v, out = core.tensors(SHAPE.tokens)
    graph = core.graphs().capture(lambda: core.checked.attend(plan, 0, q, k, v, out), [plan])
    graph.replay()
    eager = torch.empty(SHAPE.tokens, 4, 16)
    core.checked.attend(core.refreshed(), 0, q, k, v, eager)
    assert torch.equal(out, eager) and graph.nbytes == 0
    graph.close()
    core.capture(plan).close()  # max_graphs counts open ones


def test_canonical_bytes_and_collectives_come_through():
    core = Core()
    kv = core.checked.extension("canonical_kv")
    event, data = kv.export(core.pool, 0, i32(1, 2), i32(16, 4))
    event.join()
    assert data[:32].tobytes() == canonical_fingerprint(SPEC.groups[0])
    kv.export(core.pool, 0, i32(0, 1, 1), i32(0, 16, 2))[0].join()  # block 0, a block twice, no token: all legal
    core.checked.wait(kv.import_(core.pool, 0, i32(4, 5), i32(16, 4), data))
    ranks = core.checked.communicator([0, 1])
    ranks.barrier()
    assert ranks.all_gather(torch.ones(2, 3), 0).shape == (4, 3)
    assert ranks.all_reduce(torch.ones(2)).tolist() == ranks.broadcast(torch.ones(2)).tolist() == [1, 1]
    assert core.checked.extension("unheard_of") is None


def test_ops_come_through_with_the_plans_of_the_backend():
    class WithOp(Around):
        def op(self, name: str, spec: OpSpec) -> Any:
            op = lambda plan, scale=1: (plan, scale)  # noqa: E731
            op.pack = lambda tensor: tensor  # type: ignore[attr-defined]
            return op if name == "echo" else None

    core = Core(WithOp())
    plan, op = core.plan(), core.checked.op("echo", OpSpec(dtype="fp32"))
    assert op is not None and op(plan, scale=2) == (plan.inner, 2) and op.pack(3) == 3
    assert core.checked.op("other", OpSpec(dtype="fp32")) is None


def test_the_check_against_describe_is_made_at_once():
    with pytest.raises(ContractViolation, match=r"beyond what describe\(\) offered: features sinks") as caught:
        check(Around(), dataclasses.replace(CAPABILITIES, features=CAPABILITIES.features - {"sinks"}), name="x")
    assert caught.value.law == "capabilities"
