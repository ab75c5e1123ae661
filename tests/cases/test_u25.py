"""U25: host memory for swapped blocks that runs out, or that there is none of, ends nobody: they are computed again."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.helpers.engine_rig import engine, greedy, seeded, solo, some_prompts
from tests.helpers.swap_rig import answers, backend

PROMPTS = some_prompts([6, 8, 8, 8], seed=25)
PARAMS = [seeded(4, 8, n=4), *[greedy(18)] * 3]
SETTINGS = {"block_size": 4, "max_model_len": 33, "enable_prefix_caching": False, "preemption_mode": "swap"}


@functools.cache
def _expected(on: str) -> list[Any]:
    """With room for all of them."""
    with engine(**backend(on), **SETTINGS, num_blocks=80) as llm:
        return answers(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.parametrize("on", ["cpu", "late"])
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_u25_four_samples_and_three_long_requests_in_eight_blocks_all_finish(on: str, blocks: int) -> None:
    with engine(**backend(on), **SETTINGS, num_blocks=9, swap_blocks=blocks) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert answers(outputs) == _expected(on)
        assert [o.outputs[0].token_ids for o in outputs[1:]] == [solo(prompt, greedy(18)) for prompt in PROMPTS[1:]]
        metrics = llm.metrics()
        recomputed = metrics.preemptions - metrics.swaps
        assert metrics.preemptions == sum(output.metrics.num_preemptions for output in outputs)
        assert recomputed >= 1 and metrics.recomputed_tokens >= 1
        assert metrics.swaps <= (0 if blocks == 0 else metrics.preemptions)


def test_u25_a_counter_tells_how_often_each_way_was_taken() -> None:
    """Blocks for one of them on the host: some are swapped, some computed again."""
    with engine(**backend("late"), **SETTINGS, num_blocks=9, swap_blocks=4) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs[1:]] == [solo(prompt, greedy(18)) for prompt in PROMPTS[1:]]
        metrics = llm.metrics()
        assert 1 <= metrics.swaps < metrics.preemptions
        assert metrics.blocks_fetched <= metrics.blocks_saved
