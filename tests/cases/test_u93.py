"""U93: a bf16 checkpoint on a processor without bf16 runs in fp32 and says so; asked for, bf16 runs all the same."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pagedkv import LLM
from pagedkv_cpu import host
from tests.helpers.engine_rig import SETTINGS, drained, greedy, some_prompts, token_ids
from tests.helpers.tiny_models import hf_greedy, tiny_model

PROMPTS = some_prompts([5, 9])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("u93"), dtype="bfloat16")


@pytest.fixture
def no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")


@pytest.mark.usefixtures("no_bf16")
def test_u93_auto_is_fp32_with_a_log_line(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("pagedkv")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level("INFO", "pagedkv"), LLM(checkpoint, **SETTINGS) as llm:
            assert (llm.engine.parts.choice.dtype, llm.engine.parts.choice.kv_dtype) == ("fp32", "fp32")
            outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
            drained(llm)
    finally:
        logger.removeHandler(caplog.handler)
    assert "dtype fp32: the checkpoint's bf16 is not at full speed on cpu" in caplog.text
    # The weights are those of the file, and everything is computed in fp32.
    assert token_ids(outputs) == [hf_greedy(checkpoint, prompt, 6) for prompt in PROMPTS]


@pytest.mark.usefixtures("no_bf16")
def test_u93_bf16_runs_where_it_is_asked_for(checkpoint: Path) -> None:
    with LLM(checkpoint, dtype="bfloat16", **SETTINGS) as llm:
        assert (llm.engine.parts.choice.dtype, llm.engine.parts.choice.kv_dtype) == ("bf16", "bf16")
        outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        assert [len(ids) for ids in token_ids(outputs)] == [6, 6]
        assert [ids[0] for ids in token_ids(outputs)] == [
            hf_greedy(checkpoint, prompt, 1, dtype="bfloat16")[0] for prompt in PROMPTS
        ]
        drained(llm)


@pytest.mark.parametrize("limit", [None, "ALL", "AVX512_CORE_BF16", "avx512_core_amx"])
def test_u93_with_the_instructions_auto_keeps_bf16(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None
) -> None:
    monkeypatch.setattr(host, "isa_flags", lambda: frozenset({"avx2", "avx512f", "avx512_bf16"}))
    if limit is None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    else:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    with LLM(checkpoint, **SETTINGS) as llm:
        assert llm.engine.parts.choice.dtype == "bf16"
