"""`pagedkv bench`: rows whose figures agree with each other and with what can be counted by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from pagedkv.cli import main as cli
from pagedkv.cli.standard_work import Bench, Work, bench_settings, spread
from tests.helpers.tiny_models import VOCAB_SIZE, hf_greedy, tiny_model

ONE_THREAD = ("--backend", "cpu", "--backend-option", "threads=1", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def run(model, monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.delenv("PAGEDKV_LOG_LEVEL", raising=False)
    return lambda *arguments, at=None: CliRunner().invoke(
        cli.pagedkv, ["bench", at or str(model), *arguments, *ONE_THREAD]
    )


SMALL = ("--batch-sizes", "1,3", "--input-len", "20", "--output_len", "13", "--repeats", "2", "--block-size", "4")


def test_json_rows_count_what_was_asked_for(run, model, tmp_path):
    path = tmp_path / "figures.jsonl"
    result = run(*SMALL, "--json", "--output", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_text() == result.stdout
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["batch_size"] for row in rows] == [1, 3]
    for row in rows:
        assert (row["repeats"], len(row["runs"]), row["preemptions"]) == (2, 2, 0)
        assert row["peak_running"] == row["batch_size"]
        # 20 + 13 tokens, the last of which is never stored: 32 of them fill 8 blocks of 4.
        assert row["cache"]["peak_blocks"] == 8 * row["batch_size"] < row["cache"]["pool_blocks"]
        # 3 layers, keys and values, 2 heads of 12, 4 bytes each, 4 tokens a block; the pool may pad it.
        assert row["cache"]["peak_bytes"] >= row["cache"]["peak_blocks"] * 3 * 2 * 2 * 12 * 4 * 4
        for figures in row["runs"]:
            assert figures["output_tokens"] == 13 * row["batch_size"]
            assert figures["tokens_per_second"] == pytest.approx(figures["output_tokens"] / figures["seconds"])
            assert 0 < figures["time_to_first_token"] < figures["seconds"]
            assert 0 < figures["time_between_tokens_p50"] <= figures["time_between_tokens_p99"] < figures["seconds"]
        speeds = [figures["tokens_per_second"] for figures in row["runs"]]
        told = row["tokens_per_second"]
        assert (told["min"], told["median"], told["max"]) == (min(speeds), pytest.approx(sum(speeds) / 2), max(speeds))


def test_rows_and_standard_error_name_the_machine(run, model):
    result = run("--batch-sizes", "1", "--input-len", "4", "--output-len", "1", "--repeats", "1", "--json")
    row = json.loads(result.stdout)
    machine = row["machine"]
    expected = {"model": str(model), "backend": "cpu", "dtype": "fp32", "threads": 1, "prefix_caching": False}
    assert {name: machine[name] for name in expected} == expected
    assert machine["cores"] >= 1 and machine["processor"] and machine["torch"]
    assert result.stderr.count(f"processor {machine['processor']}") == 1
    assert row["time_between_tokens_p50"] is None, "one token has no time between tokens"


def test_the_table_has_a_line_for_each_size(run):
    result = run("--batch-sizes", "2,1", "--input-len", "4", "--output-len", "2", "--repeats", "1", "-q")
    header, *lines = result.stdout.splitlines()
    assert header.split()[:2] == ["requests", "tokens/s"]
    assert [line.split()[0] for line in lines] == ["2", "1"] and all(" ms " in line for line in lines)


def test_the_measured_tokens_are_the_models_own(model):
    work = Work(input_len=6, output_len=5, seed=4)
    settings = {"backend": "cpu", "backend_options": {"threads": 1}, "dtype": "float32"}
    with Bench(str(model), work, 2, settings) as bench:
        measured = bench.run(2, 1)
    given = work.prompts(VOCAB_SIZE, 2, 1)
    assert measured.tokens == [hf_greedy(model, prompt, 5) for prompt in given]
    assert len(measured.first) == 2 and len(measured.gaps) == 2 * 4
    # Both requests end in the last step, so a request's first token and its gaps add up to the whole run.
    assert measured.first[0] + sum(measured.gaps[:4]) == pytest.approx(measured.seconds)


def test_prompts_depend_on_seed_run_and_batch_alone():
    work = Work(input_len=8, output_len=1, seed=1)
    assert work.prompts(1000, 3, 2) == Work(input_len=8, output_len=9, seed=1).prompts(1000, 3, 2)
    others = [Work(input_len=8, output_len=1, seed=2).prompts(1000, 3, 2), work.prompts(1000, 3, 1)]
    assert all(other != work.prompts(1000, 3, 2) for other in others)
    assert np.array(work.prompts(5, 30, 1)).shape == (30, 8) and np.max(work.prompts(5, 30, 1)) == 4


def test_a_cache_that_is_too_small_is_said(run):
    # 9 usable blocks of 4 hold one request of 32 stored tokens, not two.
    result = run(*SMALL, "--num-blocks", "10", "--json", "-q")
    assert result.exit_code == 0
    assert "of 3 requests ran at the same time" in result.stderr
    assert json.loads(result.stdout.splitlines()[1])["cache"]["peak_blocks"] <= 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-sizes", "1,x"), "'1,x': give whole numbers of at least 1"),
        (("--batch-sizes", "0"), "'0': give whole numbers of at least 1"),
        (("--batch-sizes", ""), "give whole numbers"),
        (("--input-len", "0"), "--input-len"),
        (("--repeats", "0"), "--repeats"),
        (("--input-len", "200", "--output-len", "57"), "model's own limit of 256 positions"),
        (("--input-len", "30", "--max-model-len", "40"), "--input-len 30 + --output-len 128 are 158 tokens"),
        (("--batch-sizes", "8", "--max-num-seqs", "4"), "--max-num-seqs 4 is below the largest batch size, 8"),
        (("--output", "/no/such/folder/file"), "there is no folder /no/such/folder"),
    ],
)
def test_sizes_are_checked_first(run, monkeypatch, arguments, message):
    from pagedkv.models.native import NativeDecoder

    def load(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(NativeDecoder, "load", load)
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_sizes_that_were_given_are_kept_and_the_rest_fits_the_work():
    work = Work(input_len=10, output_len=6)
    assert bench_settings(work, 4, {})["max_model_len"] == 16
    given = {"max_model_len": 99, "max_num_seqs": 5, "enable_prefix_caching": True}
    assert bench_settings(work, 4, given) == given
    assert bench_settings(work, 30, {"max_num_batched_tokens": 32})["max_num_seqs"] == 32


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0, 1.0, 2.0], {"median": 2.0, "min": 1.0, "max": 3.0}), ([None], None), ([], None)],
)
def test_spread(values, expected):
    assert spread(values) == expected
