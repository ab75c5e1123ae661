"""The whole backend on Triton's kernels under the interpreter: plans, appends, graphs and block copies together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.api import GroupSpec, LayerSpec, Limits, OpSpec, PoolSpec
from pagedkv.api.extensions import GraphShape
from pagedkv.conformance.rig import Rig
from pagedkv.ops import REFERENCE
from tests.backends.cuda.double import double


def rig(*, block_size=16, seed=0, backend=None, placement="device", dtype="fp32", **layer):
    fields = {"q_heads": 4, "kv_heads": 2, "k_dim": 64, "v_dim": 64, "scale": 0.125}
    one = LayerSpec(index=0, **(fields | layer))
    group = GroupSpec(layers=(one,), block_size=block_size, kv_dtype=dtype)
    limits = Limits(rows=4, tokens=64, context=128)
    spec = PoolSpec(groups=(group,), num_blocks=16, dtype=dtype, limits=limits, placement=placement)
    made = Rig(backend or double("triton"), spec, seed=seed)
    if placement == "device":
        made.bind(one)
    return made


def written(made, length, queries):
    """A row whose earlier tokens are in the cache."""
    seq = made.sequence(length)
    made.write(seq, 0, length - queries)
    return seq, length, queries


@pytest.mark.parametrize(
    ("capability", "dtype", "tolerance"),
    [((8, 0), "fp32", 1e-5), ((9, 0), "fp16", 2e-3)],
    ids=["pointers", "descriptors"],
)
def test_prefill_and_decode_in_one_batch(capability, dtype, tolerance):
    backend = double("triton", capability=capability)
    made = rig(backend=backend, block_size=64, dtype=dtype, window=24, softcap=20.0, sinks=True)
    rows = [written(made, 70, 1), written(made, 3, 1), written(made, 40, 9)]
    assert np.abs(made.step(*rows) - made.expected(*rows)).max() < tolerance


def test_rows_of_several_decoded_tokens_and_a_head_dim_that_is_no_power_of_two():
    made = rig(k_dim=80, v_dim=80, alibi=True)
    rows = [written(made, 33, 3), written(made, 18, 2)]
    got = made.step(*rows, num_decode=2, decode_q=3)
    assert np.abs(got - made.expected(*rows)).max() < 1e-5


def test_a_graph_follows_its_plan():
    made = rig()
    graphs = made.backend.extension("graph")
    plan = graphs.static_plan(made.pool, 0, GraphShape(rows=3, tokens=3, max_ctx=128))
    q, k, v = (torch.zeros(3, heads, 64) for heads in (4, 2, 2))
    out = torch.full((3, 4, 64), float("nan"))
    graph = graphs.capture(lambda: made.backend.attend(plan, 0, q, k, v, out), [plan])
    for lengths in ((35, 2), (5,)):
        rows = [written(made, length, 1) for length in lengths]
        for target, values in zip((q, k, v), made.qkv(rows, made.layer()), strict=True):
            target[: len(rows)] = values
        graphs.refresh(plan, made.batch(rows, pad_rows=3 - len(rows), pad_slots=3 - len(rows)))
        graph.replay()
        assert np.abs(out[: len(rows)].double().numpy() - made.expected(*rows)).max() < 1e-5
        assert bool((out[len(rows) :] == 0).all())


def test_blocks_go_to_the_host_and_come_back_in_one_launch_each_way():
    made = rig(v_dim=24)
    host = rig(v_dim=24, backend=made.backend, placement="host")
    made.pool.rows.copy_(torch.randint(0, 255, made.pool.rows.shape, dtype=torch.uint8))
    before = made.pool.rows.clone()
    there = made.backend.copy_blocks(made.pool, host.pool, np.array([[3, 9], [5, 1]], np.int32))
    back = made.backend.copy_blocks(host.pool, made.pool, np.array([[9, 7], [1, 2]], np.int32), after=there)
    made.backend.wait(back)
    assert torch.equal(made.pool.rows[[7, 2]], before[[3, 5]])
    kept = [i for i in range(16) if i not in (7, 2)]
    assert torch.equal(made.pool.rows[kept], before[kept])


def test_ops_come_from_kernels_and_unknown_attributes_from_nobody():
    backend = double("triton")
    op = backend.op("rms_norm", OpSpec(dtype="fp32", dims={"dim": 48}))
    x, weight = torch.randn(5, 48), torch.randn(48)
    wanted = REFERENCE["rms_norm"](x.double(), weight.double(), 1e-6)
    assert float((op(x, weight, 1e-6).double() - wanted).abs().max()) < 1e-5
    assert backend.op("rms_norm", OpSpec(dtype="fp32", attributes={"of_tomorrow": 1})) is None
    assert backend.op("linear", OpSpec(dtype="fp32", dims={"n": 4, "k": 4})) is None
