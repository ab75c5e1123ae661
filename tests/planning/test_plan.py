"""Whole plans: equal to what the engine then allocates, and an answer or a typed error whatever memory says."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedkv.api import MemoryInfo
from pagedkv.config import EngineConfig
from pagedkv.engine.setup import build
from pagedkv.errors import BackendError, BackendNotFound, ConfigError, ModelError, UnsupportedError
from pagedkv.planning import target
from pagedkv.planning.plan import FITS, NOTHING, SHARED, SHORT, Plan, as_record, planned
from pagedkv.planning.speed import work_of
from pagedkv_cpu import host
from tests.helpers.gguf_files import quantized_file
from tests.helpers.planning_rig import GIB, LLAMA_2_7B, TINY, write_config

SETTINGS: dict[str, Any] = {"backend": "cpu", "backend_options": {"threads": 1}}
ELSEWHERE: dict[str, Any] = {"backend": None, "backend_options": {}}
MIB = 1 << 20

SHAPES: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 1},
    {"num_hidden_layers": 5, "tie_word_embeddings": True},
    {"num_attention_heads": 4, "num_key_value_heads": 4},
    {"num_attention_heads": 4, "num_key_value_heads": 1},
    {"head_dim": 20},
    {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 3},
    {"hidden_size": 64, "intermediate_size": 33},
    {"vocab_size": 1000},
    {"attention_bias": True, "mlp_bias": True},
    {"torch_dtype": "bfloat16"},
    {"torch_dtype": "float16", "tie_word_embeddings": True},
    {"model_type": "mistral", "sliding_window": 5},
    {"model_type": "qwen2", "tie_word_embeddings": True},
    {"model_type": "qwen3", "head_dim": 16},
    {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
    {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    {"max_position_embeddings": 1000},
    {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2},
    {"vocab_size": 77, "intermediate_size": 5},
]
ASKED: list[dict[str, Any]] = [
    {},
    {"max_model_len": 100, "max_num_seqs": 3},
    {"block_size": 7, "max_num_seqs": 5},
    {"kv_cache_memory": "1MiB"},
    {"num_blocks": 33, "block_size": 32},
    {"gpu_memory_utilization": 0.6},
    {"kv_cache_dtype": "bfloat16", "max_num_seqs": 2},
]


@contextlib.contextmanager
def plan_for(folder: Path, **settings: Any) -> Iterator[Plan]:
    named = {name: settings.pop(name) for name in ("device", "memory", "ranks") if name in settings}
    with planned(EngineConfig.of(model=str(folder), **SETTINGS | settings), speed=False, **named) as plan:
        yield plan


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 64 MiB whose memory nobody else touches: what limits most of the plans below."""
    monkeypatch.setattr(host, "memory", lambda: host.Memory(total=64 * MIB, available=60 * MIB, source="a test"))


@pytest.mark.parametrize("backend", ["cpu", "null"])
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_the_plan_is_what_the_engine_allocates(tmp_path: Path, steady: None, backend: str, number: int) -> None:
    folder = write_config(tmp_path / "model", **TINY | SHAPES[number])
    settings = {"backend": backend, "max_num_seqs": 60, "max_num_batched_tokens": 64, **ASKED[number % len(ASKED)]}
    settings |= {"backend_options": SETTINGS["backend_options"] if backend == "cpu" else {}}
    with plan_for(folder, **settings) as plan:
        pass
    config = EngineConfig.of(model=str(folder), load_format="dummy", skip_tokenizer_init=True, **SETTINGS | settings)
    parts = build(config)
    try:
        assert plan.memory is not None
        assert plan.memory.num_blocks == parts.memory.num_blocks == parts.runner.pool.num_blocks
        assert plan.memory == parts.memory
        assert plan.fit.agreed.choice == parts.choice
        assert parts.runner.model.nbytes <= plan.fit.agreed.weights.nbytes
    finally:
        parts.runner.close()


@pytest.mark.parametrize("asked", [{}, {"quantization": "none"}, {"dtype": "float32", "quantization": "gguf"}])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_files_weights_are_counted_as_the_engine_holds_them(tmp_path: Path, steady: None, asked, tied) -> None:
    file = quantized_file(tmp_path / "a.gguf", {"": "Q4_0", "attn_v": "Q8_0", "ffn_down": "F16"}, tied=tied)
    settings = {**SETTINGS, "max_num_seqs": 60, "max_num_batched_tokens": 64, **asked}
    with plan_for(file, **settings) as plan:
        read = work_of(plan.fit.checkpoint, plan.fit.agreed).step_bytes
    parts = build(EngineConfig.of(model=str(file), skip_tokenizer_init=True, **settings))
    try:
        assert plan.memory == parts.memory
        assert bool(plan.fit.agreed.weights.packed) == (asked.get("quantization") != "none")
        held = parts.runner.model.bytes_per_step
        assert held <= read <= held * 9 / 8, "packed blocks may take an eighth more in a backend's own order"
    finally:
        parts.runner.close()


def test_weights_that_were_dequantized_may_stay_packed_instead(tmp_path: Path) -> None:
    file = quantized_file(tmp_path / "a.gguf", {"": "Q4_0"})
    with plan_for(file, memory=3 * MIB, max_num_batched_tokens=256, quantization="none", dtype="float32") as plan:
        advice = {one.setting: one for one in plan.advice}
    assert plan.verdict in (SHORT, SHARED, NOTHING)
    assert (advice["quantization"].value, "weights" in advice) == ("gguf", False)


def test_u113_a_plan_that_cannot_start_says_so_with_numbers(tmp_path: Path) -> None:
    with plan_for(write_config(tmp_path / "model", **LLAMA_2_7B), **ELSEWHERE, device="l4") as fits:
        assert (fits.verdict, fits.refusal, fits.longest) == (SHARED, "", 4096)
    with plan_for(tmp_path / "model", **ELSEWHERE, device="rtx-3070") as plan:
        record = as_record(plan)
    assert record["verdict"] == plan.verdict == NOTHING
    assert "the cache does not fit" in record["refusal"]
    assert record["blocks"] is record["bytes"]["cache"] is None
    assert record["bytes"]["least"] > 2 * 6_738_415_616 > record["bytes"]["ceiling"]
    assert {one["fit"] for one in record["sequences"]} == {0} == {record["longest"]}
    assert [advice["setting"] for advice in record["advice"]][:3] == ["max_model_len", "max_num_seqs", "kv_cache_dtype"]
    assert [advice["value"] for advice in record["advice"]] == [None] * len(record["advice"])
    assert "no length lets 256 sequences fit" in record["advice"][0]["effect"]


def test_advice_comes_in_order_and_each_change_does_what_it_says(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", **TINY | {"max_position_embeddings": 4096})
    asked = {
        "memory": 12 * MIB,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 2000,
        "dtype": "float32",
    }
    with plan_for(folder, **asked) as plan:
        assert plan.verdict == SHARED
        advice = {one.setting: one for one in plan.advice}
    assert list(advice)[:4] == ["max_model_len", "max_num_seqs", "kv_cache_dtype", "dtype"]
    for setting in ("max_model_len", "max_num_seqs"):
        value = int(advice[setting].value or 0)
        with plan_for(folder, **asked | {setting: value}) as changed:
            assert changed.verdict == FITS
        with plan_for(folder, **asked | {setting: value + 1}) as changed:
            assert changed.verdict != FITS
    for setting in ("kv_cache_dtype", "dtype"):
        with plan_for(folder, **asked | {setting: advice[setting].value}) as changed:
            assert min(8, changed.fit.most(2000)) == advice[setting].sequences


@pytest.mark.parametrize(("blocks", "verdict"), [(2, SHORT), (6, SHORT), (7, SHARED), (31, FITS), (40, FITS)])
def test_verdicts(tmp_path: Path, blocks: int, verdict: str) -> None:
    folder = write_config(tmp_path / "model", **TINY)
    with plan_for(folder, num_blocks=blocks, block_size=16, max_model_len=96, max_num_seqs=5) as plan:
        assert plan.verdict == verdict


# -- what memory answers -----------------------------------------------------------------------------------------------


def answering(monkeypatch: pytest.MonkeyPatch, *answers: host.Memory | Exception) -> None:
    rest = itertools.chain(answers, itertools.repeat(answers[-1]))

    def memory() -> host.Memory:
        answer = next(rest)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(host, "memory", memory)


def told(available: int | None, total: int | None = 8 * GIB) -> host.Memory:
    return host.Memory(total=total, available=available, source="a test")


@pytest.mark.parametrize("fraction", [None, 0.5])
def test_memory_that_nobody_knows_is_asked_for(tmp_path: Path, monkeypatch, fraction: float | None) -> None:
    answering(monkeypatch, told(None, None))
    folder = write_config(tmp_path / "model", **TINY)
    with pytest.raises(ConfigError, match=r"cannot tell how much memory .* --memory 24GiB"), plan_for(folder):
        pass
    with plan_for(folder, memory=GIB, gpu_memory_utilization=fraction) as plan:
        assert plan.memory is not None and plan.memory.total <= GIB * (fraction or 0.9)


def test_no_memory_at_all_is_a_plan_that_does_not_fit(tmp_path: Path, monkeypatch) -> None:
    answering(monkeypatch, told(0))
    with plan_for(write_config(tmp_path / "model", **TINY)) as plan:
        assert (plan.verdict, plan.longest, plan.ceiling) == (NOTHING, 0, 0)


def test_u101_memory_that_jumps_by_gigabytes_still_gives_a_plan(tmp_path: Path, monkeypatch) -> None:
    answering(monkeypatch, *[told(size * GIB) for size in (4, 6, 3, 7, 1, 5) * 40])
    with plan_for(write_config(tmp_path / "model", **TINY), max_num_seqs=60) as plan:
        assert plan.memory is not None and plan.memory.total <= 4 * GIB
        assert 0 < plan.longest <= 256
        assert as_record(plan)["verdict"] == plan.verdict


def test_memory_that_raises_is_the_backends_fault_by_name(tmp_path: Path, monkeypatch) -> None:
    made = target.open_target(EngineConfig.of(model="any", **SETTINGS), None, None)
    made.close()
    monkeypatch.setattr(type(made.backend), "memory", lambda self: (_ for _ in ()).throw(RuntimeError("no answer")))
    with (
        pytest.raises(BackendError, match="backend cpu failed to report its memory"),
        plan_for(write_config(tmp_path / "model", **TINY)),
    ):
        pass


def test_u99_a_shared_memory_device_counts_what_is_available(tmp_path: Path, monkeypatch) -> None:
    answering(monkeypatch, told(5 * GIB, 8 * GIB))
    with plan_for(write_config(tmp_path / "model", **TINY), gpu_memory_utilization=0.9) as plan:
        assert plan.ceiling == int(0.9 * 8 * GIB) - 3 * GIB
        assert as_record(plan)["device"]["unified"]


# -- devices -----------------------------------------------------------------------------------------------------------


def test_a_device_that_is_not_here_is_counted_by_formula_and_asked_about_its_descriptor(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", **LLAMA_2_7B)
    with plan_for(folder, **ELSEWHERE, device="H200") as plan:
        record = as_record(plan)
    assert record["device"]["here"] is False
    assert (record["device"]["backend"], record["settings"]["block_size"]) == ("cuda", 64), "Hopper's preferred size"
    assert record["bytes"]["per_block"] == 64 * 512 << 10
    assert "formula" in record["bytes"]["cost_known"] and "data sheet" in record["device"]["source"]


def test_a_backend_that_is_here_counts_the_cache_of_a_device_that_is_not(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", **TINY | {"head_dim": 20})
    with plan_for(folder, device="orin nano") as plan:
        record = as_record(plan)
        memory = plan.fit.target.backend.memory()
    assert record["bytes"]["cost_known"] == "as backend cpu counts it (pool_cost)"
    assert record["bytes"]["per_block"] == 3 * 2 * 2 * 16 * 24 * 4, "padded to 24"
    assert record["bytes"]["per_token"] == 3 * 2 * 2 * 20 * 4
    assert memory == MemoryInfo(free=6 * GIB, total=8 * GIB, unified=True)
    assert record["bytes"]["ceiling"] == int(0.85 * 6 * GIB) - GIB // 2, "the host keeps half a GiB"


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"device": "rtx 4091"}, ConfigError, "did you mean rtx-4090"),
        ({"device": "abacus"}, ConfigError, "known are .*rtx-4090.*--memory 24GiB"),
        ({"backend": "cpux"}, BackendNotFound, "cpu"),
        ({"block_size": 5000}, UnsupportedError, "block_size"),
        ({"max_model_len": 5000}, ConfigError, "model's own limit of 256"),
        ({"ranks": 3}, ConfigError, "does not divide query heads 4"),
    ],
)
def test_what_is_wrong_is_a_typed_error_that_helps(tmp_path: Path, settings, error, words: str) -> None:
    with pytest.raises(error, match=words), plan_for(write_config(tmp_path / "model", **TINY), **settings):
        pass


def test_a_model_that_is_not_there_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a folder nor a file"), plan_for(tmp_path / "nothing"):
        pass
