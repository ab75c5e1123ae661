"""Families that run through transformers' modules over our cache, against transformers itself."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv import LLM
from pagedkv.config import EngineConfig
from pagedkv.errors import ConfigError, ModelError, UnsupportedError
from pagedkv.models.bridge import BridgedDecoder
from tests.helpers.engine_rig import (
    SETTINGS,
    _home,
    drained,
    engine,
    greedy,
    kept_logits,
    some_prompts,
    token_ids,
)
from tests.helpers.tiny_bridged import BRIDGED, bridged_model
from tests.helpers.tiny_models import BOS, hf_greedy, hf_logits

COUNT = 7
PROMPTS = [[BOS, *ids] for ids in some_prompts((0, 5, 12, 26))]
SHAPES: list[dict[str, Any]] = [
    {"block_size": 1, "max_num_batched_tokens": 64, "num_blocks": 257},
    {"block_size": 4, "max_num_batched_tokens": 9, "max_num_seqs": 5, "num_blocks": 129},
    {"block_size": 16, "max_num_batched_tokens": 16, "max_num_seqs": 2},
]
NAMED = ["gpt2", "gpt_neox", "opt", "falcon_new", "falcon_multi_query", "olmo2", "starcoder2", "phi", "cohere"]
"""The families that have to run, in every shape; the others, one shape each."""
PAIRS = [(f, at % 3) for at, f in enumerate(BRIDGED) if f not in NAMED] + [(f, s) for f in NAMED for s in range(3)]


@functools.cache
def bridged(family: str) -> Path:
    return bridged_model(_home(), family)


@functools.cache
def oracle(family: str) -> tuple[list[list[int]], list[torch.Tensor]]:
    """transformers' greedy tokens, and the logits they were chosen from [COUNT, vocabulary]."""
    ids = [hf_greedy(bridged(family), prompt, COUNT) for prompt in PROMPTS]
    texts = [[*p, *new] for p, new in zip(PROMPTS, ids, strict=True)]
    return ids, [hf_logits(bridged(family), text)[-COUNT - 1 : -1] for text in texts]


@pytest.mark.parametrize(("family", "shape"), PAIRS)
def test_a_bridged_family_gives_what_transformers_gives(family: str, shape: int) -> None:
    ids, logits = oracle(family)
    size = SHAPES[shape]["block_size"]
    with LLM(bridged(family), **SETTINGS | SHAPES[shape]) as llm:
        assert isinstance(llm.engine.parts.runner.model, BridgedDecoder)
        for cached in (False, True):
            kept = kept_logits(llm)
            outputs = llm.generate(PROMPTS, greedy(COUNT), use_tqdm=False)
            assert token_ids(outputs) == ids
            assert [o.num_cached_tokens for o in outputs] == [cached * ((len(p) - 1) // size * size) for p in PROMPTS]
            for output, prompt, expected in zip(outputs, PROMPTS, logits, strict=True):
                got = torch.stack([kept[output.request_id, len(prompt) + n] for n in range(COUNT)])
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        drained(llm)


@pytest.mark.parametrize("family", ["llama", "mistral_window", "gemma2", "qwen3_moe"])
def test_a_native_family_through_transformers_is_the_native_one(family: str) -> None:
    with engine(family) as llm:
        native = token_ids(llm.generate(PROMPTS, greedy(COUNT), use_tqdm=False))
    with engine(family, model_impl="transformers", enable_prefix_caching=False) as llm:
        assert isinstance(llm.engine.parts.runner.model, BridgedDecoder)
        assert token_ids(llm.generate(PROMPTS, greedy(COUNT), use_tqdm=False)) == native


def test_two_bridged_engines_at_once_keep_apart() -> None:
    with LLM(bridged("gpt2"), **SETTINGS) as one, LLM(bridged("gpt2"), **SETTINGS | {"block_size": 3}) as two:
        for llm in (one, two):
            for prompt in PROMPTS[1:]:
                llm.engine.add_request(prompt, greedy(COUNT))
        ids: dict[str, list[list[int]]] = {"one": [], "two": []}
        while one.engine.has_unfinished_requests() or two.engine.has_unfinished_requests():
            for name, llm in (("one", one), ("two", two)):
                ids[name] += [output.outputs[0].token_ids for _, output in llm.engine.step()]
        assert sorted(ids["one"]) == sorted(ids["two"]) == sorted(oracle("gpt2")[0][1:])


def test_half_precision_is_that_of_transformers() -> None:
    prompt = PROMPTS[-1]
    with LLM(bridged("olmo2"), **SETTINGS, dtype="bfloat16") as llm:
        kept = kept_logits(llm)
        (output,) = llm.generate(prompt, greedy(1), use_tqdm=False)
    exact = hf_logits(bridged("olmo2"), prompt)[-1]
    error = (kept[output.request_id, len(prompt)] - exact).norm() / exact.norm()
    rounded = (hf_logits(bridged("olmo2"), prompt, dtype="bfloat16")[-1] - exact).norm() / exact.norm()
    assert error < 2 * rounded < 0.2


# -- settings ----------------------------------------------------------------------------------------------------------


def test_batch_invariance_is_off_and_refused_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagedkv")
    with LLM(bridged("gpt2"), **SETTINGS) as llm:
        assert "batch_invariant" not in llm.engine.parts.choice.features
    assert "batch_invariant off: the products of transformers' modules depend on the batch" in caplog.text
    with pytest.raises(ConfigError, match="batch_invariant=True cannot be kept with gpt2"):
        LLM(bridged("gpt2"), **SETTINGS, batch_invariant=True)
    with pytest.raises(ConfigError, match="batch_invariant=True cannot be kept with model_impl='transformers'"):
        EngineConfig.of(model="x", model_impl="transformers", batch_invariant=True)


def test_model_impl_is_checked() -> None:
    with pytest.raises(ConfigError, match="model_impl='vllm' is not one of auto, native, transformers"):
        EngineConfig.of(model="x", model_impl="vllm")
    with pytest.raises(ModelError, match="model_type 'gpt2' is not supported"):
        LLM(bridged("gpt2"), **SETTINGS, model_impl="native")


def test_what_the_model_needs_is_negotiated_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedkv_cpu import descriptor

    monkeypatch.setattr(descriptor, "FEATURES", descriptor.FEATURES - {"sinks"})
    monkeypatch.setattr(BridgedDecoder, "load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(UnsupportedError, match=r"feature that layers 0-2 needs?='sinks'"):
        LLM(bridged("gpt_oss"), **SETTINGS)


def test_packed_weights_are_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BridgedDecoder, "load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=r"quantization='gguf' keeps .*\(safetensors\) has none: leave it out"):
        LLM(bridged("phi"), **SETTINGS, quantization="gguf")


def test_random_weights_for_a_configuration_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((bridged("phi") / "config.json").read_text())
    texts = []
    for _ in range(2):
        with LLM(tmp_path, **SETTINGS, load_format="dummy", skip_tokenizer_init=True) as llm:
            texts.append(token_ids(llm.generate(PROMPTS, greedy(COUNT), use_tqdm=False)))
    assert texts[0] == texts[1]
