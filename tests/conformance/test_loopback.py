"""The loopback backend: exact by an oracle in float64, as late as the contract allows, and honest about its memory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import LLM
from pagedkv.api import (
    Batch,
    ContractViolation,
    DeviceInfo,
    Event,
    GroupSpec,
    Limits,
    OpSpec,
    OutOfDeviceMemory,
    PoolSpec,
    UnsupportedError,
    World,
)
from pagedkv.api.extensions import GraphShape
from pagedkv.conformance.loopback.backend import LoopbackBackend
from pagedkv.conformance.loopback.descriptor import ORDERS, LoopbackDescriptor
from pagedkv.conformance.loopback.queues import POLLS
from pagedkv.errors import BackendUnavailable, ConfigError, DeviceError, EngineDead
from tests.backends.cpu.rig import TORCH, Rig, Seq, layer_spec, oracle, pool_spec
from tests.helpers.engine_rig import SETTINGS, engine, folder, greedy, seeded, solo, some_prompts, token_ids

NAN = float("nan")


def loopback(**options: Any) -> LoopbackBackend:
    made = LoopbackDescriptor().create(0, options, World())
    assert isinstance(made, LoopbackBackend)
    return made


def rig(spec: PoolSpec | None = None, *, made: LoopbackBackend | None = None, group: int = 0, **options: Any) -> Rig:
    """One pool of an instance of its own, or of `made`."""
    return Rig(spec or pool_spec(), made=made or loopback(**options), group=group)  # type: ignore[arg-type]


def worst(out: torch.Tensor, want: np.ndarray) -> float:
    return float(np.abs(out.double().numpy() - want).max())


def read(r: Rig, seq: Seq, count: int = 1) -> torch.Tensor:
    """Attention of the last `count` queries over what is in the cache, nothing written."""
    rows = [(seq, len(seq.keys), count)]
    plan = r.backend.plan(r.pool, r.group_index, r.batch(rows, write=False))
    out = torch.empty(count, r.layer.q_heads, r.layer.v_dim).to(TORCH[r.spec.dtype])
    r.backend.attend(plan, r.layer.index, r.tensors(rows)[0], None, None, out)
    return out


def moved(seq: Seq, blocks: list[int]) -> Seq:
    return Seq(seq.keys, seq.values, seq.queries, blocks)


def pairs(*given: tuple[int, int]) -> np.ndarray:
    return np.array(given, np.int32)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-6), ("bf16", 1.6e-2), ("fp16", 2e-3)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_heads": 7, "kv_heads": 3, "k_dim": 5, "v_dim": 9, "window": 6, "softcap": 2.0},
        {"sinks": True, "alibi": True},
        {"causal": False, "q_heads": 3, "kv_heads": 1},
    ],
)
def test_attention_agrees_with_the_oracle(dtype: str, kv_dtype: str, tolerance: float, changes: Any) -> None:
    r = rig(pool_spec(layer_spec(**changes), dtype=dtype, kv_dtype=kv_dtype, block_size=4))
    params = {name: np.linspace(-0.4, 1.1, r.layer.q_heads).astype(np.float32) for name in ("sinks", "alibi")}
    params = {name: values for name, values in params.items() if getattr(r.layer, name)}
    r.backend.bind(r.pool, 0, params)
    rows = [(r.sequence(13), 13, 13), (r.sequence(9), 9, 1), (r.sequence(21), 21, 5)]
    r.write(rows[1][0], 0, 8)
    r.write(rows[2][0], 0, 16)
    want = np.concatenate([r.expected(*row, params) for row in rows])
    assert worst(r.step(*rows), want) < tolerance


def test_rows_of_nothing_visible_are_zeros_and_padding_is_finite() -> None:
    r = rig()
    batch = r.batch([(r.sequence(3), 0, 2)], write=False)
    out = torch.full((5, 4, 16), NAN)
    lse = torch.full((5, 4), NAN)
    q = torch.cat([torch.ones(2, 4, 16), torch.full((3, 4, 16), NAN)])
    r.backend.attend(r.backend.plan(r.pool, 0, batch), 0, q, None, None, out, extra={"lse": lse})
    assert torch.equal(out, torch.zeros(5, 4, 16))
    assert bool((lse[:2] == -math.inf).all())


def test_chunks_company_and_other_blocks_change_no_bit() -> None:
    r = rig()
    seq = r.sequence(40)
    whole = r.step((seq, 40, 40))
    again = moved(seq, [r.free.pop() for _ in seq.blocks])
    chunks = [r.step((again, 17, 17), (r.sequence(30), 30, 30))[:17], r.step((again, 18, 1)), r.step((again, 40, 22))]
    assert torch.equal(torch.cat(chunks), whole)


def test_keys_are_read_as_stored() -> None:
    r = rig(pool_spec(kv_dtype="bf16"))
    seq = r.sequence(20)
    out = r.step((seq, 20, 20))
    raw = oracle(r.layer, *(t.double().numpy() for t in (seq.queries, seq.keys, seq.values)), {})
    assert worst(out, r.expected(seq, 20, 20)) < 1e-6 < worst(out, raw)


def test_lse_is_the_log_of_the_denominator() -> None:
    r = rig(pool_spec(layer_spec(sinks=True, window=5)))
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    r.backend.bind(r.pool, 0, {"sinks": sinks})
    rows = [(r.sequence(12), 12, 12)]
    q, k, v = r.tensors(rows)
    out, lse = torch.empty(12, 4, 16), torch.full((12, 4), NAN)
    r.backend.attend(r.backend.plan(r.pool, 0, r.batch(rows)), 0, q, k, v, out, extra={"lse": lse})
    for token in range(12):
        for head in range(4):
            scores = k[max(0, token - 4) : token + 1, head // 2].double() @ q[token, head].double() / 4
            want = math.log(sum(math.exp(s) for s in scores) + math.exp(float(sinks[head])))
            assert float(lse[token, head]) == pytest.approx(want, abs=1e-6)


def test_ids_move_between_groups_and_pools_of_one_instance() -> None:
    groups = (
        GroupSpec(layers=(layer_spec(0), layer_spec(1)), block_size=16, kv_dtype="fp32"),
        GroupSpec(layers=(layer_spec(2, k_dim=32, v_dim=5),), block_size=8, kv_dtype="bf16"),
    )
    first = rig(pool_spec(groups=groups))
    second = Rig(first.spec, made=first.backend, group=1)
    second.pool = first.pool
    seq = first.sequence(32)
    first.write(seq, 0, 32)
    taken = moved(second.sequence(16), seq.blocks)
    assert worst(second.step((taken, 16, 16)), second.expected(taken, 16, 16)) < 1e-6
    assert second.backend.pool_cost(first.spec).per_block == 2 * 2 * 2 * 16 * 16 * 4  # the larger group's


# -- hazards -----------------------------------------------------------------------------------------------------------


def written(r: Rig, length: int = 16) -> Seq:
    seq = r.sequence(length)
    r.write(seq, 0, length)
    return seq


def test_what_nobody_wrote_is_nan_but_the_null_block_is_zero() -> None:
    r = rig()
    assert bool(read(r, r.sequence(16)).isnan().all())
    assert torch.equal(read(r, moved(r.sequence(16), [0])), torch.zeros(1, 4, 16))


@pytest.mark.parametrize("order", ORDERS)
def test_a_copy_that_is_waited_for_is_there(order: str) -> None:
    r = rig(order=order)
    seq = written(r)
    copy = moved(seq, [r.free.pop()])
    r.backend.wait(r.backend.copy_blocks(r.pool, r.pool, pairs((seq.blocks[0], copy.blocks[0]))))
    assert torch.equal(read(r, copy), read(r, seq))


def test_a_missing_wait_reads_poison() -> None:
    r = rig()
    seq = written(r)
    copy = moved(seq, [r.free.pop()])
    event = r.backend.copy_blocks(r.pool, r.pool, pairs((seq.blocks[0], copy.blocks[0])))
    assert bool(read(r, copy).isnan().all())
    event.join()
    assert torch.equal(read(r, copy), read(r, seq))


def test_a_source_overwritten_without_a_wait_is_what_arrives() -> None:
    r = rig()
    old, new = written(r), r.sequence(16)
    new.blocks = old.blocks
    target = r.free.pop()
    event = r.backend.copy_blocks(r.pool, r.pool, pairs((old.blocks[0], target)))
    r.step((new, 16, 16))
    event.join()
    assert worst(read(r, moved(new, [target])), r.expected(new, 16, 1)) < 1e-6


def test_an_early_copy_sees_what_after_covers_and_nothing_later() -> None:
    r = rig(order="early")
    old, new = written(r), r.sequence(16)
    new.blocks = old.blocks
    after = r.backend.record()
    r.write(new, 0, 16)
    target = r.free.pop()
    r.backend.wait(r.backend.copy_blocks(r.pool, r.pool, pairs((old.blocks[0], target)), after=after))
    assert worst(read(r, moved(old, [target])), r.expected(old, 16, 1)) < 1e-6
    assert worst(read(r, new), r.expected(new, 16, 1)) < 1e-6


@pytest.mark.parametrize("order", ORDERS)
def test_a_copy_comes_after_all_compute_before_it(order: str) -> None:
    r = rig(order=order)
    seq = written(r)  # its append has not run
    target = r.free.pop()
    r.backend.copy_blocks(r.pool, r.pool, pairs((seq.blocks[0], target))).join()
    assert worst(read(r, moved(seq, [target])), r.expected(seq, 16, 1)) < 1e-6


def test_copies_have_no_order_but_the_one_asked_for() -> None:
    r = rig()
    seq = written(r)
    (a,), b, c = seq.blocks, r.free.pop(), r.free.pop()
    first = r.backend.copy_blocks(r.pool, r.pool, pairs((a, b)))
    r.backend.copy_blocks(r.pool, r.pool, pairs((b, c))).join()
    assert bool(read(r, moved(seq, [c])).isnan().all()), "the second copy need not come after the first"
    r.backend.copy_blocks(r.pool, r.pool, pairs((b, c)), after=first).join()
    assert torch.equal(read(r, moved(seq, [c])), read(r, seq))


@pytest.mark.parametrize("seed", range(6))
def test_in_random_order_a_chain_of_waits_holds(seed: int) -> None:
    r = rig(order="random", seed=seed)
    seq = written(r)
    want = read(r, seq)
    for _ in range(8):
        target = r.free.pop()
        event = r.backend.copy_blocks(r.pool, r.pool, pairs((seq.blocks[0], target)))
        r.backend.wait(event)
        r.write(moved(r.sequence(16), seq.blocks), 0, 16)  # after the wait it may be overwritten
        seq = moved(seq, [target])
        r.free.append(r.free.pop(0))
    assert torch.equal(read(r, seq), want)


def test_done_says_no_until_the_last_poll_and_never_waits_for_more() -> None:
    r = rig()
    seq = written(r)
    event = r.backend.copy_blocks(r.pool, r.pool, pairs((seq.blocks[0], r.free.pop())))
    assert [event.done() for _ in range(POLLS + 1)] == [False] * (POLLS - 1) + [True, True]
    other = r.backend.copy_blocks(r.pool, r.pool, pairs((seq.blocks[0], r.free.pop())))
    r.backend.synchronize()
    assert other.done()


def test_an_event_of_another_kind_is_joined_in_its_turn() -> None:
    joined = []

    class Foreign(Event):
        def join(self, timeout: float | None = None) -> None:
            joined.append(timeout)

    r = rig()
    r.backend.wait(Foreign())
    assert joined == []
    r.backend.synchronize()
    assert joined == [None]


@pytest.mark.parametrize("order", ORDERS)
def test_host_arrays_may_be_overwritten_at_once(order: str) -> None:
    r = rig(order=order)
    rows = [(written(r, 40), 40, 1), (r.sequence(20), 20, 20)]
    batch = r.batch(rows)
    plan = r.backend.plan(r.pool, 0, batch)
    for array in (batch.cu_q, batch.ctx_len, batch.block_table, batch.rows, batch.slots):
        array[:] = 7
    q, k, v = r.tensors(rows)
    keys, out = k.clone(), torch.empty(21, 4, 16)
    r.backend.attend(plan, 0, None, keys, v, None)
    keys.fill_(NAN)  # the call has taken its copy
    r.backend.attend(plan, 0, q, None, None, out)
    assert worst(out, np.concatenate([r.expected(*row) for row in rows])) < 1e-6
    held = pairs((rows[0][0].blocks[0], r.free.pop()))
    target = int(held[0, 1])
    event = r.backend.copy_blocks(r.pool, r.pool, held)
    held[:] = 3
    event.join()
    seq = moved(rows[0][0], [target, *rows[0][0].blocks[1:]])
    assert torch.equal(read(r, seq), read(r, rows[0][0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_to_host_is_poison_until_its_event(dtype: torch.dtype) -> None:
    made = loopback()
    tensor = torch.arange(6).view(2, 3).to(dtype)
    event, array = made.to_host(tensor)
    assert array.shape == (2, 3) and not np.any(array == tensor.to(torch.float64).numpy())
    assert array.dtype.kind == "i" or np.isnan(array).all()
    event.join()
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    empty, nothing = made.to_host(tensor[:0])
    empty.join()
    assert nothing.shape == (0, 3)


def test_more_plans_than_the_limits_let_live_end_the_oldest() -> None:
    r = rig()
    rows = [(r.sequence(8), 8, 8)]
    q, k, v = r.tensors(rows)
    plans = [r.backend.plan(r.pool, 0, r.batch(rows)) for _ in range(3)]
    r.backend.attend(plans[1], 0, q, k, v, torch.empty(8, 4, 16))
    with pytest.raises(ContractViolation, match="this plan is over") as caught:
        r.backend.attend(plans[0], 0, q, k, v, torch.empty(8, 4, 16))
    assert caught.value.law == "limits.plans"


def test_without_nan_safe_hidden_slots_count_as_a_masked_kernels_do() -> None:
    r = rig(without="nan_safe")
    seq = r.sequence(20)  # twelve slots of its second block are never written
    assert bool(r.step((seq, 20, 20)).isnan().all())
    clear = pairs(*[(0, block) for block in seq.blocks])
    r.backend.wait(r.backend.copy_blocks(r.pool, r.pool, clear))
    assert worst(r.step((seq, 20, 20)), r.expected(seq, 20, 20)) < 1e-6
    assert "nan_safe" not in r.backend.capabilities().features


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_pool_takes_what_it_costs_and_gives_it_back() -> None:
    made = loopback(memory=1 << 20)
    spec = pool_spec(layer_spec(0, sinks=True), layer_spec(1, kv_of=0), num_blocks=9)
    cost = made.pool_cost(spec)
    # 16 tokens of keys and values, 2 heads of 16, 4 bytes; sinks; two plans within limits 16, 512, 1024.
    assert (cost.per_block, cost.fixed) == (16 * 2 * 2 * 16 * 4, 16 + 2 * (4 * 17 + 4 * 16 + 4 * 16 * 64 + 8 * 512))
    pool, taken = made.alloc_pool(spec), cost.fixed + 9 * cost.per_block
    host = made.alloc_pool(dataclasses.replace(spec, placement="host"))
    memory = made.memory()
    assert (memory.total, memory.free, memory.unified) == (1 << 20, (1 << 20) - taken, False)
    too_many = dataclasses.replace(spec, num_blocks=1000)
    with pytest.raises(OutOfDeviceMemory, match="option memory") as caught:
        made.alloc_pool(too_many)
    assert caught.value.requested == cost.fixed + 1000 * cost.per_block
    assert caught.value.free == (1 << 20) - taken
    pool.close()
    pool.close()
    host.close()
    assert made.memory().free == 1 << 20


def test_a_host_pool_beyond_the_host_is_refused() -> None:
    with pytest.raises(OutOfDeviceMemory, match="the host refused"):
        loopback().alloc_pool(pool_spec(placement="host", num_blocks=1 << 50))


def test_blocks_go_out_to_the_host_and_come_back() -> None:
    r = rig()
    host = r.backend.alloc_pool(pool_spec(placement="host", num_blocks=9))
    seq = r.sequence(30)
    want = r.step((seq, 30, 30))
    out = r.backend.copy_blocks(r.pool, host, pairs((seq.blocks[0], 5), (seq.blocks[1], 6)))
    back = [r.free.pop(), r.free.pop()]
    event = r.backend.copy_blocks(host, r.pool, pairs((5, back[0]), (6, back[1])), after=out)
    r.backend.wait(event)
    assert torch.equal(read(r, moved(seq, back), 30), want)
    with pytest.raises(ContractViolation, match="placement"):
        r.backend.plan(host, 0, r.batch([]))


# -- failure -----------------------------------------------------------------------------------------------------------


def test_after_the_device_failed_every_call_says_so() -> None:
    r = rig(fail_at=2)
    seq = r.sequence(16)
    r.step((seq, 16, 16))
    pending = r.backend.copy_blocks(r.pool, r.pool, pairs((seq.blocks[0], r.free.pop())))
    with pytest.raises(DeviceError, match="attend 2"):
        r.step((seq, 16, 1))
    for call in (
        lambda: r.step((seq, 16, 1)),
        lambda: r.backend.alloc_pool(r.spec),
        lambda: r.backend.copy_blocks(r.pool, r.pool, pairs((1, 2))),
        lambda: r.backend.to_host(seq.keys),
        lambda: r.backend.extension("graph"),
        r.backend.record,
        r.backend.memory,
        r.backend.synchronize,
        pending.join,
        pending.done,
    ):
        with pytest.raises(DeviceError, match="attend 2"):
            call()
    r.pool.close()
    r.backend.close()
    r.backend.close()


def test_anything_used_after_its_close_is_named() -> None:
    r = rig()
    seq = r.sequence(8)
    plan = r.backend.plan(r.pool, 0, r.batch([(seq, 8, 8)]))
    r.write(seq, 0, 8)
    r.pool.close()
    kept = r.backend.alloc_pool(r.spec)
    for call in (
        lambda: r.backend.attend(plan, 0, *r.tensors([(seq, 8, 8)]), torch.empty(8, 4, 16)),
        lambda: r.backend.plan(r.pool, 0, r.batch([])),
        lambda: r.backend.copy_blocks(kept, r.pool, pairs((1, 2))),
    ):
        with pytest.raises(ContractViolation) as caught:
            call()
        assert caught.value.law == "use after close"
    r.backend.close()
    for call in (r.backend.record, lambda: r.backend.plan(kept, 0, r.batch([]))):
        with pytest.raises(ContractViolation, match="closed"):
            call()


def test_u85_every_reason_is_given_at_once() -> None:
    layer = layer_spec(0, k_dim=600, kind="mla", window=0, kv_of=5, softcap=-1.0, q_heads=1)
    spec = pool_spec(layer, layer_spec(0), block_size=0, kv_dtype="int4/moon", dtype="fp64", placement="moon")
    with pytest.raises(UnsupportedError) as caught:
        loopback().alloc_pool(dataclasses.replace(spec, features=frozenset({"mind_reading"})))
    text = "\n".join(caught.value.reasons)
    words = ("block size 0", "k_dim 600", "'mla'", "window 0", "kv_of 5", "int4/moon", "'fp64'", "'moon'")
    assert [word for word in (*words, "softcap -1.0", "cannot share", "mind_reading", "stands 2 times") if word in text]
    assert len(caught.value.reasons) == 12


@pytest.mark.parametrize(
    ("without", "changes"),
    [("window", {"window": 4}), ("softcap", {"softcap": 1.0}), ("sinks", {"sinks": True}), ("alibi", {"alibi": True})],
)
def test_an_undeclared_feature_is_refused(without: str, changes: Any) -> None:
    made = loopback(without=without)
    assert made.capabilities().features == loopback().capabilities().features - {without}
    with pytest.raises(UnsupportedError, match=f"feature '{without}'"):
        made.alloc_pool(pool_spec(layer_spec(**changes)))


def test_undeclared_arguments_and_extensions_are_refused() -> None:
    r = rig(without="lse, multi_token_decode, graph, canonical_kv")
    rows = [(r.sequence(8), 8, 8)]
    plan = r.backend.plan(r.pool, 0, r.batch(rows))
    with pytest.raises(UnsupportedError, match="'lse'"):
        r.backend.attend(plan, 0, *r.tensors(rows), torch.empty(8, 4, 16), extra={"lse": torch.empty(8, 4)})
    with pytest.raises(UnsupportedError, match="multi_token_decode"):
        r.backend.plan(r.pool, 0, dataclasses.replace(r.batch(rows), decode_q=8, num_decode=1))
    assert r.backend.extension("graph") is None and r.backend.extension("canonical_kv") is None
    assert r.backend.capabilities().graph == "none" and r.backend.capabilities().extensions == {}


def test_wrong_calls_are_named_and_write_nothing() -> None:
    r = rig(pool_spec(layer_spec(0), layer_spec(1, sinks=True), layer_spec(2, kv_of=0)))
    rows = [(r.sequence(8), 8, 8)]
    batch = r.batch(rows)
    plan = r.backend.plan(r.pool, 0, batch)
    q, k, v = r.tensors(rows)
    out = torch.empty(8, 4, 16)
    changed = dataclasses.replace
    wide = torch.empty(8, 4, 32)[..., :16]
    calls = {
        "plan": lambda: r.backend.attend("no plan", 0, q, k, v, out),
        "layer index": lambda: r.backend.attend(plan, 9, q, k, v, out),
        "attend forms": lambda: r.backend.attend(plan, 0, q, k, None, out),
        "kv_of": lambda: r.backend.attend(plan, 2, q, k, v, out),
        "bind": lambda: r.backend.attend(plan, 1, q, k, v, out),
        "attend tensors": lambda: r.backend.attend(plan, 0, wide, k, v, out),
        "group": lambda: r.backend.plan(r.pool, 1, batch),
        "slots": lambda: r.backend.plan(r.pool, 0, changed(batch, slots=np.array([20] * 8))),
        "limits": lambda: r.backend.plan(r.pool, 0, changed(batch, num_tokens=513)),
        "batch": lambda: r.backend.plan(r.pool, 0, changed(batch, max_ctx=7)),
        "copy_blocks": lambda: r.backend.copy_blocks(r.pool, r.pool, pairs((1, 2), (2, 3))),
        "pool": lambda: loopback().plan(r.pool, 0, batch),
        "pool spec": lambda: r.backend.alloc_pool(changed(r.spec, num_blocks=0)),
    }
    before = r.pool._bytes.copy()
    for law, call in calls.items():
        with pytest.raises(ContractViolation) as caught:
            call()
        assert caught.value.law == law
    r.backend.synchronize()
    assert np.array_equal(r.pool._bytes, before)


@pytest.mark.parametrize(
    "changes",
    [
        {"cu_q": np.array([0, 9], np.int32)},
        {"cu_q": np.array([0], np.int32)},
        {"ctx_len": np.array([-1], np.int32)},
        {"ctx_len": np.array([200], np.int32), "max_ctx": 200},
        {"rows": np.array([5], np.int32)},
        {"rows": np.zeros(0, np.int32)},
        {"block_table": np.full((2, 1), 64, np.int32)},
        {"max_q": 7},
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(changes: Any) -> None:
    r = rig()
    batch = dataclasses.replace(r.batch([(r.sequence(8), 8, 8)]), **changes)
    with pytest.raises(ContractViolation) as caught:
        r.backend.plan(r.pool, 0, batch)
    assert caught.value.law == "batch"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": "sideways"}, "late, early, random"),
        ({"memory": -1}, "from 0 on"),
        ({"fail_at": -2}, "from 0 on"),
        ({"without": "windows"}, "windows; it may name alibi"),
    ],
)
def test_wrong_options_are_refused(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loopback(**options)


def test_there_is_one_device() -> None:
    with pytest.raises(BackendUnavailable, match="index 0"):
        LoopbackDescriptor().create(1, {}, World())


def test_an_instance_declares_at_most_what_its_descriptor_does() -> None:
    offered = LoopbackDescriptor().describe(DeviceInfo(index=0, kind="any"))
    assert loopback().capabilities() == offered
    assert {"lse", "batch_invariant", "kv_sharing", "multi_token_decode"} <= offered.features and offered.async_copy


# -- ops and collectives -----------------------------------------------------------------------------------------------


def test_linear_gives_a_row_the_same_bits_in_every_batch() -> None:
    linear = loopback().op("linear", OpSpec(dtype="fp32"))
    assert linear is not None
    weight, bias, x = torch.randn(33, 50), torch.randn(33), torch.randn(9, 50)
    packed = linear.pack(weight, bias)
    whole = linear(x, packed)
    assert packed.nbytes == 33 * 51 * 4
    assert worst(whole, x.double().numpy() @ weight.double().numpy().T + bias.double().numpy()) < 1e-4
    assert all(torch.equal(linear(x[i : i + n], packed), whole[i : i + n]) for i in range(9) for n in range(10 - i))


@pytest.mark.parametrize("spec", [{"attributes": {"wide": True}}, {"features": frozenset({"lora"})}])
def test_an_op_with_what_nobody_knows_here_is_left_to_its_reference(spec: Any) -> None:
    assert loopback().op("linear", OpSpec(dtype="fp32", **spec)) is None
    assert loopback().op("rope", OpSpec(dtype="fp32")) is None


def test_a_communicator_that_fails_is_the_devices_failure() -> None:
    made = loopback()
    alone = made.communicator([0])
    x = torch.ones(2, 3)
    assert torch.equal(alone.all_reduce(x), torch.ones(2, 3)) and made.memory().free is not None
    alone.failure = DeviceError("rank 1 died")  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match="rank 1 died"):
        made.synchronize()
    made.close()


# -- graph -------------------------------------------------------------------------------------------------------------


SHAPE = GraphShape(rows=4, tokens=4, max_ctx=64)


def padded(r: Rig, rows: list[tuple[Seq, int, int]]) -> Batch:
    """The batch with 4 rows and 4 slots."""
    batch = r.batch(rows)
    missing = 4 - batch.num_seqs
    fill = {name: np.pad(getattr(batch, name), (0, missing)) for name in ("ctx_len", "rows")}
    cu_q, slots = np.pad(batch.cu_q, (0, missing), mode="edge"), np.pad(batch.slots, (0, missing), constant_values=-1)
    return dataclasses.replace(batch, cu_q=cu_q, slots=slots, **fill)


class Recorded:
    """One decode step of up to four rows, as tensors that stay where they are."""

    def __init__(self, r: Rig) -> None:
        self.rig, self.graphs = r, r.backend.extension("graph")
        self.plan = self.graphs.static_plan(r.pool, 0, SHAPE)
        self.q, self.k, self.v = torch.zeros(4, 4, 16), torch.zeros(4, 2, 16), torch.zeros(4, 2, 16)
        self.out = torch.zeros(4, 4, 16)

    def step(self) -> None:
        self.rig.backend.attend(self.plan, 0, self.q * 1, self.k, self.v, self.out)

    def put(self, rows: list[tuple[Seq, int, int]]) -> None:
        for target, source in zip((self.q, self.k, self.v), self.rig.tensors(rows), strict=True):
            target.fill_(NAN)[: len(source)] = source
        batch = padded(self.rig, rows)
        self.graphs.refresh(self.plan, batch)
        for array in (batch.cu_q, batch.ctx_len, batch.block_table, batch.rows, batch.slots):
            array[:] = 1


@pytest.mark.parametrize("order", ORDERS)
def test_a_replay_uses_the_last_refresh(order: str) -> None:
    r = rig(order=order)
    recorded = Recorded(r)
    graph = recorded.graphs.capture(recorded.step, [recorded.plan])
    assert 0 < graph.nbytes <= (1 << 30) - r.backend.memory().free
    for lengths in ([5, 33], [20], [7, 8, 9, 64]):
        rows = [(r.sequence(n), n, 1) for n in lengths]
        for seq, n, _ in rows:
            r.write(seq, 0, n - 1)
        recorded.put(rows)
        graph.replay()
        want = np.concatenate([r.expected(*row) for row in rows])
        assert worst(recorded.out[: len(rows)], want) < 1e-6
        assert bool(recorded.out.isfinite().all())
    graph.close()
    graph.close()
    with pytest.raises(ContractViolation, match="capture again"):
        graph.replay()


def test_a_refresh_leaves_what_was_enqueued_before_alone() -> None:
    r = rig()
    recorded = Recorded(r)
    first, second = r.sequence(1), r.sequence(1)
    recorded.put([(first, 1, 1)])
    r.backend.attend(recorded.plan, 0, None, recorded.k, recorded.v, None)
    recorded.put([(second, 1, 1)])
    r.backend.attend(recorded.plan, 0, None, recorded.k, recorded.v, None)
    for seq in (first, second):
        assert worst(read(r, seq), r.expected(seq, 1, 1)) < 1e-6


def test_values_bound_again_reach_a_recording() -> None:
    r = rig(pool_spec(layer_spec(sinks=True)))
    recorded = Recorded(r)
    r.backend.bind(r.pool, 0, {"sinks": np.zeros(4, np.float32)})
    rows = [(r.sequence(1), 1, 1)]
    graph = recorded.graphs.capture(recorded.step, [recorded.plan])
    for value in (0.0, 2.0):
        sinks = np.full(4, value, np.float32)
        r.backend.bind(r.pool, 0, {"sinks": sinks})
        recorded.put(rows)
        graph.replay()
        assert worst(recorded.out[:1], r.expected(*rows[0], {"sinks": sinks})) < 1e-6


def test_a_recorded_function_plans_nothing_waits_for_nothing_and_decides_nothing() -> None:
    r = rig()
    recorded = Recorded(r)
    event, eager = r.backend.record(), r.backend.plan(r.pool, 0, r.batch([]))
    r.write(r.sequence(4), 0, 4)
    pending = r.backend.record()
    capture = recorded.graphs.capture
    for forbidden in (
        lambda: r.backend.plan(r.pool, 0, r.batch([])),
        lambda: recorded.put([]),
        lambda: r.backend.wait(event),
        lambda: capture(recorded.step, [recorded.plan]),
        r.backend.synchronize,
        pending.join,
        lambda: r.backend.attend(eager, 0, *r.tensors([]), torch.empty(0, 4, 16)),
    ):
        with pytest.raises(ContractViolation) as caught:
            capture(forbidden, [recorded.plan])
        assert caught.value.law == "graph"
    layers = [0]
    graph = capture(lambda: [recorded.step() for _ in layers], [recorded.plan])
    graph.replay()
    layers.append(1)
    with pytest.raises(ContractViolation, match="decide outside"):
        graph.replay()
    r.pool.close()
    with pytest.raises(ContractViolation, match="closed"):
        graph.replay()
    graph.close()


def test_what_does_not_fit_a_static_plan_is_refused() -> None:
    r = rig()
    recorded = Recorded(r)
    short = r.batch([(r.sequence(1), 1, 1)])
    with pytest.raises(ContractViolation, match="pad it"):
        recorded.graphs.refresh(recorded.plan, short)
    with pytest.raises(ContractViolation, match="tokens 5, the limit is 4"):
        recorded.graphs.refresh(recorded.plan, r.batch([(r.sequence(5), 5, 5)]))
    with pytest.raises(ContractViolation, match="static_plan"):
        recorded.graphs.refresh(r.backend.plan(r.pool, 0, short), short)
    with pytest.raises(ContractViolation, match="larger than the pool"):
        recorded.graphs.static_plan(r.pool, 0, dataclasses.replace(SHAPE, rows=17))
    full = rig(made=loopback(memory=r.backend.pool_cost(r.spec).fixed + 64 * 4096))
    with pytest.raises(OutOfDeviceMemory):
        full.backend.extension("graph").capture(lambda: None, [])


# -- canonical bytes ---------------------------------------------------------------------------------------------------


def by_hand(r: Rig, seq: Seq, kv_dtype: str) -> bytes:
    """What the contract says of one sequence's blocks in a pool of one layer."""
    spec = r.layer
    owner = [spec.index, "mha", spec.kv_heads, spec.k_dim, spec.v_dim, 0, spec.kv_heads]
    text = json.dumps(["canonical_kv", 1, 0, kv_dtype, [owner]])
    numbers = b""
    for tensor in (seq.keys, seq.values):
        stored = tensor.to(TORCH[kv_dtype]).transpose(0, 1).contiguous()  # head, token, dim
        numbers += stored.view(torch.int16 if stored.element_size() == 2 else torch.int32).numpy().tobytes()
    return hashlib.sha256(text.encode()).digest() + numbers


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("order", ORDERS)
def test_canonical_bytes_are_those_of_the_contract_and_fit_other_blocks(kv_dtype: str, order: str) -> None:
    made = loopback(order=order)
    r = rig(pool_spec(layer_spec(k_dim=6, v_dim=5), kv_dtype=kv_dtype, block_size=8), made=made)
    seq = written(r, 20)
    canonical = made.extension("canonical_kv")
    event, data = canonical.export(r.pool, 0, np.array(seq.blocks, np.int32), np.array([8, 8, 4], np.int32))
    assert order != "late" or set(data.tolist()) == {255}
    event.join()
    assert data.tobytes() == by_hand(r, seq, kv_dtype)

    other = rig(pool_spec(layer_spec(k_dim=6, v_dim=5), kv_dtype=kv_dtype, block_size=16), made=made)
    copy = moved(seq, [9, 4])
    event = canonical.import_(other.pool, 0, np.array([9, 4]), np.array([16, 4]), data)
    data[:] = 0  # it was read
    if order == "late":
        assert bool(read(other, copy).isnan().all())
    made.wait(event)
    assert worst(read(other, copy, 20), other.expected(seq, 20, 20)) < 1e-6


def test_an_import_leaves_other_slots_alone_and_refuses_what_is_not_its_own() -> None:
    r = rig()
    canonical = r.backend.extension("canonical_kv")
    source, target = written(r), written(r)
    event, data = canonical.export(r.pool, 0, np.array(source.blocks), np.array([5]))
    event.join()
    r.backend.wait(canonical.import_(r.pool, 0, np.array(target.blocks), np.array([5]), data.tobytes()))
    mixed = Seq(
        torch.cat([source.keys[:5], target.keys[5:]]),
        torch.cat([source.values[:5], target.values[5:]]),
        target.queries,
        target.blocks,
    )
    assert worst(read(r, mixed), r.expected(mixed, 16, 1)) < 1e-6
    foreign = data.copy()
    foreign[0] ^= 1
    for ids, lengths, given in (
        (target.blocks, [5], foreign),
        (target.blocks, [6], data),
        (target.blocks, [17], data),
        ([0], [5], data),
        ([64], [5], data),
        ([3, 3], [3, 2], data),
        (target.blocks, [5], 7),
    ):
        with pytest.raises(ContractViolation) as caught:
            canonical.import_(r.pool, 0, np.array(ids), np.array(lengths), given)
        assert caught.value.law == "canonical_kv"
    with pytest.raises(ContractViolation, match=r"groups 0\.\.0"):
        canonical.export(r.pool, 1, np.array([1]), np.array([1]))


# -- the engine --------------------------------------------------------------------------------------------------------


@contextmanager
def looped(order: str, **settings: Any) -> Iterator[LLM]:
    options = {"order": order, "seed": 5} | settings.pop("backend_options", {})
    with engine(backend="loopback", backend_options=options, **settings) as llm:
        yield llm


@pytest.mark.parametrize("order", ORDERS)
def test_an_engine_gives_the_tokens_of_the_cpu(order: str) -> None:
    prompts = some_prompts([9, 30, 14])
    params = greedy(6)
    with looped(order) as llm:
        first = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate([*prompts, prompts[1][:25]], params, use_tqdm=False)
    assert token_ids(first) == [solo(prompt, params) for prompt in prompts]
    assert token_ids(again) == [*token_ids(first), solo(prompts[1][:25], params)]
    assert [output.num_cached_tokens for output in again] == [8, 28, 12, 24]


def samples(llm: LLM, prompt: list[int]) -> list[list[int]]:
    """Two samples of one prompt: they share its blocks until each writes, and then the last one is copied."""
    (output,) = llm.generate([prompt], seeded(3, 7, n=2), use_tqdm=False)
    return [sample.token_ids for sample in output.outputs]


@pytest.mark.parametrize(("order", "without"), [("late", ""), ("early", ""), ("random", ""), ("late", "nan_safe")])
def test_u46_preemption_and_copies_on_write_are_invisible(order: str, without: str) -> None:
    prompts = some_prompts([5, 6, 7, 9], seed=3)
    with engine() as cpu:
        expected = samples(cpu, prompts[0])
    with looped(order, num_blocks=9, max_model_len=32, backend_options={"without": without}) as llm:
        outputs = llm.generate(prompts, greedy(10), use_tqdm=False)
        assert token_ids(outputs) == [solo(prompt, greedy(10)) for prompt in prompts]
        assert llm.engine.scheduler.num_preemptions > 0
        assert samples(llm, prompts[0]) == expected
    assert expected[0] != expected[1]


def test_a_copy_that_the_core_forgets_to_wait_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoopbackBackend, "wait", lambda self, event: None)
    settings = {"backend": "loopback", "backend_options": {}, "swap_space": 0}  # other copies would push this one along
    with LLM(folder(), **SETTINGS | settings) as llm:
        (output,) = llm.generate(some_prompts([5], seed=3), seeded(3, 7, n=2), use_tqdm=False)
    reasons = [sample.finish_reason for sample in output.outputs]
    assert sorted(reasons) == ["error", "length"], "one of two samples reads the block that was not copied yet"


def test_a_device_that_fails_ends_the_engine_and_loses_no_request() -> None:
    llm = LLM(folder(), **SETTINGS | {"backend": "loopback", "backend_options": {"fail_at": 7}})
    waiting = llm.engine.add_request(some_prompts([4])[0], greedy(20))
    with pytest.raises(EngineDead, match="the device failed at attend 7") as caught:
        llm.generate(some_prompts([9, 6]), greedy(6), use_tqdm=False)
    assert isinstance(caught.value.__cause__, DeviceError)
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.abort_request(waiting) is None
    llm.close()


def test_a_pool_larger_than_the_device_is_refused_with_numbers() -> None:
    with pytest.raises(OutOfDeviceMemory) as caught:
        LLM(folder(), **SETTINGS | {"backend": "loopback", "backend_options": {"memory": 800_000}})
    assert caught.value.requested > caught.value.free


def test_limits_of_a_pool_are_not_negative() -> None:
    with pytest.raises(ContractViolation, match="limits are not negative"):
        loopback().alloc_pool(pool_spec(limits=Limits(rows=-1, tokens=1, context=1)))
