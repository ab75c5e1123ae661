"""U35: when blocks run out, only what does not fit is put back; every request completes."""

from __future__ import annotations

import pytest

from tests.helpers.engine_rig import engine, greedy, solo, some_prompts


@pytest.mark.parametrize("caching", [True, False])
def test_u35_three_requests_that_need_nine_of_six_blocks(caching: bool) -> None:
    prompts = some_prompts([4, 4, 4])
    with engine(num_blocks=7, block_size=4, max_model_len=25, enable_prefix_caching=caching) as llm:
        outputs = llm.generate(prompts, greedy(9), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == solo(prompt, greedy(9))
            assert output.outputs[0].finish_reason == "length"
        assert llm.engine.scheduler.num_preemptions >= 1
        assert outputs[0].metrics.num_preemptions == 0, "the first in order is never put back"
