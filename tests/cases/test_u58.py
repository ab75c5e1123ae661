"""U58: tiny temperatures are greedy or divided without harm, and a NaN fails its own request only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv import SamplingParams
from tests.helpers.engine_rig import engine, seeded, some_prompts, token_ids, transformers_greedy
from tests.helpers.forced import replace_logits

PROMPTS = some_prompts([5, 9, 4])


@pytest.mark.parametrize(
    "names",
    [
        {"temperature": 0},
        {"temperature": 1e-6},
        {"temperature": 1e-4},
        {"top_p": 0},
        {"temperature": 0, "top_k": 0},
        {"temperature": 0, "top_k": 10**9},
    ],
    ids=str,
)
def test_u58_greedy_rows_in_a_mixed_batch(names: dict[str, Any]) -> None:
    """Between rows that are drawn at temperature 1 from masked logits."""
    params = SamplingParams(**{"max_tokens": 5, "seed": 1, "ignore_eos": True} | names)
    masked = seeded(2, 5, allowed_token_ids=[1, 2], logit_bias={3: -100})
    with engine() as llm:
        outputs = token_ids(llm.generate([PROMPTS[0]] * 3, [masked, params, masked], use_tqdm=False))
        assert outputs[1] == transformers_greedy(PROMPTS[0], 5)
        assert outputs[0] == outputs[2] and set(outputs[0]) <= {1, 2}


@pytest.mark.parametrize("top_k", [0, 10**9])
def test_u58_settings_that_are_off_change_nothing(top_k: int) -> None:
    with engine() as llm:
        plain, off = token_ids(llm.generate([PROMPTS[0]] * 2, [seeded(1), seeded(1, top_k=top_k)], use_tqdm=False))
        assert plain == off


def test_u58_a_row_of_nan_fails_one_request() -> None:
    names = {"repetition_penalty": 1.3, "allowed_token_ids": [1, 2, 3], "logprobs": 2}
    params = [seeded(1, 6, **names), seeded(1, 6, **names), seeded(1, 6)]
    with engine() as llm:
        good = llm.generate(PROMPTS, params, use_tqdm=False)
    with engine() as llm:

        def spoil(row: torch.Tensor, request: Any, index: int) -> torch.Tensor:
            if request.label == "1" and index == 2:
                row[200] = torch.nan
            return row

        replace_logits(llm, spoil)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
        assert outputs[1].outputs[0].token_ids == good[1].outputs[0].token_ids[:2]
        for at in (0, 2):
            assert outputs[at].outputs[0].token_ids == good[at].outputs[0].token_ids
