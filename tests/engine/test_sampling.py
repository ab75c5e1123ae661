"""Sampling as requests see it: seeds, ends, limits, and what does not change them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pagedkv import LLM, SamplingParams
from tests.helpers.engine_rig import (
    SETTINGS,
    drained,
    engine,
    folder,
    greedy,
    seeded,
    solo,
    some_prompts,
    token_ids,
    transformers_greedy,
    transformers_logits,
)

PROMPT, *OTHERS = some_prompts([11, 3, 18, 7])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(folder(), **SETTINGS) as made:
        yield made
        drained(made)


def one(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


# -- seeds (U23, U54, U56) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [seeded(7, 12), seeded(7, 12, top_k=20, min_p=0.01), seeded(-3, 12, top_p=0.8)])
def test_a_seed_decides_whatever_the_batch_the_cache_the_chunks_and_preemption(params: SamplingParams) -> None:
    expected = solo(PROMPT, params)
    for settings in (
        {},
        {"max_num_batched_tokens": 5, "max_num_seqs": 4},
        {"enable_prefix_caching": False, "block_size": 3},
        {"num_blocks": 13, "block_size": 3, "max_model_len": 31},
        {"seed": 99},
    ):
        with engine(**settings) as llm:
            prompts = [*OTHERS, PROMPT, PROMPT]
            everyone = [greedy(13), seeded(8, 13), seeded(9, 4), params, params]
            for _ in ("uncached", "cached"):
                outputs = token_ids(llm.generate(prompts, everyone, use_tqdm=False))
                assert outputs[3] == outputs[4] == expected
            if "num_blocks" in settings:
                assert llm.engine.scheduler.num_preemptions > 0


def test_a_seeded_stream_advances(llm: LLM) -> None:
    assert len(set(one(llm, PROMPT, seeded(1, 40, temperature=50.0)))) > 25, "nearly uniform over 320 ids"


def test_requests_without_a_seed_differ_and_follow_the_engines() -> None:
    params = SamplingParams(temperature=5.0, max_tokens=10, ignore_eos=True)
    runs = []
    for seed in (1, 1, 2):
        with engine(seed=seed) as llm:
            first = token_ids(llm.generate([PROMPT] * 4, params, use_tqdm=False))
            second = token_ids(llm.generate([PROMPT] * 4, params, use_tqdm=False))
            runs.append(first + second)
    assert len({tuple(ids) for ids in runs[0]}) == 8, "each request draws its own numbers"
    assert runs[0] == runs[1], "LLM(seed=) makes a run repeatable"
    assert all(a != b for a, b in zip(runs[0], runs[2], strict=True))


def test_unseeded_results_do_not_depend_on_batching() -> None:
    params = SamplingParams(temperature=2.0, max_tokens=6, ignore_eos=True)
    with engine(seed=5) as together, engine(seed=5) as alone:
        a = token_ids(together.generate(OTHERS, params, use_tqdm=False))
        b = [one(alone, prompt, params) for prompt in OTHERS]
        assert a == b


def test_draws_follow_the_models_distribution(llm: LLM) -> None:
    outputs = llm.generate([PROMPT] * 400, [seeded(s, 1, temperature=3.0) for s in range(400)], use_tqdm=False)
    counts = np.bincount([ids[0] for ids in token_ids(outputs)], minlength=320)
    expected = torch.softmax(transformers_logits(PROMPT)[-1].double() / 3.0, -1).numpy() * 400
    likely = expected >= 5
    chi2 = float((((counts - expected) ** 2) / expected)[likely].sum())
    rest, rest_expected = counts[~likely].sum(), expected[~likely].sum()
    chi2 += float((rest - rest_expected) ** 2 / rest_expected)
    degrees = int(likely.sum())
    assert degrees >= 3
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5, "five standard deviations of chi-square"


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_stop_id_ends_the_text_and_is_named(llm: LLM) -> None:
    free = solo(PROMPT, greedy(12))
    stop = free[5]
    at = free.index(stop)
    (output,) = llm.generate(PROMPT, greedy(12, stop_token_ids=[stop, 300]), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.token_ids == free[: at + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == llm.get_tokenizer().decode(free[:at])  # type: ignore[union-attr]


def _with_eos(tmp_path: Path, eos: int | list[int]) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(folder(), copy)
    path = copy / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": eos}))
    return copy


@pytest.mark.parametrize("listed", [True, False])
def test_end_ids_of_generation_config_end_it_and_ignore_eos_passes_them(tmp_path: Path, listed: bool) -> None:
    free = solo(PROMPT, greedy(12))
    eos = free[6]
    at = free.index(eos)
    with LLM(_with_eos(tmp_path, [310, eos] if listed else eos), **SETTINGS) as llm:
        assert eos in llm.engine.parts.end_ids
        (output,) = llm.generate(PROMPT, greedy(12, ignore_eos=False), use_tqdm=False)
        completion = output.outputs[0]
        assert completion.token_ids == free[: at + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert one(llm, PROMPT, greedy(12)) == free
        late = one(llm, PROMPT, greedy(12, ignore_eos=False, min_tokens=at + 3))
        assert late[:at] == free[:at] and len(late) >= at + 3
        assert eos not in late[: at + 2], "an end id is masked until there are min_tokens"
        both = llm.generate(PROMPT, greedy(12, ignore_eos=False, stop_token_ids=[eos]), use_tqdm=False)[0].outputs[0]
        assert both.stop_reason == eos, "the request's own stop id is the reason when it is both"
        drained(llm)


def test_min_tokens_masks_and_the_rest_is_the_next_most_probable(llm: LLM) -> None:
    free = solo(PROMPT, greedy(1))
    logits = transformers_logits(PROMPT)[-1].clone()
    logits[free[0]] = -torch.inf
    got = one(llm, PROMPT, greedy(1, min_tokens=1, stop_token_ids=free))
    assert got == [int(logits.argmax())]


def test_without_max_tokens_it_runs_to_the_limit() -> None:
    with engine(max_model_len=40) as llm:
        (output,) = llm.generate(PROMPT, greedy(None), use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].token_ids == transformers_greedy(PROMPT, 29)
    with engine(num_blocks=6, max_model_len=40) as llm:
        (output,) = llm.generate(PROMPT, greedy(None), use_tqdm=False)
        assert output.outputs[0].token_ids == transformers_greedy(PROMPT, 10), "5 blocks of 4, and the last is not kept"


def test_max_tokens_is_the_number_of_tokens(llm: LLM) -> None:
    for count in (1, 2, 15):
        (output,) = llm.generate(PROMPT, greedy(count), use_tqdm=False)
        assert output.outputs[0].token_ids == transformers_greedy(PROMPT, 15)[:count]
        assert output.outputs[0].finish_reason == "length"


def test_switched_off_batch_invariance_still_gives_the_models_answers() -> None:
    with engine(batch_invariant=False) as off, engine(batch_invariant=True) as on:
        assert "batch_invariant" not in off.engine.parts.choice.features
        assert "batch_invariant" in on.engine.parts.choice.features
        prompts = [PROMPT, *OTHERS]
        expected = [transformers_greedy(p, 8) for p in prompts]
        for llm in (off, on):
            assert token_ids(llm.generate(prompts, greedy(8), use_tqdm=False)) == expected


@pytest.mark.parametrize("names", [{"temperature": 0}, {"temperature": 1e-6}, {"top_k": 1}, {"top_p": 0.0}])
def test_every_way_to_say_greedy(llm: LLM, names: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True, **names)  # type: ignore[arg-type]
    assert one(llm, PROMPT, params) == transformers_greedy(PROMPT, 5)
