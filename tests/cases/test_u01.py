"""U01: a repeated prompt of whole blocks, all of them cached, still computes one token and answers as before."""

from __future__ import annotations

import pytest

from tests.helpers.engine_rig import engine, greedy, solo, some_prompts, transformers_greedy


@pytest.mark.parametrize("length", [4, 8, 12, 3, 5, 9])
def test_u01_the_second_answer_equals_the_first(length: int) -> None:
    (prompt,) = some_prompts([length], seed=length)
    with engine() as llm:
        first, second = (llm.generate(prompt, greedy(3), use_tqdm=False)[0] for _ in range(2))
        assert first.outputs[0].token_ids == second.outputs[0].token_ids == solo(prompt, greedy(3))
        assert first.outputs[0].token_ids == transformers_greedy(prompt, 3)
        assert first.num_cached_tokens == 0
        assert second.num_cached_tokens == (length - 1) // 4 * 4, "one token at least is computed again"
