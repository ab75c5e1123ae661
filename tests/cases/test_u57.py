"""U57: minus infinity never leaves, in stream and not; what is written is JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch

from pagedkv import RequestOutput, SamplingParams
from tests.helpers.engine_rig import engine, some_prompts
from tests.helpers.forced import replace_logits, told

CASES = [
    SamplingParams(max_tokens=4, top_k=1, temperature=1, logprobs=5, seed=1),
    SamplingParams(max_tokens=4, logit_bias={i: -100 for i in range(320) if i not in (7, 8)}, logprobs=5, seed=1),
    SamplingParams(max_tokens=4, allowed_token_ids=[7, 8], logprobs=5, prompt_logprobs=-1, seed=1),
]


@pytest.mark.parametrize("params", CASES, ids=["top_k", "logit_bias", "allowed"])
@pytest.mark.parametrize("masked", [False, True], ids=["model", "model with minus infinity"])
def test_u57_every_number_is_finite(params: SamplingParams, masked: bool) -> None:
    (prompt,) = some_prompts([6])

    def only_three(row: torch.Tensor, request: object, index: int) -> torch.Tensor:
        return torch.where(torch.isin(torch.arange(len(row)), torch.tensor([7, 8, 9])), row, -torch.inf)

    with engine() as llm:
        if masked:
            replace_logits(llm, only_three)
        _, streamed = told(llm, prompt, params)
        (whole,) = llm.generate(prompt, params, use_tqdm=False)
        for output in (streamed, whole):
            _check(output, masked)


def _check(output: RequestOutput, masked: bool) -> None:
    assert json.loads(json.dumps(asdict(output), allow_nan=False))
    answer = output.outputs[0]
    assert answer.logprobs is not None and len(answer.token_ids) == 4
    for entry, token in zip(answer.logprobs, answer.token_ids, strict=True):
        assert len(entry) in (5, 6) and token in entry
        assert all(math.isfinite(record.logprob) for record in entry.values())
        if masked:
            assert sorted(record.logprob for record in entry.values())[:2] == [-9999.0, -9999.0]
