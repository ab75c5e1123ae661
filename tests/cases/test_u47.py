"""U47: ids outside the vocabulary are refused before anything runs, whichever field they stand in."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv import SamplingParams
from pagedkv.errors import RequestInvalid
from tests.helpers.engine_rig import drained, engine, greedy, solo
from tests.helpers.tiny_models import VOCAB_SIZE


def test_u47_the_engine_is_alive_after_each() -> None:
    bad: list[tuple[Any, dict[str, Any], str]] = [
        ([1], {"logit_bias": {"999999": 5}}, "logit_bias"),
        ([1], {"logit_bias": {"-1": 5}}, "logit_bias"),
        ([1], {"logit_bias": {"x": 1}}, "logit_bias"),
        ([1], {"logit_bias": {VOCAB_SIZE: 5}}, "logit_bias"),
        ([1], {"allowed_token_ids": [0, VOCAB_SIZE]}, "allowed_token_ids"),
        ([1], {"bad_words": [[1, 999_999]]}, "bad_words"),
        ([1], {"stop_token_ids": [2**40]}, "stop_token_ids"),
        ([VOCAB_SIZE], {}, "prompt_token_ids"),
    ]
    with engine() as llm:
        for prompt, names, field in bad:
            with pytest.raises(RequestInvalid, match=field if names else "outside the vocabulary") as caught:
                llm.generate(prompt, SamplingParams(max_tokens=2, **names), use_tqdm=False)
            assert caught.value.field == field
            drained(llm)
            (output,) = llm.generate([1, 2], greedy(3), use_tqdm=False)
            assert output.outputs[0].token_ids == solo([1, 2], greedy(3))


def test_u47_ids_at_the_edges_are_fine() -> None:
    with engine() as llm:
        for token in (0, VOCAB_SIZE - 1):
            (output,) = llm.generate([1, 2], greedy(3, logit_bias={str(token): 100}), use_tqdm=False)
            assert output.outputs[0].token_ids == [token] * 3
