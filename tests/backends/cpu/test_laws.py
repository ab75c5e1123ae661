"""The contract's laws for plan, attend, pools and copies, one test each."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from pagedkv.api import Batch, ContractViolation, GroupSpec, Limits, OutOfDeviceMemory, UnsupportedError, needs
from tests.backends.cpu.rig import Rig, backend, layer_spec, oracle, pool_spec


def error(out: torch.Tensor, want: np.ndarray) -> float:
    return float(np.abs(out.double().numpy() - want).max())


def test_host_arrays_may_be_overwritten_after_plan():
    rig = Rig(pool_spec())
    rows = [(rig.sequence(40), 40, 1), (rig.sequence(20), 20, 20)]
    rig.write(rows[0][0], 0, 39)
    batch = rig.batch(rows)
    plan = rig.backend.plan(rig.pool, 0, batch)
    for array in (batch.cu_q, batch.ctx_len, batch.block_table, batch.rows, batch.slots):
        array[:] = 7
    q, k, v = rig.tensors(rows)
    out = torch.empty(21, 4, 16)
    rig.backend.attend(plan, 0, q, k, v, out)
    assert error(out, np.concatenate([rig.expected(*row) for row in rows])) < 5e-6


def test_two_plans_of_a_group_are_alive_and_interleaved():
    layers = layer_spec(0), layer_spec(1, window=8)
    rig = Rig(pool_spec(*layers))
    first, second = [(rig.sequence(30), 30, 30)], [(rig.sequence(50), 50, 50)]
    plans = [rig.backend.plan(rig.pool, 0, rig.batch(rows)) for rows in (first, second)]
    outs = {}
    for layer in (0, 1):
        for name, rows, plan in (("a", first, plans[0]), ("b", second, plans[1])):
            q, k, v = rig.tensors(rows)
            outs[name, layer] = torch.empty(len(q), 4, 16)
            rig.backend.attend(plan, layer, q, k, v, outs[name, layer])
    for layer in layers:
        rig.layer = layer
        assert error(outs["a", layer.index], rig.expected(*first[0])) < 5e-6
        assert error(outs["b", layer.index], rig.expected(*second[0])) < 5e-6


def test_rows_permuted_and_repeated_give_the_same_bits():
    rig = Rig(pool_spec())
    seqs = [rig.sequence(n) for n in (5, 70, 200)]
    for seq in seqs:
        rig.write(seq, 0, len(seq.keys))
    rows = [(seq, len(seq.keys), 1) for seq in seqs]

    def ask(order):
        chosen = [rows[i] for i in order]
        plan = rig.backend.plan(rig.pool, 0, rig.batch(chosen, write=False))
        out = torch.empty(len(order), 4, 16)
        rig.backend.attend(plan, 0, rig.tensors(chosen)[0], None, None, out)
        return out

    straight, mixed = ask([0, 1, 2]), ask([2, 0, 2, 1, 0])
    assert torch.equal(mixed, straight[[2, 0, 2, 1, 0]])


def test_decode_rows_may_have_several_tokens():
    rig = Rig(pool_spec())
    rows = [(rig.sequence(40), 40, 3), (rig.sequence(130), 130, 1), (rig.sequence(20), 20, 20)]
    for seq, context, count in rows:
        rig.write(seq, 0, context - count)
    batch = dataclasses.replace(rig.batch(rows), num_decode=2, decode_q=3)
    assert needs(batch) == ("multi_token_decode",) and set(needs(batch)) <= rig.backend.capabilities().features
    q, k, v = rig.tensors(rows)
    out = torch.empty(24, 4, 16)
    rig.backend.attend(rig.backend.plan(rig.pool, 0, batch), 0, q, k, v, out)
    assert error(out, np.concatenate([rig.expected(*row) for row in rows])) < 5e-6


def test_a_pool_made_in_inference_mode_works_in_and_out_of_it():
    with torch.inference_mode():
        rig = Rig(pool_spec())
        seq = rig.sequence(20)
        inside = rig.step((seq, 20, 20))
    seq = type(seq)(seq.keys.clone(), seq.values.clone(), seq.queries.clone(), seq.blocks)
    outside = rig.step((seq, 20, 20))
    assert torch.equal(inside, outside) and error(outside, rig.expected(seq, 20, 20)) < 5e-6


def test_the_later_row_of_a_sequence_may_come_first():
    rig = Rig(pool_spec())
    seq = rig.sequence(150)
    out = rig.step((seq, 150, 50), (seq, 100, 100))
    want = np.concatenate([rig.expected(seq, 150, 50), rig.expected(seq, 100, 100)])
    assert error(out, want) < 5e-6


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16"])
def test_append_then_attend_is_one_call_bit_for_bit(kv_dtype):
    rig = Rig(pool_spec(kv_dtype=kv_dtype))
    rows = [(rig.sequence(150), 150, 1), (rig.sequence(33), 33, 33)]
    rig.write(rows[0][0], 0, 149)
    q, k, v = rig.tensors(rows)
    plan = rig.backend.plan(rig.pool, 0, rig.batch(rows))
    whole, halves = torch.empty(34, 4, 16), torch.empty(34, 4, 16)
    rig.backend.attend(plan, 0, q, k, v, whole)
    before = [planes.clone() for planes in rig.pool._planes.values()]
    rig.backend.attend(plan, 0, None, k, v, None)
    rig.backend.attend(plan, 0, q, None, None, halves)
    assert torch.equal(whole, halves)
    assert all(torch.equal(a, b) for a, b in zip(before, rig.pool._planes.values(), strict=True))


def test_only_the_named_slots_of_the_named_layer_change():
    rig = Rig(pool_spec(layer_spec(0), layer_spec(1)))
    rig.poison(3.0)
    other = rig.pool.layer(1).keys.view(torch.int32).clone()  # bits: what nobody wrote may be NaN
    seq = rig.sequence(20)
    rig.write(seq, 0, 20)
    keys = rig.pool.layer(0).keys
    slots = [seq.blocks[p // 16] * 16 + p % 16 for p in range(20)]
    assert torch.equal(keys[:, slots].transpose(0, 1), seq.keys)
    rest = torch.ones(keys.shape[1], dtype=torch.bool)
    rest[slots] = False
    rest[:16] = False
    assert bool((keys[:, rest] == 3.0).all()) and bool((keys[:, :16] == 0).all())
    assert torch.equal(rig.pool.layer(1).keys.view(torch.int32), other)


def test_slots_of_minus_one_are_not_written():
    rig = Rig(pool_spec())
    seq = rig.sequence(20)
    batch = rig.batch([(seq, 20, 20)])
    batch.slots[::2] = -1
    _, k, v = rig.tensors([(seq, 20, 20)])
    rig.poison(5.0)
    rig.backend.attend(rig.backend.plan(rig.pool, 0, batch), 0, None, k, v, None)
    stored = rig.pool.layer(0).keys[:, [seq.blocks[p // 16] * 16 + p % 16 for p in range(20)]].transpose(0, 1)
    assert torch.equal(stored[1::2], seq.keys[1::2]) and bool((stored[::2] == 5.0).all())


def test_profiling_batch_without_blocks_is_legal_and_finite():
    rig = Rig(pool_spec())
    batch = Batch(
        num_seqs=2,
        num_tokens=21,
        cu_q=np.array([0, 20, 21, 21], np.int32),
        ctx_len=np.array([20, 100, 0], np.int32),
        block_table=np.zeros((1, 8), np.int32),
        rows=np.zeros(3, np.int32),
        slots=np.full(21, -1, np.int64),
        max_q=20,
        max_ctx=100,
    )
    out = torch.full((24, 4, 16), float("nan"))
    x = torch.full((24, 2, 16), 2.0)
    rig.backend.attend(rig.backend.plan(rig.pool, 0, batch), 0, torch.ones(24, 4, 16), x, x, out)
    assert torch.equal(out, torch.zeros(24, 4, 16))  # the null block holds zeros
    assert not rig.pool.layer(0).keys[:, :16].any()


def test_padding_rows_with_nan_reach_nothing_and_stay_finite():
    rig = Rig(pool_spec())
    rows = [(rig.sequence(30), 30, 30)]
    batch = rig.batch(rows)
    q, k, v = (torch.cat([t, torch.full((5, *t.shape[1:]), float("nan"))]) for t in rig.tensors(rows))
    out = torch.full((35, 4, 16), float("nan"))
    rig.backend.attend(rig.backend.plan(rig.pool, 0, batch), 0, q, k, v, out)
    assert error(out[:30], rig.expected(*rows[0])) < 5e-6
    assert bool(out[30:].isfinite().all())


def test_no_sequence_at_all():
    rig = Rig(pool_spec())
    plan = rig.backend.plan(rig.pool, 0, rig.batch([]))
    out = torch.full((2, 4, 16), float("nan"))
    rig.backend.attend(plan, 0, torch.ones(2, 4, 16), torch.ones(2, 2, 16), torch.ones(2, 2, 16), out)
    assert bool(out.isfinite().all())


def test_slices_of_one_tensor_are_read_and_left_alone():
    rig = Rig(pool_spec())
    rows = [(rig.sequence(30), 30, 30)]
    parts = rig.tensors(rows)
    joined = torch.cat([part.flatten(1) for part in parts], 1)
    before = joined.clone()
    q, k, v = joined[:, :64].view(-1, 4, 16), joined[:, 64:96].view(-1, 2, 16), joined[:, 96:].view(-1, 2, 16)
    out = torch.empty(30, 4, 16)
    rig.backend.attend(rig.backend.plan(rig.pool, 0, rig.batch(rows)), 0, q, k, v, out)
    assert torch.equal(joined, before)
    assert error(out, rig.expected(*rows[0])) < 5e-6


def test_entries_behind_the_window_may_be_null_or_another_block():
    rig = Rig(pool_spec(layer_spec(window=20)))
    rig.poison(float("nan"))
    seq = rig.sequence(200)
    rig.write(seq, 0, 199)
    answers = []
    for behind in (seq.blocks[0], 0, seq.blocks[5]):
        blocks = [behind] * 11 + seq.blocks[11:]  # keys 180..199 are visible, block 11 begins at 176
        changed = type(seq)(seq.keys, seq.values, seq.queries, blocks)
        answers.append(rig.step((changed, 200, 1)))
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
    assert error(answers[0], rig.expected(seq, 200, 1)) < 5e-6


def test_a_layer_reads_another_ones_cache():
    rig = Rig(pool_spec(layer_spec(0), layer_spec(1, kv_of=0, window=4)))
    alone = rig.backend.pool_cost(pool_spec(layer_spec(0)))
    assert rig.backend.pool_cost(rig.spec).per_block == alone.per_block
    rows = [(rig.sequence(30), 30, 30)]
    plan = rig.backend.plan(rig.pool, 0, rig.batch(rows))
    q, k, v = rig.tensors(rows)
    out = torch.empty(30, 4, 16)
    rig.backend.attend(plan, 0, q, k, v, torch.empty(30, 4, 16))
    rig.backend.attend(plan, 1, q, None, None, out)
    rig.layer = rig.group.layers[1]
    assert error(out, rig.expected(*rows[0])) < 5e-6
    with pytest.raises(ContractViolation, match="k = v = None"):
        rig.backend.attend(plan, 1, q, k, v, out)


def test_ids_move_between_groups_of_a_pool():
    groups = (
        GroupSpec(layers=(layer_spec(0), layer_spec(1)), block_size=16, kv_dtype="fp32"),
        GroupSpec(layers=(layer_spec(2, k_dim=32, v_dim=5),), block_size=8, kv_dtype="bf16"),
    )
    spec = pool_spec(groups=groups)
    made = backend()
    first = Rig(spec, made=made)
    second = Rig(spec, made=made, group=1)
    second.pool = first.pool
    seq = first.sequence(40)
    first.write(seq, 0, 40)
    taken = second.sequence(24)
    taken.blocks = seq.blocks
    out = second.step((taken, 24, 24))
    assert error(out, second.expected(taken, 24, 24)) < 5e-6
    other = first.sequence(40)
    out = first.step((other, 40, 40))
    assert error(out, first.expected(other, 40, 40)) < 5e-6


def test_groups_share_bytes_of_equal_blocks():
    one = GroupSpec(layers=(layer_spec(0), layer_spec(1)), block_size=16, kv_dtype="fp32")
    two = GroupSpec(layers=(layer_spec(2, window=64),), block_size=16, kv_dtype="fp32")
    made = backend()
    both = made.pool_cost(pool_spec(groups=(one, two)))
    assert both.per_block == made.pool_cost(pool_spec(groups=(one,))).per_block == 2 * 2 * 2 * 16 * 16 * 4


# -- copies ------------------------------------------------------------------------------------------------------------


def test_blocks_are_copied_bit_for_bit_and_cleared_from_null():
    rig = Rig(pool_spec(layer_spec(0), layer_spec(1), kv_dtype="bf16"))
    for planes in rig.pool._planes.values():
        planes[:, 1:] = torch.randint(0, 256, planes[:, 1:].shape, dtype=torch.uint8)
    before = {size: planes.clone() for size, planes in rig.pool._planes.items()}
    pairs = np.array([[3, 9], [3, 10], [0, 4]], np.int32)
    event = rig.backend.copy_blocks(rig.pool, rig.pool, pairs)
    pairs[:] = 0
    assert event.done()
    for size, planes in rig.pool._planes.items():
        want = before[size]
        want[:, 9], want[:, 10], want[:, 4] = want[:, 3], want[:, 3], 0
        assert torch.equal(planes, want)


def test_out_to_a_host_pool_and_back():
    made = backend()
    rig = Rig(pool_spec(), made=made)
    host = made.alloc_pool(pool_spec(placement="host", num_blocks=9))
    seq = rig.sequence(30)
    want = rig.step((seq, 30, 30))
    made.wait(made.copy_blocks(rig.pool, host, np.array([[seq.blocks[0], 5], [seq.blocks[1], 6]], np.int32)))
    rig.poison(9.0)
    moved = [rig.free.pop(), rig.free.pop()]
    made.wait(made.copy_blocks(host, rig.pool, np.array([[5, moved[0]], [6, moved[1]]], np.int32)))
    back = type(seq)(seq.keys, seq.values, seq.queries, moved)
    plan = made.plan(rig.pool, 0, rig.batch([(back, 30, 30)], write=False))
    out = torch.empty(30, 4, 16)
    made.attend(plan, 0, seq.queries, None, None, out)
    assert torch.equal(out, want)
    with pytest.raises(ContractViolation, match="placement"):
        made.plan(host, 0, rig.batch([]))


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([[1, 0]], "block 0"),
        ([[1, 64]], "destination outside"),
        ([[-1, 3]], "source outside"),
        ([[64, 3]], "source outside"),
        ([[1, 3], [2, 3]], "twice"),
        ([[1, 2], [2, 3]], "both sides"),
    ],
)
def test_wrong_pairs_are_refused(pairs, words):
    rig = Rig(pool_spec())
    before = [planes.clone() for planes in rig.pool._planes.values()]
    with pytest.raises(ContractViolation, match=words):
        rig.backend.copy_blocks(rig.pool, rig.pool, np.array(pairs, np.int32))
    for planes, old in zip(rig.pool._planes.values(), before, strict=True):
        assert torch.equal(planes, old)


# -- pools and lifetimes -----------------------------------------------------------------------------------------------


def test_a_pool_takes_no_more_than_its_cost():
    layers = layer_spec(0, k_dim=20, v_dim=7, q_heads=5, kv_heads=2), layer_spec(1, window=9, alibi=True)
    for placement in ("device", "host"):
        spec = pool_spec(*layers, kv_dtype="bf16", block_size=3, placement=placement)
        made = backend()
        cost, pool = made.pool_cost(spec), made.alloc_pool(spec)
        held = pool._storage.nbytes
        if pool._scratch is not None:
            held += sum(value.nbytes for value in vars(pool._scratch).values() if isinstance(value, torch.Tensor))
        assert spec.num_blocks * cost.per_block <= held <= spec.num_blocks * cost.per_block + cost.fixed
        assert cost == made.pool_cost(pool_spec(*layers, kv_dtype="bf16", block_size=3, placement=placement))


@pytest.mark.parametrize("kernels", ["native"], indirect=True)
def test_native_plans_fit_the_fixed_part():
    limits = Limits(rows=4, tokens=512, context=1024)
    spec = pool_spec(limits=limits, num_blocks=300)
    rig = Rig(spec)
    plan = rig.backend.plan(rig.pool, 0, rig.batch([(rig.sequence(1000), 1000, 100)] * 4))
    held = sum(value.nbytes for value in vars(plan).values() if isinstance(value, np.ndarray))
    assert held > 0 and limits.plans * held + rig.pool.scratch().work.nbytes <= rig.backend.pool_cost(spec).fixed


@pytest.mark.parametrize("kernels", ["torch"], indirect=True)
@pytest.mark.parametrize("shape", [[(1000, 1)] * 4, [(500, 500)], [(900, 100), (900, 100), (900, 1)]])
@pytest.mark.parametrize("window", [None, 50])
def test_plans_fit_the_fixed_part(shape, window):
    limits = Limits(rows=4, tokens=512, context=1024)
    spec = pool_spec(layer_spec(window=window), limits=limits, num_blocks=300)
    rig = Rig(spec)
    rows = [(rig.sequence(context), context, count) for context, count in shape]
    plan = rig.backend.plan(rig.pool, 0, rig.batch(rows))
    found: dict[int, int] = {}
    for part in next(iter(plan._passes.values())):
        tensors = [part.query_rows, part.result_rows, part.positions, part.first_keys]
        tensors += [piece[2] for piece in part.pieces] + [ceiling for _, ceiling in part.ceilings]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    scratch = sum(value.nbytes for value in vars(rig.pool._scratch).values() if isinstance(value, torch.Tensor))
    fixed = rig.backend.pool_cost(spec).fixed
    assert limits.plans * sum(found.values()) + scratch <= fixed


def test_the_null_block_reads_as_zero_at_first():
    pool = backend().alloc_pool(pool_spec(layer_spec(0), layer_spec(1)))
    assert all(not planes[:, 0].any() for planes in pool._planes.values())


def test_a_pool_that_cannot_fit_says_how_much():
    made = backend()
    spec = pool_spec(num_blocks=1 << 40)
    with pytest.raises(OutOfDeviceMemory) as caught:
        made.alloc_pool(spec)
    cost = made.pool_cost(spec)
    assert caught.value.requested == cost.per_block * (1 << 40) + cost.fixed
    assert 0 < caught.value.free < caught.value.requested
    assert made.alloc_pool(pool_spec()).num_blocks == 64  # the instance is still usable


def test_u85_every_reason_is_given_at_once():
    layer = layer_spec(0, k_dim=600, kind="mla", window=0, kv_of=5)
    spec = pool_spec(layer, block_size=0, kv_dtype="int8/token_head", dtype="fp64", features=frozenset({"state"}))
    with pytest.raises(UnsupportedError) as caught:
        backend().alloc_pool(spec)
    text = "\n".join(caught.value.reasons)
    for word in ("block size 0", "k_dim 600", "'mla'", "window 0", "kv_of 5", "int8/token_head", "'fp64'", "'state'"):
        assert word in text
    assert len(caught.value.reasons) == 8


def test_batch_invariance_is_for_fp32_only():
    spec = pool_spec(dtype="bf16", features=frozenset({"batch_invariant"}))
    with pytest.raises(UnsupportedError, match=r"batch_invariant.*fp32"):
        backend().alloc_pool(spec)


def test_close_is_idempotent_and_final():
    made = backend()
    rig = Rig(pool_spec(), made=made)
    plan = made.plan(rig.pool, 0, rig.batch([]))
    rig.pool.close()
    rig.pool.close()
    for call in (
        lambda: made.plan(rig.pool, 0, rig.batch([])),
        lambda: made.attend(plan, 0, None, None, None, None),
        lambda: made.copy_blocks(rig.pool, rig.pool, np.zeros((0, 2), np.int32)),
    ):
        with pytest.raises(ContractViolation):
            call()
    again = made.alloc_pool(pool_spec())
    made.close()
    made.close()
    with pytest.raises(ContractViolation):
        made.plan(again, 0, rig.batch([]))
    with pytest.raises(ContractViolation):
        made.alloc_pool(pool_spec())


def test_instances_are_independent():
    one, two = backend(), backend()
    rig = Rig(pool_spec(), made=one)
    with pytest.raises(ContractViolation, match="another backend instance"):
        two.plan(rig.pool, 0, rig.batch([]))
    two.close()
    seq = rig.sequence(9)
    assert error(rig.step((seq, 9, 9)), rig.expected(seq, 9, 9)) < 5e-6


# -- wrong calls change nothing ----------------------------------------------------------------------------------------


def test_wrong_calls_are_named_and_write_nothing():
    rig = Rig(pool_spec(layer_spec(0), layer_spec(1, sinks=True)))
    rows = [(rig.sequence(8), 8, 8)]
    plan = rig.backend.plan(rig.pool, 0, rig.batch(rows))
    q, k, v = rig.tensors(rows)
    out = torch.empty(8, 4, 16)
    before = [planes[:, 1:].clone() for planes in rig.pool._planes.values()]
    wrong = [
        (0, (q, k, None, out), "come together"),
        (0, (q, k, v, None), "come together"),
        (7, (q, k, v, out), "no layer 7"),
        (0, (q[:5], k, v, out), r"q must be torch.float32 \[>= 8, 4, 16\]"),
        (0, (q, k.double(), v, out), "k must be"),
        (0, (q, k, v, torch.empty(8, 16, 4).transpose(1, 2)), "contiguous"),
        (1, (q, k, v, out), "bind"),
    ]
    for layer, tensors, words in wrong:
        with pytest.raises(ContractViolation, match=words):
            rig.backend.attend(plan, layer, *tensors)
    with pytest.raises(UnsupportedError, match="mask"):
        rig.backend.attend(plan, 0, q, k, v, out, extra={"mask": out})
    for planes, old in zip(rig.pool._planes.values(), before, strict=True):
        assert torch.equal(planes[:, 1:].view(torch.int64), old.view(torch.int64))


def test_wrong_batches_are_named():
    rig = Rig(pool_spec(num_blocks=70, limits=Limits(rows=2, tokens=30, context=64)))
    seq = rig.sequence(100)

    def plan(rows, **arrays):
        batch = rig.batch(rows)
        for name, value in arrays.items():
            getattr(batch, name)[:] = value
        return rig.backend.plan(rig.pool, 0, batch)

    for rows, arrays, words in (
        ([(seq, 100, 1)], {}, "context 100"),
        ([(seq, 40, 31)], {}, "tokens 31"),
        ([(seq, 4, 1)] * 3, {}, "rows 3"),
        ([(seq, 4, 1)], {"slots": 15}, "never written"),
        ([(seq, 4, 1)], {"slots": 70 * 16}, "slots must be"),
        ([(seq, 4, 1)], {"block_table": 70}, "block table"),
        ([(seq, 4, 1)], {"cu_q": 0}, "cu_q"),
    ):
        with pytest.raises(ContractViolation, match=words):
            plan(rows, **arrays)


def test_bind_again_replaces_and_unknown_parameters_are_refused():
    rig = Rig(pool_spec(layer_spec(sinks=True)))
    seq = rig.sequence(20)
    address = rig.pool.layer(0).sinks.data_ptr()
    for values in (np.zeros(4, np.float32), np.array([3, -1, 0, 2], np.float32)):
        kept = values.copy()
        rig.backend.bind(rig.pool, 0, {"sinks": values})
        values[:] = 50
        assert error(rig.step((seq, 20, 20)), rig.expected(seq, 20, 20, {"sinks": kept})) < 5e-6
    assert rig.pool.layer(0).sinks.data_ptr() == address
    for params, words in (({"alibi": np.zeros(4)}, "no 'alibi'"), ({"sinks": np.zeros(3)}, "shape")):
        with pytest.raises(UnsupportedError, match=words):
            rig.backend.bind(rig.pool, 0, params)


def test_a_cross_attention_group_sees_the_whole_context():
    rig = Rig(pool_spec(layer_spec(causal=False)))
    seq = rig.sequence(10)
    rig.write(seq, 0, 10)
    batch = rig.batch([(seq, 10, 10)], write=False)
    wide = type(batch)(
        num_seqs=1,
        num_tokens=25,
        cu_q=np.array([0, 25], np.int32),
        ctx_len=batch.ctx_len,
        block_table=batch.block_table,
        rows=batch.rows,
        max_q=25,
        max_ctx=10,
    )
    q = rig.random(25, 4, 16)
    out = torch.empty(25, 4, 16)
    rig.backend.attend(rig.backend.plan(rig.pool, 0, wide), 0, q, None, None, out)
    for j in range(25):
        want = oracle(
            rig.layer, q[j : j + 1].double().numpy(), *(t.double().numpy() for t in (seq.keys, seq.values)), {}
        )
        assert error(out[j : j + 1], want) < 5e-6
