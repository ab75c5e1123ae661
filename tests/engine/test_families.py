"""Every model family through the engine against transformers: cached and not, in chunks and not, alone and together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv import LLM
from tests.helpers.engine_rig import (
    SETTINGS,
    engine,
    folder,
    greedy,
    kept_logits,
    some_prompts,
    token_ids,
    transformers_greedy,
    transformers_logits,
)
from tests.helpers.tiny_models import BOS, FAMILIES, hf_greedy

COUNT = 9
PROMPTS = [[BOS, *ids] for ids in some_prompts((0, 3, 7, 12, 30))]
SHAPES: list[dict[str, Any]] = [
    {"block_size": 1, "max_num_batched_tokens": 64},
    {"block_size": 3, "max_num_batched_tokens": 7, "max_num_seqs": 5},
    {"block_size": 4, "max_num_batched_tokens": 16},
    {"block_size": 16, "max_num_batched_tokens": 5, "max_num_seqs": 2},
]
PAIRS = [(family, (at + offset) % 4) for at, family in enumerate(FAMILIES) for offset in (0, 1)]


@pytest.mark.parametrize(("family", "shape"), PAIRS)
def test_a_family_gives_what_transformers_gives(family: str, shape: int) -> None:
    expected = [transformers_greedy(prompt, COUNT, family) for prompt in PROMPTS]
    with engine(family, **SHAPES[shape] | {"num_blocks": 257 if SHAPES[shape]["block_size"] == 1 else 129}) as llm:
        first = llm.generate(PROMPTS, greedy(COUNT), use_tqdm=False)
        again = llm.generate(PROMPTS, greedy(COUNT), use_tqdm=False)
        size = SHAPES[shape]["block_size"]
        assert token_ids(first) == expected
        assert token_ids(again) == expected
        assert [o.num_cached_tokens for o in again] == [(len(p) - 1) // size * size for p in PROMPTS]


@pytest.mark.parametrize(
    ("family", "size"), [("llama_bias", 3), ("mistral_window", 4), ("qwen3", 16), ("mixtral", 3), ("smollm3", 4)]
)
def test_one_after_another_without_a_cache(family: str, size: int) -> None:
    with engine(family, block_size=size, enable_prefix_caching=False) as llm:
        for prompt in PROMPTS:
            (output,) = llm.generate(prompt, greedy(COUNT), use_tqdm=False)
            assert output.outputs[0].token_ids == transformers_greedy(prompt, COUNT, family)
            assert output.num_cached_tokens == 0
        assert llm.engine.scheduler.pool.num_cached == 0


@pytest.mark.parametrize(
    "family", ["llama", "qwen2_window", "qwen3_bias", "gemma2", "gemma3", "phi3_longrope", "qwen3_moe_mixed", "granite"]
)
@pytest.mark.parametrize("tokens", [7, 64])
def test_the_engines_logits_are_those_of_transformers(family: str, tokens: int) -> None:
    with engine(family, max_num_batched_tokens=tokens, max_num_seqs=5) as llm:
        for _ in ("uncached", "cached"):
            kept = kept_logits(llm)
            outputs = llm.generate(PROMPTS, greedy(COUNT), use_tqdm=False)
            for number, output in enumerate(outputs):
                ids = output.prompt_token_ids + output.outputs[0].token_ids
                expected = transformers_logits(ids, family)
                for n in range(len(output.prompt_token_ids), len(ids)):
                    torch.testing.assert_close(kept[str(number), n], expected[n - 1], atol=1e-4, rtol=1e-4)
            assert len(kept) == len(PROMPTS) * COUNT


def test_longrope_past_its_original_length_is_turned_for_long_texts() -> None:
    """transformers decides by each text's length; the engine by the longest it accepts, so that keys stay valid."""
    changes = {"max_position_embeddings": 256}
    long = [[BOS, *ids] for ids in some_prompts((70, 90))]
    short = PROMPTS[3]
    home = folder("phi3_longrope", **changes)
    with LLM(home, **SETTINGS) as llm:
        outputs = llm.generate(long, greedy(COUNT), use_tqdm=False)
        assert token_ids(outputs) == [hf_greedy(home, prompt, COUNT) for prompt in long]
    with LLM(home, **SETTINGS | {"max_model_len": 64}) as llm:
        (output,) = llm.generate(short, greedy(COUNT), use_tqdm=False)
        assert output.outputs[0].token_ids == hf_greedy(home, short, COUNT)
