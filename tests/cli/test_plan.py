"""`pagedkv plan`: what is shown, what the JSON holds, and errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pagedkv.cli import main as cli
from pagedkv.cli import plan_measure
from pagedkv.planning import rates
from tests.helpers.planning_rig import LLAMA_2_7B, TINY, write_config
from tests.helpers.tiny_models import tiny_model

HERE = ("--backend", "cpu", "--backend-option", "threads=1")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.delenv("PAGEDKV_LOG_LEVEL", raising=False)
    monkeypatch.setattr(rates, "QUICK_BYTES", 1 << 16)
    monkeypatch.setattr(rates, "SIDE", 16)

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(cli.pagedkv, ["plan", *map(str, arguments)])

    return invoke


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("llama") / "Llama-2-7b", **LLAMA_2_7B)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("tiny"), **TINY)


def test_the_table_answers_the_questions_in_order(run, llama) -> None:
    result = run(llama, "--device", "rtx-4090", "--max-model-len", 4096, "--max-num-seqs", 4, "-q")
    assert result.exit_code == 0, result.output
    names = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
    assert names[:4] == ["device", "memory", "figures", "weights"]
    text = " ".join(result.stdout.split())
    assert "weights 12.6 GiB in fp16" in text
    assert "512.0 KiB a token, 8.0 MiB a block of 16, in fp16, by formula: 2 x KV heads" in text
    assert "NVIDIA GeForce RTX 4090, not this machine's; backend cuda" in text
    assert "fits in turns: 4 sequences of 4096 tokens at once would take 21.0 GiB of 20.6 GiB" in text
    assert "for 4 sequences of 4096 tokens at once, one of - max_model_len=" in text
    assert "decode, 1 at 1024 tokens" in text and "prefill of 1024 tokens" in text
    assert "from 1008 GB/s and 165 TFLOP/s (NVIDIA Ada GPU architecture whitepaper: RTX 4090)" in text
    assert "docs/performance.md" in text
    assert "random" not in result.output, "nothing of weights that are never made"


def test_a_note_of_the_device_is_in_the_table_and_in_the_json(run, llama) -> None:
    result = run(llama, "--device", "ascend-910b3", "--json", "-q")
    assert any("128 is the fast block size" in note for note in json.loads(result.stdout)["notes"])
    lines = run(llama, "--device", "ascend-910b3", "-q").stdout.splitlines()
    assert any(line.split()[:2] == ["note", "128"] for line in lines)
    assert not any(line.startswith("note") for line in run(llama, "--device", "rtx-4090", "-q").stdout.splitlines())


KEYS = {
    "": "pagedkv model verdict refusal device settings bytes blocks sized_by longest sequences advice speed notes "
    "measured",
    "device": "name title here backend total free unified source",
    "settings": "dtype kv_cache_dtype block_size max_model_len max_num_seqs max_num_batched_tokens "
    "gpu_memory_utilization tensor_parallel_size",
    "bytes": "weights weights_note workspace per_token per_block fixed cost_known cache total least needed ceiling",
    "speed": "bandwidth peak source assumed context decode prefill",
}


def test_the_names_in_the_json_stay(run, llama) -> None:
    result = run(llama, "--device", "h200", "--json", "-q")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    for part, names in KEYS.items():
        assert set(record[part] if part else record) == set(names.split()), part
    assert record["bytes"]["per_token"] == 512 << 10
    assert [one["length"] for one in record["sequences"]] == [512, 2048, 4096]
    assert [one["sequences"] for one in record["speed"]["decode"]] == [1, 8, 32]
    assert set(record["advice"][0]) == {"setting", "value", "effect", "sequences"}
    assert (record["measured"], record["refusal"]) == (None, None)


def test_what_does_not_fit_ends_with_1_and_three_ways_out(run, llama) -> None:
    """U113."""
    result = run(llama, "--device", "jetson-orin-nano-8gb", "-q")
    assert result.exit_code == 1
    text = " ".join(result.stdout.split())
    assert "does not fit: before the first sequence 13.0 GiB of" in text
    assert all(f"- {setting}" in text for setting in ("max_model_len", "max_num_seqs", "kv_cache_dtype", "weights"))
    assert "a model of at most" in text
    assert "-" not in [word[0] for word in text.split() if word[-3:] == "GiB"], "no negative size"


def test_ranks_are_planned_and_labelled(run, llama) -> None:
    result = run(llama, "--device", "a10", "--tensor-parallel-size", 2, "--json", "-q")
    record = json.loads(result.stdout)
    assert record["bytes"]["per_token"] == 256 << 10
    assert record["settings"]["tensor_parallel_size"] == 2
    assert any("not built yet" in note for note in record["notes"])
    assert "not built yet" in result.stderr
    assert "2, of which this is one: tensor parallel execution is not built" in " ".join(
        run(llama, "--device", "a10", "--tensor-parallel-size", 2, "-q").stdout.split()
    )


def test_plain_memory_and_old_spellings(run, tiny) -> None:
    result = run("--model", tiny, "--memory", "24GiB", "--max_num_seqs", 2, *HERE, "--json", "-q")
    record = json.loads(result.stdout)
    assert (record["device"]["total"], record["verdict"], record["advice"]) == (24 << 30, "fits", [])
    assert record["blocks"] == 2 * 256 // 16 + 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "rtx-4091"), "did you mean rtx-4090"),
        (("--memory", "24 gigs"), "--memory"),
        (("--tensor-parallel-size", "3"), "does not divide"),
        (("--kv-cache-dtype", "int3"), "kv_cache_dtype"),
        (("--device", "h100", "--measure"), "--measure runs the model here"),
        (("--memory", "1GiB", "--measure"), "leave out --device, --memory"),
        (("--backend", "cpux"), "cpu"),
    ],
)
def test_what_is_wrong_is_told_with_the_way_out(run, tiny, arguments, words: str) -> None:
    result = run(tiny, *arguments, "-q")
    assert result.exit_code == 2
    assert words in result.stderr and "Traceback" not in result.output


def test_a_model_that_is_not_there(run, tmp_path) -> None:
    result = run(tmp_path / "nothing", "-q", *HERE)
    assert result.exit_code == 1 and "Check the path" in result.stderr


@pytest.mark.parametrize("device", ["rtx-3060", "orin-nano"])
def test_a_picture_is_drawn(run, llama, tmp_path, device: str) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    path = tmp_path / "memory.png"
    result = run(llama, "--device", device, "--plot", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"written to {path}" in result.stderr


def test_pictures_that_cannot_be_drawn(run, llama, tmp_path, monkeypatch) -> None:
    result = run(llama, "--device", "a10", "--plot", tmp_path / "nowhere" / "x.png")
    assert result.exit_code == 2 and "make it first" in result.stderr
    result = run(llama, "--device", "a10", "--plot", tmp_path / "x.abc", "-q")
    assert result.exit_code == 2 and "cannot be written" in result.stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(llama, "--device", "a10", "--plot", tmp_path / "x.png", "-q")
    assert result.exit_code == 2 and "pip install matplotlib" in result.stderr


def test_measured_beside_predicted(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(plan_measure, "INPUT_LEN", 12)
    monkeypatch.setattr(plan_measure, "OUTPUT_LEN", 4)
    model = tiny_model(tmp_path)
    result = run(model, *HERE, "--dtype", "float32", "--measure", "--json", "-q")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["measured"]
    assert [row["sequences"] for row in rows] == [1, 8, 32]
    for one in (row[kind] for row in rows for kind in ("decode", "prefill")):
        assert 0 < one["low"] < one["high"] and one["measured"] > 0
        assert one["error"] == pytest.approx(one["measured"] / (one["low"] * one["high"]) ** 0.5 - 1)
        assert one["inside"] == (one["low"] <= one["measured"] <= one["high"])
    shown = run(model, *HERE, "--dtype", "float32", "--measure", "-q").stdout
    assert "predicted" in shown and "off the middle" in shown and "%" in shown


def test_help_has_examples_and_loads_no_torch() -> None:
    code = (
        "import sys; from pagedkv.cli.main import pagedkv; pagedkv(['plan', '--help'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pagedkv plan demo --measure" in done.stdout and "--device NAME" in done.stdout
