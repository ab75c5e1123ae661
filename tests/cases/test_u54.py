"""U54: the same ids alone and in any batch, at any place in it, in chunks or not, greedy and seeded."""

from __future__ import annotations

import pytest

from tests.helpers.engine_rig import engine, greedy, seeded, solo, some_prompts


@pytest.mark.parametrize("params", [greedy(8), seeded(3)], ids=["greedy", "seed=3"])
@pytest.mark.parametrize("tokens", [9, 128], ids=["chunks", "whole"])
def test_u54_alone_and_in_batches_of_two_five_and_eight(params, tokens: int) -> None:
    mine, *others = some_prompts([13, 3, 17, 8, 1, 5, 11, 6])
    with engine(max_num_batched_tokens=tokens) as llm:
        for size in (1, 2, 5, 8):
            for place in sorted({0, size - 1}):
                prompts = others[: size - 1]
                prompts.insert(place, mine)
                everyone = [greedy(5) for _ in prompts]
                everyone[place] = params
                outputs = llm.generate(prompts, everyone, use_tqdm=False)
                assert outputs[place].outputs[0].token_ids == solo(mine, params)
