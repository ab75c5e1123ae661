"""U35: when blocks run out, only what does not fit is put back; every request completes."""

from __future__ import annotations

import pytest

from tests.helpers.engine_rig import engine, greedy, solo, some_prompts
from tests.helpers.swap_rig import backend


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


@pytest.mark.parametrize("on", ["cpu", "late", "random1"])
def test_u35_with_host_memory_they_are_moved_and_none_is_cut(on: str) -> None:
    prompts = some_prompts([4, 4, 4])
    settings = backend(on) | {"block_size": 4, "max_model_len": 25}
    with engine(**settings, num_blocks=7, swap_blocks=6, preemption_mode="swap") as llm:
        outputs = llm.generate(prompts, greedy(9), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == solo(prompt, greedy(9))
            assert output.outputs[0].finish_reason == "length"
        assert outputs[0].metrics.num_preemptions == 0
        assert llm.metrics().swaps == llm.metrics().preemptions >= 1
