"""What breaks a law of the contract is refused by type, changes nothing, and leaves the instance usable."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pagedkv.api import ContractViolation, GroupSpec, Limits, OpSpec, OutOfDeviceMemory, PoolSpec, UnsupportedError
from pagedkv.api.errors import PagedKVError
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.lattice import BLOCK_SIZES, sizes
from pagedkv.conformance.refusals import refuses
from pagedkv.conformance.rig import Rig, Row, Seq

pytestmark = [pytest.mark.level("core"), pytest.mark.unchecked]

SMALL = Limits(rows=2, tokens=8, context=16)


def _written(rig: Rig, length: int) -> Seq:
    """A sequence whose tokens have reached the cache: a wrong write later would not be written over."""
    seq = rig.sequence(length)
    rig.write(seq, 0, length)
    rig.backend.synchronize()
    return seq


def _unchanged(kit: Kit, rig: Rig, *seqs: Seq) -> None:
    """What was written is still there."""
    rows = [(seq, seq.length, 1) for seq in seqs]
    kit.check(rig, rig.step(*rows, write=False), rig.expected(*rows))


# -- plan --------------------------------------------------------------------------------------------------------------


def _over(rig: Rig, what: str) -> list[Row]:
    if what == "rows":
        return [(rig.sequence(1), 1, 1) for _ in range(SMALL.rows + 1)]
    if what == "tokens":
        return [(rig.sequence(SMALL.tokens + 1), SMALL.tokens + 1, SMALL.tokens + 1)]
    return [(rig.sequence(SMALL.context + 1), SMALL.context + 1, 1)]


@pytest.mark.law("errors: a batch beyond the pool's limits is a ContractViolation")
@pytest.mark.parametrize("what", ["rows", "tokens", "context"])
def test_beyond_limits(kit: Kit, what: str) -> None:
    rig = kit.rig(limits=SMALL)
    seq = _written(rig, 3)
    batch = rig.batch(_over(rig, what))
    with refuses(ContractViolation, f"a batch with more {what} than the pool's limits"):
        rig.backend.plan(rig.pool, 0, batch)
    _unchanged(kit, rig, seq)


@pytest.mark.law("errors: a group that the pool does not have is a ContractViolation")
@pytest.mark.parametrize("group", [1, -1])
def test_unknown_group(kit: Kit, group: int) -> None:
    rig = kit.rig()
    with refuses(ContractViolation, f"a plan for group {group} of a pool with one group"):
        rig.backend.plan(rig.pool, group, rig.batch([(rig.sequence(1), 1, 1)]))


# -- attend ------------------------------------------------------------------------------------------------------------


@pytest.mark.law("errors: k without v, v without k, q without out and out without q are ContractViolations")
@pytest.mark.parametrize("missing", ["q", "k", "v", "out"])
def test_half_a_form(kit: Kit, missing: str) -> None:
    rig = kit.rig()
    seq, old = rig.sequence(rig.block_size + 1), _written(rig, 3)
    rig.write(seq, 0, rig.block_size)
    layer, row = rig.layer(), (seq, seq.length, 1)
    plan = rig.plan(row)
    q, k, v = rig.qkv([row], layer)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "out": rig.empty_out(1, layer)} | {missing: None}
    with refuses(ContractViolation, f"attend without {missing} alone"):
        rig.backend.attend(plan, layer.index, given["q"], given["k"], given["v"], given["out"])
    _unchanged(kit, rig, old)
    kit.check(rig, rig.step(row), rig.expected(row))


@pytest.mark.law("errors: a layer that the pool, or the plan's group, does not have is a ContractViolation")
@pytest.mark.parametrize("index", [1, 7])
def test_wrong_layer(kit: Kit, index: int) -> None:
    groups = [GroupSpec(layers=(kit.layer(i),), block_size=kit.block_size, kv_dtype=kit.kv_dtype) for i in (0, 1)]
    rig = kit.rig(groups=groups)
    seq = _written(rig, 3)
    row = (seq, 3, 1)
    plan = rig.plan(row)
    q, k, v = rig.qkv([row], rig.layer(0))
    with refuses(ContractViolation, f"layer {index} with a plan of group 0, which has layer 0"):
        rig.backend.attend(plan, index, q, k, v, rig.empty_out(1, rig.layer(0)))
    _unchanged(kit, rig, seq)


# -- copies ------------------------------------------------------------------------------------------------------------

_PAIRS: dict[str, Callable[[int, int, int, int], list[tuple[int, int]]]] = {
    "a destination 0": lambda a, b, c, n: [(a, b), (c, 0)],
    "one destination twice": lambda a, b, c, n: [(a, b), (c, b)],
    "an id on both sides": lambda a, b, c, n: [(a, b), (b, c)],
    "a source on itself": lambda a, b, c, n: [(a, a)],
    "a source out of range": lambda a, b, c, n: [(a, b), (n, c)],
    "a destination out of range": lambda a, b, c, n: [(a, b), (c, n)],
    "a negative id": lambda a, b, c, n: [(a, b), (-1, c)],
}


@pytest.mark.law("errors: pairs that copy_blocks may not get are a ContractViolation, and no pair of them is copied")
@pytest.mark.parametrize("what", list(_PAIRS))
def test_wrong_pairs(kit: Kit, what: str) -> None:
    rig = kit.rig()
    seqs = [_written(rig, rig.block_size) for _ in range(3)]
    a, b, c = (seq.blocks[0] for seq in seqs)
    pairs = np.array(_PAIRS[what](a, b, c, rig.spec.num_blocks), np.int32)
    with refuses(ContractViolation, f"copy_blocks with {what}"):
        rig.backend.copy_blocks(rig.pool, rig.pool, pairs)
    rig.backend.synchronize()
    _unchanged(kit, rig, *seqs)


@pytest.mark.law("errors: a copy between pools with other groups is a ContractViolation")
def test_unequal_groups(kit: Kit) -> None:
    one, other = kit.rig(), kit.rig(kit.layer(0, kv_heads=1))
    with refuses(ContractViolation, "copy_blocks between pools whose groups differ"):
        one.backend.copy_blocks(one.pool, other.pool, np.array([[1, 2]], np.int32))


# -- whose, and until when ---------------------------------------------------------------------------------------------


def _uses(rig: Rig) -> dict[str, Callable[[Any], Any]]:
    """Every call that takes a pool, by name; each is legal as long as the pool is open and this instance's."""
    batch, pairs = rig.batch([(rig.sequence(1), 1, 1)]), np.array([[1, 2]], np.int32)
    backend = rig.backend
    uses: dict[str, Callable[[Any], Any]] = {
        "plan": lambda pool: backend.plan(pool, 0, batch),
        "copy_blocks from it": lambda pool: backend.copy_blocks(pool, rig.pool, pairs),
        "copy_blocks to it": lambda pool: backend.copy_blocks(rig.pool, pool, pairs),
    }
    if rig.layer().sinks:
        sinks = np.zeros(rig.layer().q_heads, np.float32)
        uses["bind"] = lambda pool: backend.bind(pool, rig.layer().index, {"sinks": sinks})
    return uses


def _layer_to_bind(kit: Kit) -> Any:
    return kit.layer(sinks=kit.has("sinks"))


@pytest.mark.law("errors: a pool of another instance is a ContractViolation")
def test_foreign_pool(kit: Kit) -> None:
    rig = kit.rig(_layer_to_bind(kit))
    foreign = kit.rig(_layer_to_bind(kit), backend=kit.create())
    for name, use in _uses(rig).items():
        with refuses(ContractViolation, f"{name} with a pool of another instance"):
            use(foreign.pool)


@pytest.mark.law("errors: a pool after its close is a ContractViolation, and so is a plan of it")
def test_pool_after_close(kit: Kit) -> None:
    rig, closed = kit.rig(_layer_to_bind(kit)), kit.rig(_layer_to_bind(kit))
    row = (_written(closed, 2), 2, 1)
    plan = closed.plan(row, write=False)
    q, _, _ = closed.qkv([row], closed.layer())
    closed.pool.close()
    closed.pool.close()  # idempotent
    for name, use in _uses(rig).items():
        with refuses(ContractViolation, f"{name} with a pool that was closed"):
            use(closed.pool)
    with refuses(ContractViolation, "attend with a plan of a pool that was closed"):
        rig.backend.attend(plan, 0, q, None, None, closed.empty_out(1, closed.layer()))
    _unchanged(kit, rig, _written(rig, 3))


@pytest.mark.law("errors: any work of an instance after its close is a ContractViolation; close is idempotent")
def test_backend_after_close(kit: Kit) -> None:
    backend = kit.create()
    rig = kit.rig(_layer_to_bind(kit), backend=backend)
    row = (_written(rig, 2), 2, 1)
    plan = rig.plan(row, write=False)
    q, _, _ = rig.qkv([row], rig.layer())
    out, uses = rig.empty_out(1, rig.layer()), _uses(rig)
    backend.close()  # with an open pool, a plan alive and work enqueued
    backend.close()
    rig.pool.close()
    uses["alloc_pool"] = lambda pool: backend.alloc_pool(rig.spec)
    uses["attend"] = lambda pool: backend.attend(plan, 0, q, None, None, out)
    for name, use in uses.items():
        with refuses(ContractViolation, f"{name} of an instance that was closed"):
            use(rig.pool)


@pytest.mark.law("errors: after close the members with defaults do nothing or raise a ContractViolation")
def test_rest_after_close(kit: Kit) -> None:
    backend = kit.create()
    backend.close()
    calls: dict[str, Callable[[], Any]] = {
        "capabilities": backend.capabilities,
        "memory": backend.memory,
        "record": backend.record,
        "synchronize": backend.synchronize,
        "extension": lambda: backend.extension("no_such_extension"),
        "op": lambda: backend.op("no_such_op", OpSpec(dtype=kit.dtype)),
    }
    for name, call in calls.items():
        try:
            call()
        except ContractViolation:
            continue
        except Exception as error:  # noqa: BLE001 - reported by name
            pytest.fail(f"{name} after close raised {type(error).__name__}: {error}", pytrace=False)


# -- afterwards --------------------------------------------------------------------------------------------------------


def _too_large(kit: Kit) -> PoolSpec:
    """More than any machine addresses: at least 2^50 bytes."""
    size = max(sizes(kit.can.block_sizes, BLOCK_SIZES))
    layers = tuple(kit.layer(i, kv_heads=32) for i in range(64))
    return kit.spec(*layers, block_size=size, num_blocks=2**31 - 1)


@pytest.mark.law(
    "errors: a pool larger than memory is OutOfDeviceMemory with the bytes requested; the instance works on"
)
def test_out_of_memory(kit: Kit) -> None:
    rig = kit.rig()
    seq = _written(rig, 3)
    with refuses(OutOfDeviceMemory, "a pool of more than 2^50 bytes"):
        try:
            rig.backend.alloc_pool(_too_large(kit)).close()
        except OutOfDeviceMemory as error:
            assert error.requested and error.requested > 2**50, (
                f"requested={error.requested!r}, must be the pool's bytes"
            )
            raise
    _unchanged(kit, rig, seq)


@pytest.mark.law("errors: after UnsupportedError the instance works on")
def test_usable_after_refusal(kit: Kit) -> None:
    rig = kit.rig()
    seq = _written(rig, 3)
    with refuses(UnsupportedError, "a pool of an unknown dtype"):
        rig.backend.alloc_pool(kit.spec(dtype="no_such_dtype")).close()
    with refuses(UnsupportedError, "a value to bind that no layer takes"):
        rig.backend.bind(rig.pool, 0, {"no_such_value": np.zeros(1, np.float32)})
    _unchanged(kit, rig, seq)
    _unchanged(kit, rig, _written(rig, 2 * rig.block_size))


@pytest.mark.law("errors: a call that raises changes no slot")
def test_failed_calls_change_nothing(kit: Kit) -> None:
    rig = kit.rig(kit.layer(0), kit.layer(1))
    seqs = [_written(rig, rig.block_size) for _ in range(3)]
    a, b, c = (seq.blocks[0] for seq in seqs)
    rows = [(seq, seq.length, 1) for seq in seqs]
    q, k, v = rig.qkv(rows, rig.layer(0))
    plan = rig.plan(*rows)  # its slots are the last ones of all three
    other = k + 1
    out = rig.empty_out(3, rig.layer(0))
    calls: list[Callable[[], Any]] = [
        lambda: rig.backend.attend(plan, 9, q, other, v, out),
        lambda: rig.backend.attend(plan, 0, q, other, None, out),
        lambda: rig.backend.attend(plan, 0, q, other, v, None),
        lambda: rig.backend.attend(plan, 0, q, other, v, out, extra={"no_such_extra": 1}),
        lambda: rig.backend.copy_blocks(rig.pool, rig.pool, np.array([[a, b], [a, b]], np.int32)),
        lambda: rig.backend.copy_blocks(rig.pool, rig.pool, np.array([[0, c], [a, 0]], np.int32)),
    ]
    for call in calls:
        with contextlib.suppress(PagedKVError):  # that each of them raises is what other cases ask for
            call()
    rig.backend.synchronize()
    for layer in (0, 1):
        kit.check(
            rig,
            rig.step(*rows, layer=layer, write=False),
            rig.expected(*rows, layer=layer),
            mistake="a call that raised had already written: check every argument before the first write",
        )


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.law("errors: any thread may call, one at a time")
def test_several_threads(kit: Kit) -> None:
    rig, lock = kit.rig(), threading.Lock()
    seqs = [rig.sequence(rig.block_size + 2) for _ in range(6)]

    def work(seq: Seq) -> Any:
        with lock:
            rig.write(seq, 0, seq.length - 1)
        with lock:
            return rig.step((seq, seq.length, 1))

    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(work, seqs))
    kit.check(rig, np.concatenate(got), rig.expected(*((seq, seq.length, 1) for seq in seqs)))


@pytest.mark.law("errors: Event.done() may be called from any thread, at any time, and becomes true")
def test_event_of_another_thread(kit: Kit) -> None:
    rig = kit.rig()
    seq = _written(rig, rig.block_size)
    events = [rig.backend.record(), rig.copy([(seq.blocks[0], rig.free.pop())])]
    with ThreadPoolExecutor(1) as thread:
        first = [thread.submit(event.done) for event in events]
        rig.step((seq, seq.length, 1), write=False)
        answers = [future.result(60) for future in first]
        assert all(type(answer) is bool for answer in answers), f"done() gives {answers}, must be True or False"
        for event in events:
            assert thread.submit(_becomes_done, event).result(90), (
                "done() is never true, though nobody holds the work up"
            )
            event.join()
            assert thread.submit(event.done).result(60), "done() is false after join()"


def _becomes_done(event: Any) -> bool:
    until = time.monotonic() + 30
    while not event.done() and time.monotonic() < until:
        time.sleep(0.001)
    return bool(event.done())
