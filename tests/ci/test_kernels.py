"""The kernel figures: bytes and operations by hand, every call really made, clocks of known cost, and the tables."""

from __future__ import annotations

import json

import clocks
import kernel_cases
import kernels
import limits
import numpy as np
import paged
import pytest
import startup
import step_split
import torch
from click.testing import CliRunner

from pagedkv import plugins
from pagedkv.api import LayerSpec
from pagedkv.cli.standard_work import Work
from pagedkv_cpu import native
from tests.helpers.tiny_models import tiny_model

if REASON := native.why_missing():
    pytest.skip(REASON, allow_module_level=True)

TINY = kernel_cases.Shapes(layers=3, q_heads=4, kv_heads=2, head_dim=32, hidden=96, inner=64, vocab=80)
SWEEP = kernel_cases.Sweep(
    rows=(1, 5),
    formats=("Q4_1",),
    batches=(2,),
    contexts=(40,),
    block_sizes=(8,),
    prompts=((6, 0), (6, 20)),
    tokens=(1, 7),
    copies=(2,),
    working_set=50_000,
)


@pytest.fixture(scope="module")
def backend():
    made = plugins.create(plugins.select("cpu"), {"threads": 1})
    yield made
    made.close()


@pytest.fixture(scope="module")
def cases(backend):
    """Every case by kernel and work; each of its calls has been made once."""
    found = {}
    for make in kernel_cases.all_cases(backend, TINY, SWEEP).values():
        for case in make():
            for call in case.calls:
                call()
            found[case.kernel, case.shape] = case
    return found


def counts(case):
    return case.nbytes, case.operations


def test_a_product_reads_its_weights_and_multiplies_each_with_every_row(cases):
    # Q4_1: 20 bytes for 32 weights; 4 * 32 + 2 * 2 * 32 outputs of 96 inputs.
    blocks = 256 * 96 // 32 * 20
    assert counts(cases["linear Q4_1", "qkv 256 x 96, 1 rows"]) == (blocks + 4 * (256 + 96), 256 * 96)
    five = cases["linear Q4_1", "qkv 256 x 96, 5 rows"]
    assert counts(five) == (blocks + 5 * 4 * (256 + 96), 5 * 256 * 96) and five.macs
    plain = cases["linear fp32", "down 96 x 64, 5 rows"]
    assert counts(plain) == (4 * 96 * 64 + 5 * 4 * (96 + 64), 2 * 5 * 96 * 64) and not plain.macs
    # Q8_0: 34 bytes for 32 weights.
    assert counts(cases["linear Q8_0", "head 80 x 96, 1 rows"]) == (80 * 3 * 34 + 4 * (80 + 96), 80 * 96)


def test_attention_reads_each_key_and_value_once_and_multiplies_visible_pairs(cases):
    decode = cases["attention, decode", "2 x 1 over 40, blocks of 8"]
    # Keys and values of 2 heads of 32, float32; q and out of 4 heads; two products of 32 numbers for each pair.
    assert counts(decode) == (2 * 40 * 2 * 2 * 32 * 4 + 2 * (2 * 4 * 32 * 4), 2 * 40 * 4 * 2 * 2 * 32)
    pairs = sum(20 + j + 1 for j in range(6))
    behind = cases["attention, prefill", "6 over 26, blocks of 16"]
    assert counts(behind) == (26 * 2 * 2 * 32 * 4 + 2 * (6 * 4 * 32 * 4), pairs * 4 * 2 * 2 * 32)
    alone = cases["attention, prefill", "6 over 6, blocks of 16"]
    assert alone.operations == (1 + 2 + 3 + 4 + 5 + 6) * 4 * 2 * 2 * 32


def test_what_is_written_counts_as_what_is_read(cases):
    assert counts(cases["append", "7 tokens, blocks of 16"]) == (2 * 7 * 2 * 2 * 32 * 4, 0)
    assert counts(cases["copy_blocks", "2 blocks of 16, 3 layers"]) == (2 * 2 * 3 * 16 * 2 * 2 * 32 * 4, 0)
    # x, the residual twice, the result, the weight.
    assert counts(cases["add_rms_norm", "7 tokens"]) == (4 * 7 * 96 * 4 + 96 * 4, 5 * 7 * 96)
    # 6 heads there and back, cosines and sines of 16 pairs.
    assert counts(cases["rope", "7 tokens"]) == (2 * 7 * 6 * 32 * 4 + 2 * 7 * 16 * 4, 7 * 6 * 16 * 6)
    assert counts(cases["silu_mul", "7 tokens"]) == (7 * 3 * 64 * 4, 5 * 7 * 64)
    assert all(case.copies for (kernel, _), case in cases.items() if kernel in ("append", "copy_blocks", "rope"))


def test_the_calls_of_a_case_fill_the_working_set_with_memory_of_their_own(cases):
    decode = cases["attention, decode", "2 x 1 over 40, blocks of 8"]
    assert len(decode.calls) == -(-50_000 // (2 * 40 * 2 * 2 * 32 * 4))
    layers = [call.args[1] for call in decode.calls]
    assert layers == list(range(len(layers)))
    product = cases["linear Q4_1", "qkv 256 x 96, 1 rows"]
    assert len({call.args[1].panels.data_ptr() for call in product.calls}) == len(product.calls) == 4
    assert len(cases["linear fp32", "qkv 256 x 96, 1 rows"].calls) == 2, "two at least"


def test_keys_and_values_are_written_to_every_block_of_every_row(backend):
    layer = LayerSpec.of(index=0, q_heads=4, kv_heads=2, k_dim=32, v_dim=32, scale=32**-0.5)
    group = kernel_cases.GroupSpec(layers=(layer,), block_size=8, kv_dtype="fp32")
    work = paged.Rows(count=3, queries=1, context=21)
    torch.manual_seed(3)
    made = paged.Paged(backend, group, work)
    torch.manual_seed(3)
    keys, values = torch.randn(21, 2, 32).double(), torch.randn(21, 2, 32).double()
    q, out = torch.randn(3, 4, 32), torch.empty(3, 4, 32)
    backend.attend(made.plan(work), 0, q, None, None, out)
    keys, values = (each.repeat_interleave(2, 1) for each in (keys, values))
    weights = (torch.einsum("bhd,thd->bht", q.double(), keys) / 32**0.5).softmax(-1)
    expected = torch.einsum("bht,thd->bhd", weights, values)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_made_up_blocks_are_finite_numbers(name):
    gguf = pytest.importorskip("gguf")
    blocks = kernel_cases.random_blocks(name, 6, 64)
    numbers = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert numbers.shape == (6, 64) and np.isfinite(numbers).all() and numbers.std() > 0.01


FLOORS = limits.Limits(threads=2, read=100.0, copy=50.0, flops=1000.0, macs=4000.0)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ((200, False, 1000, False), (2.0, "memory")),
        ((200, True, 1000, False), (4.0, "memory")),
        ((200, False, 8000, False), (8.0, "arithmetic")),
        ((200, False, 12000, True), (3.0, "arithmetic")),
    ],
)
def test_the_floor_is_the_slower_of_moving_and_computing(work, expected):
    assert FLOORS.floor(*work) == expected


def test_a_row_sets_the_median_beside_the_floor():
    case = kernel_cases.Case(kernel="k", shape="s", nbytes=300, operations=2000, calls=[])
    row = kernels.row(case, [5.0, 4.0, 12.0], FLOORS)
    assert (row["floor"], row["bound"], row["achieved"]) == (3.0, "memory", 3 / 5)
    assert (row["bytes_per_second"], row["operations_per_second"]) == (60.0, 400.0)
    assert row["seconds"] == {"median": 5.0, "min": 4.0, "max": 12.0}


def test_calls_go_round_the_ring():
    made = []
    samples = kernels.timed([lambda: made.append("a"), lambda: made.append("b"), lambda: made.append("c")], 0.0)
    assert len(samples) == kernels.LEAST and made == [*"ab", *"abcab"]


def test_the_limits_program_gives_three_rates(monkeypatch):
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    flops, macs, read = limits.peaks("generic", 1)
    assert min(flops, macs, read) > 1e7


def test_a_limits_program_that_does_not_build_says_what_to_do(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Exception, match="install a C\\+\\+ compiler, or name one in CXX"):
        limits.peaks("generic", 1)


def test_a_busy_machine_is_told(caplog):
    one = limits.Limits(threads=1, read=100.0, copy=60.0, flops=500.0, macs=1000.0)
    kernels.warn_if_busy([one, FLOORS])
    assert [record.args[:2] for record in caplog.records] == [("copy", 2)]


# -- the step ----------------------------------------------------------------------------------------------------------

COST = clocks.Cost(inside=0.001, whole=0.003, native_inside=0.0005, native_whole=0.002)


def test_what_clocks_cost_is_taken_off():
    total = clocks.Total(calls=2, seconds=1.0, native_calls=10, native_seconds=0.8)
    seconds, native_seconds = COST.corrected(total)
    assert seconds == pytest.approx(1.0 - 2 * 0.001 - 10 * 0.002)
    assert native_seconds == pytest.approx(0.8 - 10 * 0.0005)
    both = {"products": total, clocks.NATIVE: clocks.Total(calls=10, seconds=0.8)}
    assert COST.added(both) == pytest.approx(2 * 0.003 + 10 * 0.002)


def test_clocks_keep_results_packing_and_nesting():
    class Op:
        def __call__(self, x, *, more=0):
            return inner(x) + more

        def pack(self, x):
            return ("packed", x)

    made = clocks.Clocks()
    inner = made.around_native(lambda x: x + 1)
    op = made.around("products", Op())
    assert op(3, more=10) == 14 and op.pack(7) == ("packed", 7)
    outer, native_total = made.totals["products"], made.totals[clocks.NATIVE]
    assert (outer.calls, outer.native_calls, native_total.calls) == (1, 1, 1)
    assert outer.seconds >= outer.native_seconds == native_total.seconds > 0


def test_the_parts_of_a_step_are_the_whole_step():
    def step(seconds, products):
        made = clocks.Total(calls=4, seconds=products, native_calls=4, native_seconds=0.4)
        sampling = clocks.Total(calls=1, seconds=0.101)
        totals = {"products": made, "sampling": sampling, clocks.NATIVE: clocks.Total(calls=4, seconds=0.4)}
        return step_split.Step(seconds=seconds, totals=totals)

    found = step_split.split([step(2.0, 0.6)] * 3, COST)
    whole = 2.0 - 5 * 0.003 - 4 * 0.002
    products = 0.6 - 4 * 0.001 - 4 * 0.002
    assert found["clocked_seconds"] == pytest.approx(whole) and found["steps"] == 3
    assert found["parts"]["products"]["seconds"] == pytest.approx(products)
    assert found["parts"]["products"]["glue"] == pytest.approx(products - (0.4 - 4 * 0.0005))
    assert found["parts"]["sampling"]["seconds"] == pytest.approx(0.1)
    rest = found["parts"][step_split.PYTHON]["seconds"]
    assert sum(part["seconds"] for part in found["parts"].values()) == pytest.approx(whole)
    assert found["python"] == pytest.approx((rest + found["parts"]["products"]["glue"]) / whole)


def test_a_real_engines_step_is_split(tmp_path):
    work = Work(input_len=6, output_len=14)
    settings = {"backend": "cpu", "backend_options": {"threads": 1}, "dtype": "float32"}
    (row,) = step_split.step_splits(str(tiny_model(tmp_path)), [2], work, settings)
    # The prompts take a step and give a token each: 13 steps decode, of which the first few do not count.
    assert row["batch_size"] == 2 and row["steps"] == 13 - step_split._WARM_UP
    called = {name: part["calls"] for name, part in row["parts"].items()}
    # 3 layers of 4 products, and the head; a norm before each half of a layer and one at the end, a turn, a gate.
    assert called[step_split.PRODUCTS] == 3 * 4 + 1 and called[step_split.ATTENTION] == 3
    assert called[step_split.OTHERS] == 3 * 2 + 1 + 3 + 3
    assert called[step_split.PLAN] == called[step_split.SAMPLING] == 1
    assert all(part["seconds"] > 0 for part in row["parts"].values()) and 0 < row["python"] < 1


# -- start, tables, command --------------------------------------------------------------------------------------------


def test_the_start_is_split_into_stages(tmp_path):
    options = ["--backend", "cpu", "--backend-option", "threads=1", "--dtype", "float32"]
    stages = startup._run(str(tiny_model(tmp_path)), options)
    whole = stages.pop("to the first token")
    assert sum(stages.values()) == pytest.approx(whole, rel=1e-6)
    assert list(stages) == [
        "interpreter",
        "imports",
        "selecting the backend",
        "opening the file",
        "creating the backend",
        "tokenizer",
        "weights",
        "first step",
        "rest",
    ]
    assert all(seconds > 0 for seconds in stages.values())


@pytest.fixture
def report():
    limit = {"threads": 2, "read": 23e9, "copy": 20e9, "flops": 8e10, "macs": 1.5e11}
    case = kernel_cases.Case(kernel="linear Q4_1", shape="o", nbytes=int(23e6), operations=10**6, calls=[])
    hot = kernel_cases.Case(kernel="rope", shape="1", nbytes=4000, copies=True, cached=True, calls=[])
    held = limits.Limits(**limit)
    part = {"calls": 0, "seconds": 0.002, "glue": 0.001}
    spread = {"median": 0.5, "min": 0.4, "max": 0.75}
    step = {"batch_size": 8, "seconds": 0.009, "clocked_seconds": 0.008, "python": 0.25, "steps": 5}
    facts = {"date": "2026-01-31", "processor": "P 1", "isa": "avx2", "memory": 2**33, "system": "Linux"}
    return {
        "machine": {**facts, "torch": "2.13.0", "pagedkv": "0.1.0", "commit": "abc"},
        "model": "demo",
        "limits": [limit],
        "kernels": [kernels.row(case, [0.002], held), kernels.row(hot, [0.000004], held)],
        "steps": [{**step, "parts": {"products": part, "sampling": part}}],
        "start": {"imports": spread},
    }


def test_the_tables_of_an_earlier_run_as_markdown(report, tmp_path):
    path = tmp_path / "k.json"
    path.write_text(json.dumps(report))
    text = CliRunner().invoke(kernels.main, ["--read", str(path), "--markdown"]).output
    assert "Measured on 2026-01-31: P 1, avx2, 8 GiB, Linux, torch 2.13.0, pagedkv 0.1.0 (abc)." in text
    assert "| 2 | 23.0 | 20.0 | 80.0 | 150.0 |" in text and "maddubs" in text
    assert "| linear Q4_1 | o | 23 | 0.001 | 2 ms | 11.5 | 0.5 | 1 ms | 50% | memory |" in text
    assert "| rope | 1 | 0.004 | - | 4 us | 1.0 | - | 0.2 us | 5% | cached |" in text
    assert (
        "A decode step of 8: 9 ms without clocks, 8 ms with their cost subtracted; Python, glue included, 25%" in text
    )
    assert "| products | - | 2 ms | 25% | 1 ms |" in text and "| imports | 500 ms | 400 ms..750 ms |" in text
    for each in kernels.tables(report):
        assert {len(each.columns)} == {len(row) for row in each.rows}


def test_parts_are_chosen_by_the_beginning_of_their_names():
    assert kernels.chosen("linear Q4_1", ["linear", "step"]) and not kernels.chosen("append", ["linear", "step"])
    assert kernels.chosen("append", [])


def test_a_part_that_does_not_exist_names_those_that_do():
    result = CliRunner().invoke(kernels.main, ["--only", "linaer", "--threads", "1"])
    assert result.exit_code == 2 and "no such part; there are limits, linear Q4_1, " in result.output
