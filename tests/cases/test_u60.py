"""U60: prompt log-probabilities of a prompt in chunks, and of one that was preempted between two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.engine_rig import engine, greedy, some_prompts, transformers_logits

(PROMPT, OTHER) = some_prompts([10, 6])
PARAMS = greedy(3, prompt_logprobs=1, logprobs=1)


def lists(output: Any) -> tuple[Any, Any, Any]:
    return output.prompt_logprobs, output.outputs[0].logprobs, output.outputs[0].token_ids


@pytest.fixture(scope="module")
def whole() -> tuple[Any, Any, Any]:
    with engine() as llm:
        made = lists(llm.generate(PROMPT, PARAMS, use_tqdm=False)[0])
    exact = torch.log_softmax(transformers_logits(PROMPT).double(), -1)
    got = [entry[i].logprob for entry, i in zip(made[0][1:], PROMPT[1:], strict=True)]
    assert got == pytest.approx([float(exact[at, i]) for at, i in enumerate(PROMPT[1:])], abs=2e-4)
    return made


@pytest.mark.parametrize("chunk", [1, 2, 3, 9, 10])
def test_u60_chunks_give_the_same_lists(whole: tuple[Any, Any, Any], chunk: int) -> None:
    with engine(max_num_batched_tokens=chunk, max_num_seqs=1) as llm:
        assert lists(llm.generate(PROMPT, PARAMS, use_tqdm=False)[0]) == whole


def test_u60_few_logits_a_step_are_chunks_too(whole: tuple[Any, Any, Any]) -> None:
    with engine() as llm:
        object.__setattr__(llm.engine.scheduler.config, "max_scored", 2)
        before = llm.engine.stats.steps
        outputs = llm.generate([PROMPT, OTHER, PROMPT], [PARAMS, greedy(3), PARAMS], use_tqdm=False)
        assert lists(outputs[0]) == lists(outputs[2]) == whole
        assert llm.engine.stats.steps - before >= 9, "18 positions, 2 a step"


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_u60_preempted_between_chunks(whole: tuple[Any, Any, Any], steps: int) -> None:
    with engine(max_num_batched_tokens=3, max_num_seqs=1) as llm:
        key, told, done = llm.engine.add_request(PROMPT, PARAMS, stream=True), [], {}
        for step in range(20):
            if step == steps:
                llm.engine.scheduler.restart()
                assert llm.engine.scheduler.waiting, "it starts over"
            for _, output in llm.engine.step():
                told.append(list(output.outputs[0].token_ids))
                done[key] = output
            if not llm.engine.has_unfinished_requests():
                break
        assert lists(done[key]) == whole
        assert told == [whole[2][:n] for n in (1, 2, 3)], "nothing sampled from an unfinished chunk, nothing twice"
        assert done[key].metrics.num_preemptions == 0, "it made room for nobody"
