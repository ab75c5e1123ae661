"""Vectors beside those of transformers in float64, pooled by hand: batches, chunks, cached prefixes, preemption."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import LLM, AsyncLLM, EmbeddingRequestOutput, PoolingParams, SamplingParams
from pagedkv.api.errors import EngineDead, ModelError, RequestInvalid, RequestTooLong
from tests.helpers.engine_rig import SETTINGS, drained, engine, fail_at, some_prompts
from tests.helpers.pooled import by_hand, declare, pooled, tiny_copy

TOLERANCE = {"rtol": 0, "atol": 1e-5}


@contextmanager
def embedder(family: str = "llama", mode: str = "mean", *, normalize: bool = True, **settings: Any) -> Iterator[LLM]:
    with LLM(pooled(family, mode, normalize=normalize), **SETTINGS | settings) as llm:
        yield llm
        drained(llm)


def vectors(outputs: Sequence[EmbeddingRequestOutput]) -> np.ndarray[Any, Any]:
    return np.array([output.outputs.embedding for output in outputs])


def expected(prompts: Sequence[Sequence[int]], family: str, mode: str, **names: Any) -> np.ndarray[Any, Any]:
    where = pooled(family, mode, normalize=names.get("normalize", True))
    return np.array([by_hand(where, prompt, mode, **names) for prompt in prompts])


@pytest.mark.parametrize(
    ("family", "mode", "normalize"),
    [
        ("qwen3", "lasttoken", True),
        ("llama", "mean", True),
        ("llama", "mean", False),
        ("llama_bias", "cls", True),
        ("gemma3", "mean", True),
    ],
)
def test_a_batch_in_chunks_gives_what_each_text_alone_gives(family: str, mode: str, normalize: bool) -> None:
    prompts = some_prompts([1, 2, 40, 7, 90, 16, 15, 64], seed=1)
    with embedder(family, mode, normalize=normalize, max_num_batched_tokens=24) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
    np.testing.assert_allclose(vectors(outputs), expected(prompts, family, mode, normalize=normalize), **TOLERANCE)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(output.finished and output.metrics.finished_time for output in outputs)


@pytest.mark.parametrize(("mode", "cached"), [("mean", 0), ("lasttoken", 20), ("cls", 0)])
def test_a_cached_prefix_loses_no_position_that_is_pooled(mode: str, cached: int) -> None:
    """The last position may stand on 20 cached ones, five blocks of 4; a mean needs the hidden states of all."""
    (prompt,) = some_prompts([23], seed=2)
    longer = [prompt, [*prompt[:21], 1, 2, 3, 4, 5]]
    with embedder(mode=mode) as llm:
        llm.embed(prompt, use_tqdm=False)
        outputs = llm.embed(longer, use_tqdm=False)
    np.testing.assert_allclose(vectors(outputs), expected(longer, "llama", mode), **TOLERANCE)
    assert [output.num_cached_tokens for output in outputs] == [cached, cached]


@pytest.mark.parametrize(("mode", "swap"), [("mean", 0), ("mean", "4MiB"), ("lasttoken", 0)])
def test_preempted_texts_count_each_position_once(mode: str, swap: int | str) -> None:
    """More urgent texts take the blocks of a long one whose first chunks were added up already."""
    prompts = some_prompts([60, 44, 40], seed=3)
    settings = {"num_blocks": 23, "max_num_batched_tokens": 8, "swap_space": swap, "enable_prefix_caching": False}
    with embedder(mode=mode, **settings) as llm:
        done: dict[int, Any] = {}
        keys = [llm.engine.add_request(prompts[0], PoolingParams(), priority=1)]
        for _ in range(4):
            done |= dict(llm.engine.step())
        preempt(llm)
        keys += [llm.engine.add_request(prompt, PoolingParams()) for prompt in prompts[1:]]
        while llm.engine.has_unfinished_requests():
            done |= dict(llm.engine.step())
        found = [EmbeddingRequestOutput.of(done[key]) for key in keys]
    assert found[0].metrics.num_preemptions == 1
    np.testing.assert_allclose(vectors(found), expected(prompts, "llama", mode), **TOLERANCE)


def preempt(llm: LLM) -> None:
    """Take row and blocks from the running request, as when they run out."""
    scheduler = llm.engine.scheduler
    (request,) = scheduler.running
    scheduler._changes.preempted.append(scheduler._preempt(request))


def test_an_interrupted_step_is_counted_once() -> None:
    """A step is undone by an interrupt, before it is computed or when its hidden states were added up already."""
    prompts = some_prompts([30, 50], seed=4)
    with embedder(max_num_batched_tokens=16) as llm:
        keys = [llm.engine.add_request(prompt, PoolingParams()) for prompt in prompts]
        llm.engine.step()
        commit, scheduler = llm.engine.scheduler.commit, llm.engine.scheduler
        scheduler.commit = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
        scheduler.commit = commit  # type: ignore[method-assign]
        fail_at(llm, 2, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
        done: dict[int, Any] = {}
        while llm.engine.has_unfinished_requests():
            done |= dict(llm.engine.step())
        found = vectors([EmbeddingRequestOutput.of(done[key]) for key in keys])
    np.testing.assert_allclose(found, expected(prompts, "llama", "mean"), **TOLERANCE)


def interrupted(step: Any) -> None:
    raise KeyboardInterrupt


def test_changed_weights_leave_nothing_of_the_old_ones_in_a_vector() -> None:
    (prompt,) = some_prompts([40], seed=5)
    with embedder(max_num_batched_tokens=16, normalize=False) as llm:
        key = llm.engine.add_request(prompt, PoolingParams())
        llm.engine.step()
        llm.engine.parts.runner.model._final_norm.mul_(2.0)  # type: ignore[attr-defined]
        llm.weights_changed()
        done: dict[int, Any] = {}
        while llm.engine.has_unfinished_requests():
            done |= dict(llm.engine.step())
        found = done[key].embedding
    np.testing.assert_allclose([found], 2 * expected([prompt], "llama", "mean", normalize=False), **TOLERANCE)


@pytest.mark.parametrize("keep", [1, 16])
def test_dimensions_cut_first_and_normalize_then(keep: int) -> None:
    prompts = some_prompts([9, 12], seed=6)
    with embedder() as llm:
        short = llm.embed(prompts, PoolingParams(dimensions=keep), use_tqdm=False)
        plain = llm.embed(prompts, [PoolingParams(dimensions=keep, normalize=False)] * 2, use_tqdm=False)
    np.testing.assert_allclose(vectors(short), expected(prompts, "llama", "mean", keep=keep), **TOLERANCE)
    raw = expected(prompts, "llama", "mean")  # its length is lost, its direction is not
    np.testing.assert_allclose(np.linalg.norm(vectors(short), axis=1), 1, rtol=1e-6)
    assert np.linalg.norm(vectors(plain), axis=1) != pytest.approx(1, rel=1e-3)
    cosine = (vectors(plain) * raw[:, :keep]).sum(1) / np.linalg.norm(vectors(plain), axis=1)
    np.testing.assert_allclose(cosine, np.linalg.norm(raw[:, :keep], axis=1), rtol=1e-5)


def test_numbers_are_of_float32_and_a_text_is_framed_as_the_tokenizer_says() -> None:
    with embedder() as llm:
        (output,) = llm.embed("Hello", use_tqdm=False)
        (mapped,) = llm.embed({"prompt": "Hello", "cache_salt": "a"}, use_tqdm=False)
    assert output.prompt == "Hello"
    assert output.prompt_token_ids == [256, *b"Hello"]
    assert output.outputs.embedding == [float(np.float32(x)) for x in output.outputs.embedding]
    assert mapped.outputs.embedding == output.outputs.embedding


def test_what_a_vector_is_does_not_depend_on_neighbours_or_chunks() -> None:
    prompts = some_prompts([33, 5, 70], seed=7)
    with embedder() as one, embedder(max_num_batched_tokens=9) as other:
        assert "batch_invariant" in one.engine.parts.choice.features
        alone = [one.embed(prompt, use_tqdm=False)[0].outputs.embedding for prompt in prompts]
        together = [output.outputs.embedding for output in other.embed(prompts, use_tqdm=False)]
    assert alone == together


def test_bfloat16_is_near_float64() -> None:
    prompts = some_prompts([20, 30], seed=8)
    with embedder("qwen3", "lasttoken", dtype="bfloat16") as llm:
        found = vectors(llm.embed(prompts, use_tqdm=False))
    cosine = (found * expected(prompts, "qwen3", "lasttoken")).sum(1)
    assert (cosine > 0.995).all()


def test_a_bare_model_without_head_gives_the_vectors_of_the_whole_one() -> None:
    """U42: the names of Qwen3-Embedding's file have no "model." in front."""
    prompts = some_prompts([10, 31], seed=9)
    bare = pooled("llama", "mean", bare=True, older=True)
    with LLM(bare, **SETTINGS) as llm:
        found = vectors(llm.embed(prompts, use_tqdm=False))
    np.testing.assert_allclose(found, expected(prompts, "llama", "mean"), **TOLERANCE)
    np.testing.assert_allclose(found, [by_hand(bare, prompt, "mean") for prompt in prompts], **TOLERANCE)


def test_no_head_is_read_or_counted() -> None:
    """The head of the tiny llama is 320 x 48 numbers of four bytes."""
    with embedder() as llm, engine() as whole:
        with_head, without = (each.engine.parts.runner.model for each in (whole, llm))
        assert with_head.nbytes - without.nbytes == 320 * 48 * 4
        assert whole.engine.parts.memory.weights - llm.engine.parts.memory.weights == 320 * 48 * 4
        assert without.bytes_per_step == with_head.bytes_per_step - 320 * 48 * 4
        assert llm.engine.pooling is not None and whole.engine.pooling is None


def test_a_model_that_makes_vectors_refuses_text_and_the_other_way_round() -> None:
    with embedder() as llm:
        for ask in (llm.generate, llm.score, lambda prompt: next(llm.stream(prompt))):
            with pytest.raises(RequestInvalid, match=r"makes vectors .mean pooling. and generates no text: use embed"):
                ask([1, 2, 3])
        ready = llm.engine.prepare([1, 2], PoolingParams())
        with pytest.raises(RequestInvalid, match="use embed"):
            llm.engine.add_request(ready, SamplingParams())
    with engine() as llm:
        with pytest.raises(RequestInvalid, match=r"declares no pooling.*use generate") as error:
            llm.embed([1, 2, 3])
        assert error.value.field == "model"
        with pytest.raises(RequestInvalid, match="declares no pooling"):
            llm.engine.add_request(llm.engine.prepare([1], SamplingParams()), PoolingParams())


def test_bad_input_says_what_to_do_and_leaves_nothing_behind() -> None:
    with embedder(max_model_len=32) as llm:
        for prompt, params, kind, words in (
            ([1] * 33, PoolingParams(), RequestTooLong, "prompt of 33 tokens can never fit.*max_model_len is 32"),
            ([], PoolingParams(), RequestInvalid, "empty"),
            ([[1], [320]], PoolingParams(), RequestInvalid, "prompt 1: token id 320 .* vocabulary of 320"),
            ([1], PoolingParams(dimensions=49), RequestInvalid, "49 is more than the 48 numbers"),
            ([1], SamplingParams(), RequestInvalid, "pooling_params must be a PoolingParams"),
            ([[1], [2]], [PoolingParams()], RequestInvalid, "1 pooling_params for 2 prompts"),
        ):
            with pytest.raises(kind, match=words):
                llm.embed(prompt if prompt else [[]], params, use_tqdm=False)  # type: ignore[arg-type]
        assert len(llm.embed([1] * 32, use_tqdm=False)[0].outputs.embedding) == 48, "the longest prompt there is"


@pytest.mark.parametrize("names", [{"dimensions": 0}, {"dimensions": True}, {"dimensions": 2.0}, {"normalize": 1}])
def test_parameters_are_checked(names: dict[str, Any]) -> None:
    with pytest.raises(RequestInvalid, match="must be"):
        PoolingParams(**names)


def test_sizes_that_the_model_was_trained_for_are_the_only_ones(tmp_path: Any) -> None:
    where = tiny_copy(tmp_path, is_matryoshka=True, matryoshka_dimensions=[8, 24])
    declare(where)
    with LLM(where, **SETTINGS) as llm:
        sizes = [len(llm.embed([1], PoolingParams(dimensions=n), use_tqdm=False)[0].outputs.embedding) for n in (8, 48)]
        assert sizes == [8, 48]
        with pytest.raises(RequestInvalid, match=r"dimensions=9 is none of the sizes .* trained for: 8, 24"):
            llm.embed([1], PoolingParams(dimensions=9))


def test_one_bad_text_among_others_is_an_error_of_its_own_and_is_not_cached() -> None:
    """Token 7 has a row of NaN in the embedding."""
    with embedder("qwen3", "lasttoken") as llm:
        llm.engine.parts.runner.model._embedding.packed[7] = torch.nan  # type: ignore[attr-defined]
        good, bad = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 8, 9]
        keys = [llm.engine.add_request(prompt, PoolingParams()) for prompt in (good, bad)]
        done: dict[int, Any] = {}
        while llm.engine.has_unfinished_requests():
            done |= dict(llm.engine.step())
        assert [done[key].outputs[0].finish_reason for key in keys] == ["stop", "error"]
        np.testing.assert_allclose([done[keys[0]].embedding], expected([good], "qwen3", "lasttoken"), **TOLERANCE)
        with pytest.raises(ModelError, match="NaN or infinite"):
            llm.embed(bad, use_tqdm=False)
        assert done[keys[1]].embedding is None
        assert llm.engine.scheduler.pool.num_cached <= 1


def test_an_aborted_text_gives_its_blocks_back() -> None:
    with embedder(max_num_batched_tokens=8) as llm:
        first, second = (llm.engine.add_request([1] * 20, PoolingParams(), request_id=name) for name in "ab")
        llm.engine.step()
        outputs = [llm.engine.abort_request(key) for key in (first, second)]
        assert [o and (o.request_id, o.outputs[0].finish_reason, o.embedding) for o in outputs] == [
            ("a", "abort", None),
            ("b", "abort", None),
        ]
        assert llm.engine.abort_request(first) is None
        assert not llm.engine.has_unfinished_requests()


def test_a_failing_device_ends_open_texts() -> None:
    with LLM(pooled("llama", "mean"), **SETTINGS) as llm:
        fail_at(llm, 1, lambda: RuntimeError("gone"), forever=True)
        with pytest.raises(EngineDead, match="gone"):
            llm.embed([[1, 2], [3]], use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()


def test_several_callers_in_an_event_loop() -> None:
    prompts = some_prompts([3, 30, 12], seed=10)

    async def run() -> list[EmbeddingRequestOutput]:
        async with AsyncLLM(pooled("llama", "mean"), **SETTINGS) as llm:
            with pytest.raises(RequestInvalid, match="use embed"):
                await anext(llm.generate([1]))
            with pytest.raises(RequestInvalid, match="pooling_params"):
                await llm.embed([1], SamplingParams())  # type: ignore[arg-type]
            return list(await asyncio.gather(*(llm.embed(prompt) for prompt in prompts)))

    found = asyncio.run(run())
    np.testing.assert_allclose(vectors(found), expected(prompts, "llama", "mean"), **TOLERANCE)


def test_requests_and_outputs_are_plain_records_that_travel() -> None:
    """The server's front sends the one to the engine's process and gets the other back."""
    params = pickle.loads(pickle.dumps(PoolingParams(dimensions=3)))
    with embedder() as llm:
        key = llm.engine.add_request({"prompt_token_ids": [1, 2]}, params, stream=True)
        ((found, output),) = llm.engine.step()
    assert found == key
    assert pickle.loads(pickle.dumps(output)) == output
    assert json.loads(json.dumps(output.embedding)) == output.embedding
