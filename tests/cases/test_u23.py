"""U23: preemption is invisible in the result, and every token is told once."""

from __future__ import annotations

import pytest

from tests.helpers.engine_rig import engine, greedy, seeded, solo, some_prompts
from tests.helpers.swap_rig import answers, backend


@pytest.mark.parametrize("params", [greedy(16), seeded(3, 16)], ids=["greedy", "seed=3"])
@pytest.mark.parametrize("caching", [True, False])
def test_u23_a_preempted_request_answers_as_if_alone(params, caching: bool) -> None:
    prompts = some_prompts([8, 8])
    with engine(num_blocks=7, block_size=4, max_model_len=25, enable_prefix_caching=caching) as llm:
        told: list[list[int]] = [[], []]
        finished = {}
        for number, output in llm.stream(prompts, params):
            assert output.outputs[0].token_ids[: len(told[number])] == told[number]
            assert len(output.outputs[0].token_ids) == len(told[number]) + 1, "each index once"
            told[number] = output.outputs[0].token_ids
            if output.finished:
                finished[number] = output
        assert told == [solo(prompt, params) for prompt in prompts]
        assert llm.engine.scheduler.num_preemptions >= 1
        assert finished[1].metrics.num_preemptions == llm.engine.scheduler.num_preemptions
        assert all(len(o.outputs[0].token_ids) == 16 for o in finished.values())
        assert finished[1].num_cached_tokens == 0, "what it computed itself is no hit"


@pytest.mark.parametrize("on", ["cpu", "late", "random1"])
@pytest.mark.parametrize("caching", [True, False])
def test_u23_a_swapped_request_answers_as_if_alone(on: str, caching: bool) -> None:
    """Streamed: each index once, and log-probabilities like those of a run with room for both."""
    prompts, params = some_prompts([8, 8]), greedy(16, logprobs=2)
    settings = backend(on) | {"block_size": 4, "max_model_len": 25, "enable_prefix_caching": caching}
    with engine(**settings, num_blocks=60) as llm:
        expected = answers(llm.generate(prompts, params, use_tqdm=False))
    with engine(**settings, num_blocks=7, swap_blocks=8, preemption_mode="swap") as llm:
        told: list[list[int]] = [[], []]
        finished = {}
        for number, output in llm.stream(prompts, params):
            assert output.outputs[0].token_ids[:-1] == told[number], "each index once"
            told[number] = output.outputs[0].token_ids
            if output.finished:
                finished[number] = output
        assert answers([finished[0], finished[1]]) == expected
        assert told == [solo(prompt, greedy(16)) for prompt in prompts]
        assert finished[1].metrics.num_swaps == finished[1].metrics.num_preemptions == llm.metrics().swaps >= 1
        assert finished[1].num_cached_tokens == 0, "what it computed itself is no hit"
