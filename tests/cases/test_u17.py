"""U17: prompt log-probabilities are whole when the prompt is cached."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.engine_rig import engine, greedy, some_prompts, transformers_logits


@pytest.mark.parametrize("length", [3, 8, 9])
def test_u17_the_same_full_list_uncached_and_cached(length: int) -> None:
    (prompt,) = some_prompts([length])
    exact = torch.log_softmax(transformers_logits(prompt).double(), -1)
    with engine(block_size=4) as llm:
        warm = greedy(2)
        lists = []
        for params in (greedy(2, prompt_logprobs=1), warm, greedy(2, prompt_logprobs=1)):
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            lists.append(output.prompt_logprobs)
        assert lists[1] is None
        assert lists[0] == lists[2]
        assert output.num_cached_tokens == 0, "what needs every position computes every position"
        assert lists[0] is not None and len(lists[0]) == length and lists[0][0] is None
        for at, entry in enumerate(lists[0][1:], start=1):
            assert entry is not None
            assert entry[prompt[at]].logprob == pytest.approx(float(exact[at - 1, prompt[at]]), abs=2e-4)
            assert entry[int(exact[at - 1].argmax())].rank == 1
