"""The null backend: accepts everything, computes nothing, says so, and is chosen by name only."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from pagedkv import plugins
from pagedkv.api import AttentionBackend, OpSpec, PoolSpec, World
from pagedkv.cli import main as cli
from pagedkv.conformance.null.descriptor import NullDescriptor
from pagedkv.errors import BackendUnavailable
from pagedkv.ops.reference import REFERENCE
from pagedkv.plugins.selection import rank
from tests.backends.cpu.rig import layer_spec, pool_spec
from tests.helpers.engine_rig import engine, folder, greedy, some_prompts


@pytest.fixture
def null() -> AttentionBackend:
    return NullDescriptor().create(0, {}, World())


def test_a_call_leaves_zeros_and_nothing_else(null: AttentionBackend) -> None:
    pool = null.alloc_pool(pool_spec(layer_spec(sinks=True)))
    assert null.bind(pool, 0, {"sinks": np.zeros(4)}) is None
    plan = null.plan(pool, 0, None)  # type: ignore[arg-type]
    q, k = torch.ones(3, 4, 16), torch.ones(3, 2, 16)
    out = torch.full((5, 4, 16), float("nan"))
    null.attend(plan, 0, q, k, k, out)
    assert torch.equal(out, torch.zeros(5, 4, 16))
    assert null.attend(plan, 0, None, k, k, None) is None
    assert torch.equal(q, torch.ones(3, 4, 16))
    assert null.copy_blocks(pool, pool, np.zeros((0, 2), np.int32)).done()
    pool.close()


def test_any_number_of_blocks_fits(null: AttentionBackend) -> None:
    spec: PoolSpec = pool_spec(num_blocks=1 << 40, placement="host")
    cost, memory = null.pool_cost(spec), null.memory()
    assert 0 < cost.fixed + spec.num_blocks * cost.per_block < memory.free == memory.total
    assert null.alloc_pool(spec).num_blocks == 1 << 40


def test_ops_have_the_shapes_of_their_references(null: AttentionBackend) -> None:
    x, weight, table = torch.randn(5, 8), torch.randn(8), torch.randn(20, 8)
    ids, wide = torch.arange(5), torch.randn(5, 6)
    q, k, angles = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 4)
    halves = torch.full((5,), 0.5)
    arguments = {
        "rms_norm": (x, weight, 1e-6),
        "add_rms_norm": (x, x.clone(), weight, 1e-6),
        "rope": (q, k, angles, angles),
        "silu_mul": (wide,),
        "gelu_tanh_mul": (wide,),
        "embedding": (ids, table),
        "greedy": (wide,),
        "sample": (wide, halves, halves, torch.full((5,), 3, dtype=torch.int32), halves),
    }
    assert arguments.keys() | {"linear"} == REFERENCE.keys()
    for name, given in arguments.items():
        mine, want = (op(*given) for op in (null.op(name, OpSpec(dtype="fp32")), REFERENCE[name]))
        assert (None if mine is None else mine.shape) == (None if want is None else want.shape)
        assert want is None or mine.dtype == want.dtype
    linear = null.op("linear", OpSpec(dtype="fp32"))
    packed = linear.pack(torch.randn(7, 8), torch.randn(7))
    assert packed.nbytes == 0 and torch.equal(linear(x, packed), torch.zeros(5, 7))
    assert null.op("telepathy", OpSpec(dtype="fp32")) is None
    assert null.op("linear", OpSpec(dtype="fp32", attributes={"folded": True})) is None


def test_an_engine_runs_and_is_told_once_that_it_means_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), engine(backend="null", backend_options={}) as llm:
        outputs = llm.generate(some_prompts([9, 30]), greedy(6), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [[0] * 6] * 2
    assert [r.getMessage() for r in caplog.records if "mean nothing" in r.getMessage()] == [
        "backend null computes nothing: times are the core's own, and answers mean nothing"
    ]


def test_bench_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDKV_LOG_LEVEL", raising=False)
    sizes = ("--batch-sizes", "1,3", "--input-len", "5", "--output-len", "4", "--repeats", "1", "--json")
    result = CliRunner().invoke(cli.pagedkv, ["bench", str(folder()), *sizes, "--backend", "null"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["batch_size"], row["machine"]["backend"]) for row in rows] == [(1, "null"), (3, "null")]
    assert [row["runs"][0]["output_tokens"] for row in rows] == [4, 12]
    assert "computes nothing" in result.stderr


def test_there_is_one_device() -> None:
    with pytest.raises(BackendUnavailable, match="index 0"):
        NullDescriptor().create(2, {}, World())


@pytest.mark.parametrize(("name", "words"), [("loopback", "for tests"), ("null", "computes nothing")])
def test_u77_both_are_listed_and_chosen_by_name_only(name: str, words: str) -> None:
    listed = plugins.probe_all(["cpu", name])
    status = next(row for row in listed if row.name == name)
    assert (status.status, status.score, status.distribution) == ("ok", 0, "pagedkv")
    assert status.devices[0].reason == "" and words in status.devices[0].kind
    assert [row.name for row in rank(listed)] == ["cpu"] and rank([status]) == []
    chosen = plugins.select(name)
    assert (chosen.name, chosen.explicit) == (name, True)
