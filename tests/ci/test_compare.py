"""The comparison with other engines: protocol, interleaving, ratios and tables, on engines that are made up."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import compare
import engines
import gguf
import models
import numpy as np
import pytest
import table
from click.testing import CliRunner
from engines import Child, Engine, NotMeasured
from plot import draw
from protocol import Clock, cache_bytes, timed
from rounds import Rounds, agreement, speed_ratio
from safetensors.numpy import load_file

from pagedkv.cli.standard_work import Work
from pagedkv.models.checkpoint import open_checkpoint
from tests.helpers.gguf_files import byte_vocabulary

FAKE = Path(__file__).resolve().parents[1] / "helpers" / "fake_peer.py"


def command(kind):
    given = {"dtype": kind, "threads": 1, "limits": {}}
    return [sys.executable, str(FAKE), json.dumps(given)]


def child(kind, tmp_path):
    return Child(kind, command(kind), 1, [5], tmp_path / f"{kind}.log")


class Ticks:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_figures_follow_from_the_moments_of_the_tokens():
    ticks = Ticks()
    clock = Clock(2, ticks)
    for moment, requests in ((101.0, [0]), (103.0, [0, 1]), (104.0, [1]), (108.0, [0, 1])):
        ticks.now = moment
        for request in requests:
            clock.token(request)
    ticks.now = 110.0
    # Request 0: 1, 3, 8. Request 1: 3, 4, 8. First tokens 1 and 3; gaps 2, 5, 1, 4.
    assert clock.figures() == {
        "seconds": 10.0,
        "output_tokens": 6,
        "tokens_per_second": 0.6,
        "time_to_first_token": 2.0,
        "time_between_tokens_p50": 3.0,
    }


def test_one_token_has_no_time_between_tokens():
    clock = Clock(1)
    clock.tokens()
    assert clock.figures()["time_between_tokens_p50"] is None


@pytest.mark.parametrize("told", [2, 4])
def test_another_number_of_tokens_or_stamps_ends_the_engine(told):
    def generate(prompts, count, clock):
        for _ in range(told):
            clock.tokens()
        return [[0] * count for _ in prompts]

    with pytest.raises(SystemExit, match=rf"\[{told}\] tokens came instead of 3"):
        timed(generate)([[1]], 3)


def test_a_cache_holds_every_request_at_its_longest():
    given = {"limits": {"requests": 8, "tokens": 100, "cache_numbers": 30}}
    assert cache_bytes(given, 2) >= 8 * 100 * 30 * 2


def test_an_engine_answers_in_a_process_of_its_own(tmp_path):
    with child("steady", tmp_path) as engine:
        answer = engine.run([[3], [7]], 3)
    assert answer["tokens"] == [[3, 4, 5], [7, 8, 9]] and answer["output_tokens"] == 6
    assert engine.facts["version"] == "7" and engine.facts["threads"] == 1
    assert 0 <= engine.facts["load_seconds"] < engine.facts["first_token_seconds"]
    assert (tmp_path / "steady.log").read_text() == "a library prints this\n"


@pytest.mark.parametrize(
    ("kind", "why"),
    [("absent", "absent ended with code 1: its library is not here"), ("short", "tokens came instead of 1")],
)
def test_an_engine_that_does_not_start_says_why(kind, why, tmp_path):
    with pytest.raises(NotMeasured, match=why):
        child(kind, tmp_path)


def test_an_engine_that_does_not_answer_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "LOAD_SECONDS", 0.2)
    with pytest.raises(NotMeasured, match="slow gave no answer within 0 s"):
        Child("slow", [sys.executable, "-c", "import time; time.sleep(60)"], 1, [5], tmp_path / "log")


def test_a_signal_is_named(tmp_path):
    with pytest.raises(NotMeasured, match="ill was ended by SIGILL: it said nothing"):
        Child("ill", [sys.executable, "-c", "import os; os.kill(os.getpid(), 4)"], 1, [5], tmp_path / "log")


@pytest.mark.parametrize(
    ("name", "message"), [("vlm", "'vlm' is no engine"), ("openvino:float32", "openvino takes no dtype")]
)
def test_wrong_engine_names_are_refused(name, message):
    result = CliRunner().invoke(compare.main, ["demo", "--peers", name])
    assert result.exit_code == 2 and message in result.output


def test_an_input_beyond_the_model_names_the_longest(tmp_path):
    result = CliRunner().invoke(compare.main, ["demo", "--input-len", "8192", "--output", str(tmp_path / "o.json")])
    assert result.exit_code == 2 and "the longest input is 8064" in result.output


def test_a_peer_without_environment_or_without_a_file_it_reads_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "ROOT", tmp_path)
    folder = models.Model(name="m", path=tmp_path, is_gguf=False, vocab_size=9, max_tokens=9, cache_numbers=9)
    with pytest.raises(NotMeasured, match=r"make one: bash ci/bench/peers/setup.sh vllm"):
        Engine.of("vllm").given(folder, 1, {})
    python = Engine.of("openvino").python
    python.parent.mkdir(parents=True)
    python.touch()
    with pytest.raises(NotMeasured, match="openvino reads GGUF files, and m is a folder"):
        Engine.of("openvino").given(folder, 1, {})
    assert Engine.of("transformers:bfloat16").given(folder, 1, {})["folder"] == str(tmp_path)


class Fake:
    """An engine of fixed speeds, one after the other, that writes down who was asked what."""

    def __init__(self, name, speeds, log, shift=0, fails=False):
        self.name, self._speeds, self._log, self._shift, self._fails = name, list(speeds), log, shift, fails

    def run(self, prompts, output_len):
        if self._fails:
            raise NotMeasured("it broke")
        self._log.append((self.name, prompts, output_len))
        tokens = [[prompt[0]] * (output_len - self._shift) + [-1] * self._shift for prompt in prompts]
        speed = self._speeds.pop(0) if output_len > 4 else 1.0
        spent = 1 / speed
        return {
            "tokens_per_second": speed,
            "time_to_first_token": spent,
            "time_between_tokens_p50": spent,
            "tokens": tokens,
        }


def rounds_of(*fakes, sizes=((6, 2),), output_len=8):
    measured = Rounds(fakes, sizes, output_len, vocab=50, seed=3)
    measured.warm_up()
    measured.measure(3, until=float("inf"))
    return measured


def test_rounds_are_interleaved_and_all_engines_answer_the_same_prompts():
    log = []
    sizes = ((6, 2), (6, 1))
    rounds_of(*(Fake(name, [1.0] * 6, log) for name in "abc"), sizes=sizes)
    warm, runs = log[:6], log[6:]
    assert [(name, count) for name, _, count in warm] == [(name, 4) for name in "aabbcc"]
    turns = [runs[at : at + 3] for at in range(0, 18, 3)]
    assert all(sorted(name for name, *_ in turn) == ["a", "b", "c"] for turn in turns)
    assert all(first[0][0] != second[0][0] for first, second in pairwise(turns)), "another one begins each time"
    work = Work(input_len=6, output_len=8, seed=3)
    for number, turn in enumerate(turns):
        expected = work.prompts(50, sizes[number % 2][1], number // 2 + 1)
        assert all((prompts, count) == (expected, 8) for _, prompts, count in turn)


def test_ratios_are_taken_within_a_round():
    measured = rounds_of(
        Fake("pagedkv", [30.0, 60.0, 10.0], []),
        Fake("slow", [10.0, 30.0, 10.0], [], shift=2),
        Fake("quick", [15.0, 24.0, 20.0], []),
    )
    row = measured.row((6, 2))
    # 3, 2, 1 and 2, 2.5, 0.5.
    assert row["ratio"] == {"slow": 2.0, "quick": 2.0}
    assert row["tokens_per_second"]["pagedkv"] == {"median": 30.0, "min": 10.0, "max": 60.0}
    assert row["time_to_first_token"]["quick"]["median"] == pytest.approx(1 / 20)
    assert row["equal"] == {"slow": 6 / 8, "quick": 1.0}
    assert measured.done == 3 and "tokens" not in row["runs"]["slow"][0]


def test_the_best_peer_has_the_lowest_ratio():
    row = rounds_of(*(Fake(name, [speed] * 3, []) for name, speed in (("us", 9.0), ("a", 3.0), ("b", 6.0)))).row((6, 2))
    assert (row["best_peer"], row["ratio"]["b"]) == ("b", 1.5)


def test_shares_and_ratios_by_hand():
    ours = [{"tokens": [[1, 2, 3, 4], [1, 1, 1, 1]], "tokens_per_second": 8.0}]
    theirs = [{"tokens": [[1, 2, 9, 4], [1, 1, 1, 1]], "tokens_per_second": 5.0}]
    assert agreement(ours, theirs) == 6 / 8
    assert speed_ratio(ours, theirs) == 1.6


def test_a_peer_that_fails_leaves_and_is_named(caplog):
    measured = rounds_of(Fake("us", [2.0] * 3, []), Fake("broken", [], [], fails=True), Fake("b", [1.0] * 3, []))
    assert measured.names == ["us", "b"] and measured.failed == {"broken": "it broke"}
    assert measured.row((6, 2))["ratio"] == {"b": 2.0}
    assert "broken: not measured here: it broke" in caplog.text


def test_our_own_failure_ends_the_comparison():
    with pytest.raises(NotMeasured, match="it broke"):
        rounds_of(Fake("us", [], [], fails=True), Fake("b", [1.0] * 3, []))


def test_no_round_begins_after_the_time_limit(caplog):
    measured = Rounds([Fake("us", [1.0] * 9, [])], [(6, 2)], 8, vocab=50, seed=3)
    measured.measure(3, until=10.0, now=lambda: 11.0)
    assert measured.done == 1 and "stopped after 1 of 3 rounds" in caplog.text


@pytest.fixture
def report():
    sizes = ((6, 1), (6, 2))
    measured = rounds_of(Fake("pagedkv", [30.0] * 6, []), Fake("vllm", [20.0] * 6, [], shift=4), sizes=sizes)
    facts = {name: {"load_seconds": 1.25, "first_token_seconds": 2.5, "dtype": "float32"} for name in measured.names}
    machine = {
        "date": "2026-01-31",
        "processor": "P 1",
        "memory": 2**33,
        "system": "Linux",
        "torch": "2.13.0",
        "pagedkv": "0.1.0",
        "commit": "abc",
    }
    work = {"output_len": 8, "rounds": measured.done}
    rest = compare._rows(measured, sizes, facts, {"openvino": "there is no environment"})
    return {"machine": machine, "model": "demo", "threads": 2, "work": work, **rest}


def test_the_tables_as_markdown(report, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(report))
    text = CliRunner().invoke(table.main, [str(path)]).output
    assert "Measured on 2026-01-31: P 1, 2 threads, 8 GiB, Linux" in text and "3 interleaved rounds" in text
    assert "| 6 | 2 | 30.0 (30.0..30.0) | 20.0 (20.0..20.0), 1.50x | **1.50x** vllm |" in text
    assert "| 6 | 1 | 33.3 / 33.3 | 50.0 / 50.0 |" in text
    assert "| vllm | 0.1.0 | float32, None | 1.2 | 2.5 | 50% to 50% |" in text
    assert "| openvino | not measured here: there is no environment |" in text
    for each in table.tables(report):
        assert {len(each.columns)} == {len(row) for row in each.rows}


def test_the_picture_is_a_png(report, tmp_path):
    pytest.importorskip("matplotlib")
    draw(report, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


TINY = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 16,
    "vocab_size": 288,
}


def tiny_words():
    keys = byte_vocabulary(TINY["vocab_size"])
    return models.Vocabulary(
        pre="gpt-2",
        tokens=keys["tokenizer.ggml.tokens"],
        types=keys["tokenizer.ggml.token_type"],
        merges=keys["tokenizer.ggml.merges"],
        end=262,
    )


@pytest.mark.parametrize("weights", ["Q4_0", "Q8_0"])
def test_a_made_up_model_is_whole_and_its_weights_are_spread_as_told(weights, tmp_path):
    path = tmp_path / "random.gguf"
    models.write_random(path, TINY, weights, tiny_words())
    checkpoint = open_checkpoint(str(path))  # refuses a file in which a tensor is missing or misshapen
    assert checkpoint.quantization == weights and len(checkpoint.tokenizer().encode("hello")) >= 1
    checkpoint.close()
    reader = gguf.GGUFReader(path)
    assert gguf.LlamaFileType(reader.get_field("general.file_type").contents()).name == f"MOSTLY_{weights}"
    matrices = [t for t in reader.tensors if len(t.shape) == 2]
    assert len(matrices) == 1 + 2 * 7 and {t.tensor_type.name for t in matrices} == {weights}
    values = np.concatenate([gguf.quants.dequantize(t.data, t.tensor_type).ravel() for t in matrices])
    assert values.std() == pytest.approx(models.SCALE, rel=0.02)


def test_the_folder_holds_the_files_weights_and_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "STORE", tmp_path / "store")
    path = tmp_path / "random.gguf"
    models.write_random(path, TINY, "Q4_0", tiny_words())
    found = models.find(str(path))
    # 2 layers, keys and values of 2 heads of 16.
    assert (found.vocab_size, found.max_tokens, found.cache_numbers) == (288, 64, 2 * 2 * 2 * 16)
    folder = found.folder_in("float32")
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_down.weight")
    tensors = load_file(folder / "model.safetensors")
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
    assert np.array_equal(tensors["model.layers.1.mlp.down_proj.weight"], expected)
    assert len(tensors) == 1 + 1 + 2 * (7 + 2), "the head is the table"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert found.folder_in("float32") == folder and (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]


def test_a_made_up_model_has_known_types_only():
    with pytest.raises(Exception, match="llama-1b-random:Q5_0 is not known; the weights are Q4_0 or Q8_0"):
        models.find("llama-1b-random:Q5_0")


def test_the_demo_models_words_are_filled_up():
    words = models.demo_vocabulary(49_155)
    assert len(words.tokens) == len(words.types) == len(set(words.tokens)) == 49_155
    assert words.types[-3:] == [5, 5, 5] and words.merges[0].count(" ") == 1
