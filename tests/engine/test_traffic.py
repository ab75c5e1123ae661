"""Mixed requests that arrive while others run: each answers as if it were alone, and nothing is left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedkv import LLM, RequestOutput, SamplingParams
from tests.helpers.engine_rig import engine, greedy, seeded, solo, some_prompts

STARTS = some_prompts([14, 9])


def mixed(rng: random.Random) -> tuple[list[int], SamplingParams]:
    """A prompt, often with a common start, and parameters of any kind."""
    start = rng.choice([*STARTS, []])[: rng.randrange(15)]
    prompt = [*start, *(rng.randrange(256) for _ in range(rng.randrange(1, 12)))]
    count = rng.randrange(1, 15)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": rng.randrange(5)},
        {"temperature": 0.8, "seed": rng.randrange(5), "top_p": 0.9, "top_k": 50},
        {"stop_token_ids": list(range(0, 320, 7)), "min_tokens": min(2, count)},
        {"temperature": 1.3, "seed": 1, "min_p": 0.02, "ignore_eos": False},
    ]
    return prompt, greedy(count, **rng.choice(kinds))


def play(llm: LLM, rng: random.Random, count: int, aborts: float = 0.0) -> int:
    """Add `count` requests between random steps; compare each output, and return how many were aborted."""
    left = [mixed(rng) for _ in range(count)]
    asked: dict[int, tuple[list[int], SamplingParams]] = {}
    done: dict[int, RequestOutput] = {}
    while left or llm.engine.has_unfinished_requests():
        for _ in range(min(len(left), rng.choice([0, 0, 1, 1, 2, 5]))):
            prompt, params = left.pop()
            key = llm.engine.add_request(prompt, params, priority=rng.randrange(3), stream=rng.random() < 0.3)
            asked[key] = (prompt, params)
        if rng.random() < aborts and asked:
            key = rng.choice(list(asked))
            output = llm.engine.abort_request(key)
            assert (output is None) == (key in done)
            done |= {} if output is None else {key: output}
        for key, output in llm.engine.step():
            if output.finished:
                assert key not in done
                done[key] = output
    assert done.keys() == asked.keys()
    aborted = 0
    for key, output in done.items():
        expected, got = solo(*asked[key]), output.outputs[0].token_ids
        if output.outputs[0].finish_reason == "abort":
            aborted += 1
            expected = expected[: len(got)]
        assert got == expected, (key, asked[key])
    return aborted


@pytest.mark.parametrize(
    "shape",
    [
        {"block_size": 1, "num_blocks": 46, "max_num_batched_tokens": 30},
        {"block_size": 3, "num_blocks": 16, "max_num_batched_tokens": 11},
        {"block_size": 4, "num_blocks": 12, "max_num_batched_tokens": 64},
        {"block_size": 16, "num_blocks": 4, "max_num_batched_tokens": 16, "max_overtakes": 2},
    ],
    ids=lambda shape: f"B={shape['block_size']}",
)
def test_forty_mixed_requests_at_random_moments_with_few_blocks(shape: dict[str, Any]) -> None:
    with engine(max_model_len=40, **shape) as llm:
        play(llm, random.Random(shape["block_size"]), 40)
        assert llm.engine.scheduler.num_preemptions > 0, "there are too few blocks for eight sequences"
        assert llm.engine.stats.finished == 40


@pytest.mark.parametrize("chunked", [True, False])
def test_aborts_among_them(chunked: bool) -> None:
    with engine(max_model_len=40, num_blocks=20, max_num_batched_tokens=26, enable_chunked_prefill=chunked) as llm:
        assert play(llm, random.Random(11), 40, aborts=0.2) > 3


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 2, 3, 4, 5, 16]),
    max_num_seqs=st.integers(1, 8),
    extra=st.integers(0, 30),
    caching=st.booleans(),
    family=st.sampled_from(["llama", "mistral_window"]),
)
def test_any_engine_answers_as_if_alone(
    seed: int, block_size: int, max_num_seqs: int, extra: int, caching: bool, family: str
) -> None:
    with engine(
        family,
        block_size=block_size,
        num_blocks=2 + 40 // block_size + extra // block_size,
        max_model_len=40,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra,
        enable_prefix_caching=caching,
    ) as llm:
        rng = random.Random(seed)
        work = [mixed(rng) for _ in range(8)]
        outputs = llm.generate([p for p, _ in work], [q for _, q in work], use_tqdm=False)
        for (prompt, params), output in zip(work, outputs, strict=True):
            assert output.outputs[0].token_ids == solo(prompt, params, family)


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_heavy_preemption_is_invisible(size: int) -> None:
    prompts = some_prompts([7, 5, 6, 4, 8, 3], seed=size)
    params = [greedy(18), seeded(3, 18)] * 3
    with engine(block_size=size, num_blocks=2 + 32 // size, max_model_len=26, max_num_batched_tokens=12) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == [
                solo(p, q) for p, q in zip(prompts, params, strict=True)
            ]
        assert llm.engine.scheduler.num_preemptions >= (1 if size == 16 else 4)
        assert sum(o.metrics.num_preemptions for o in outputs) > 0 or size == 16
