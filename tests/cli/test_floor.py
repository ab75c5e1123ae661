"""The floor of a decode step: bytes counted by hand, over a bandwidth that is given."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pagedkv.api import GroupSpec, LayerSpec
from pagedkv.cli import main as cli
from pagedkv.cli.floor import Floor
from pagedkv.planning import rates
from pagedkv.planning.cost import read_bytes
from tests.helpers.tiny_models import tiny_model


def layer(index, **fields):
    return LayerSpec.of(index=index, q_heads=8, kv_heads=2, k_dim=16, v_dim=24, scale=0.25, **fields)


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 2), ("fp32", 4)])
def test_a_query_reads_the_keys_and_values_that_it_sees(dtype, width):
    group = GroupSpec(layers=(layer(0), layer(1, window=10), layer(2, kv_of=0)), block_size=16, kv_dtype=dtype)
    assert read_bytes(group, 100) == width * 2 * (16 + 24) * (100 + 10 + 100)
    assert read_bytes(group, 5) == width * 2 * (16 + 24) * (5 + 5 + 5)


@pytest.mark.parametrize(("kv_dtype", "head"), [("int8/token_head", 16 + 24 + 8), ("fp8_e4m3fn/tensor", 16 + 24)])
def test_a_quantized_cache_reads_a_byte_a_number_and_its_scales(kv_dtype, head):
    group = GroupSpec(layers=(layer(0), layer(1, window=10)), block_size=16, kv_dtype=kv_dtype)
    assert read_bytes(group, 100) == (100 + 10) * 2 * head


def test_the_share_achieved_is_the_floor_over_what_was_measured():
    least = Floor(weights=600, cache=200, bandwidth=1000.0)
    assert least.seconds == 0.8
    assert least.figures(3.2)["achieved"] == 0.25
    assert least.figures(None)["achieved"] is None


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(rates, "ARRAY_BYTES", 1 << 20)
    arguments = ["bench", str(tiny_model(tmp_path)), "--floor", "--batch-sizes", "1,3", "--input-len", "20"]
    arguments += ["--output-len", "12", "--repeats", "1", "--dtype", "float32", "--backend", "cpu"]
    return lambda *more: CliRunner().invoke(cli.pagedkv, [*arguments, "--backend-option", "threads=1", *more])


def test_rows_hold_the_floor_of_their_batch(run):
    result = run("--json")
    assert result.exit_code == 0, result.output
    one, three = (json.loads(line)["floor"] for line in result.stdout.splitlines())
    # 3 layers, keys and values, 2 heads of 12, float32, 20 + 6 tokens.
    assert (one["cache_bytes"], three["cache_bytes"]) == (3 * 2 * 2 * 12 * 4 * 26, 3 * 3 * 2 * 2 * 12 * 4 * 26)
    # Per layer q, k, v, o of 48 x 48 and half of it, three of 80 x 48 and two norms; the last norm, the head; not the
    # table.
    numbers = 3 * (48 * 48 * 2 + 24 * 48 * 2 + 3 * 80 * 48 + 2 * 48) + 48 + 320 * 48
    assert one["weight_bytes"] == three["weight_bytes"] == 4 * numbers
    assert one["seconds"] == pytest.approx((one["weight_bytes"] + one["cache_bytes"]) / one["read_bandwidth"])
    assert 0 < one["achieved"] < 100
    assert "memory is read at" in result.stderr


def test_the_table_shows_floor_and_share(run):
    header, *lines = run("-q").stdout.splitlines()
    assert "floor" in header and all("% of p50)" in line for line in lines) and len(lines) == 2
