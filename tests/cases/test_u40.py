"""U40: max_tokens=0 scores the prompt when that is asked for, and is refused when nothing is; the engine goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv import SamplingParams
from pagedkv.errors import RequestInvalid
from tests.helpers.engine_rig import engine, greedy, some_prompts, transformers_greedy, transformers_logits


def test_u40_scores_without_a_token() -> None:
    prompts = some_prompts([9, 1, 30])
    with engine() as llm:
        for _ in ("uncached", "cached"):
            outputs = llm.generate(prompts, SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                answer = output.outputs[0]
                assert (answer.token_ids, answer.text, answer.finish_reason) == ([], "", "length")
                exact = torch.log_softmax(transformers_logits(prompt).double(), -1)
                got = [entry[i].logprob for entry, i in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]  # type: ignore[index]
                want = [float(exact[at, i]) for at, i in enumerate(prompt[1:])]
                assert got == pytest.approx(want, abs=2e-4)
        assert llm.engine.stats.output_tokens == 0
        (stream,) = list(llm.stream(prompts[0], SamplingParams(max_tokens=0, prompt_logprobs=0)))
        assert stream[1].finished and len(stream[1].prompt_logprobs or ()) == 9


@pytest.mark.parametrize("names", [{"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": -1, "prompt_logprobs": 1}])
def test_u40_the_field_is_named(names: dict[str, Any]) -> None:
    with pytest.raises(RequestInvalid, match="max_tokens") as caught:
        SamplingParams(**names)
    assert caught.value.field == "max_tokens"


def test_u40_none_runs_to_the_limit_and_scores_too() -> None:
    (prompt,) = some_prompts([10])
    with engine(max_model_len=16) as llm:
        (output,) = llm.generate(prompt, greedy(None, prompt_logprobs=0), use_tqdm=False)
        assert output.outputs[0].token_ids == transformers_greedy(prompt, 6)
        assert len(output.prompt_logprobs or ()) == 10
