"""`LLM.score`: each token's probability against transformers' logits, window by window, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import LLM, Score
from pagedkv.engine.scoring import windows
from pagedkv.errors import ModelError, RequestInvalid
from tests.helpers.engine_rig import SETTINGS, drained, engine, folder, some_prompts, transformers_logits
from tests.helpers.tiny_models import BOS


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(folder(), **SETTINGS) as made:
        yield made
        drained(made)


def expected(ids: list[int], context: int, stride: int) -> list[float | None]:
    """The usual sliding window: what an earlier one scored is context in the next."""
    scores: list[float | None] = [None] * len(ids)
    for begin in range(0, len(ids), stride):
        piece = ids[begin : begin + context]
        probabilities = torch.log_softmax(transformers_logits(piece).double(), dim=-1)
        for at in range(1, len(piece)):
            if scores[begin + at] is None:
                scores[begin + at] = float(probabilities[at - 1, piece[at]])
        if begin + context >= len(ids):
            break
    return scores


def close(score: Score, scores: list[float | None]) -> None:
    assert score.logprobs[0] is None
    torch.testing.assert_close(score.logprobs[1:], scores[1:], atol=2e-4, rtol=0)
    total = sum(value for value in scores if value is not None)
    assert score.tokens == len(scores) - 1
    assert score.logprob == pytest.approx(total, abs=1e-3 * score.tokens)
    assert score.perplexity == pytest.approx(math.exp(-total / score.tokens), rel=1e-3)


def test_texts_and_ids_are_scored_as_transformers_does(llm: LLM) -> None:
    ids = some_prompts([40])[0]
    text, tokens, longer = llm.score(["kůň is a horse", ids, "x" * 200], use_tqdm=False)
    assert text.token_ids == [BOS, *"kůň is a horse".encode()]
    assert tokens.token_ids == ids
    for score in (text, tokens, longer):
        assert (score.windows, score.context, score.stride) == (1, 256, 128)
        close(score, expected(score.token_ids, 256, 128))
    (again,) = llm.score(ids, use_tqdm=False)
    assert again.logprobs == tokens.logprobs, "also with what the first call left in the cache"


@pytest.mark.parametrize(("context", "stride"), [(16, 8), (16, 15), (7, 1), (2, 1), (100, 3)])
def test_a_long_text_is_scored_in_windows(llm: LLM, context: int, stride: int) -> None:
    (ids,) = some_prompts([45], seed=3)
    (score,) = llm.score([ids], context=context, stride=stride, use_tqdm=False)
    assert (score.context, score.stride) == (context, stride)
    close(score, expected(ids, context, stride))


def test_a_text_longer_than_the_model_has_half_a_window_before_each_token(llm: LLM) -> None:
    (ids,) = some_prompts([600], seed=4)
    (score,) = llm.score([ids], use_tqdm=False)
    assert score.windows == 4 and score.stride == 128
    close(score, expected(ids, 256, 128))
    drained(llm)


def test_without_chunks_a_window_fits_a_step() -> None:
    with engine(enable_chunked_prefill=False, max_num_batched_tokens=24) as llm:
        (ids,) = some_prompts([50], seed=5)
        (score,) = llm.score([ids], use_tqdm=False)
        assert score.context == 24
        close(score, expected(ids, 24, 12))


@given(st.integers(2, 60), st.integers(2, 20), st.data())
def test_windows_score_each_token_but_the_first_once(length: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context - 1))
    found = windows(length, context, stride)
    assert [at for window in found for at in range(window.first, window.end)] == list(range(1, length))
    for window in found:
        assert window.start < window.first and window.end - window.start <= context
    for window in found[1:]:
        assert window.first - window.start >= context - stride


@pytest.mark.parametrize(
    ("texts", "names", "field"),
    [
        ([[5]], {}, "prompt"),
        ([[]], {}, "prompt"),
        ([[1, 320]], {}, "prompt_token_ids"),
        (["ab", [5]], {}, "prompt"),
        (["ab"], {"context": 1}, "context"),
        (["ab"], {"context": 257}, "context"),
        (["ab"], {"context": "9"}, "context"),
        (["ab"], {"context": True}, "context"),
        (["ab"], {"stride": 0}, "stride"),
        (["ab"], {"context": 8, "stride": 8}, "stride"),
        (["ab"], {"stride": 2.0}, "stride"),
    ],
)
def test_bad_input_is_named_and_nothing_is_queued(llm: LLM, texts: Any, names: dict[str, Any], field: str) -> None:
    steps = llm.engine.stats.steps
    with pytest.raises(RequestInvalid) as caught:
        llm.score(texts, use_tqdm=False, **names)
    assert caught.value.field == field
    assert str(caught.value).startswith("text 1: ") == (len(texts) == 2)
    assert llm.engine.stats.steps == steps


def test_no_texts_are_no_scores(llm: LLM) -> None:
    assert llm.score([], use_tqdm=False) == []


def test_unusable_logits_are_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.engine.parts.runner
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda step: run(step) * float("nan"))
    with pytest.raises(ModelError, match="no usable logits"):
        llm.score(["ab", "cd"], use_tqdm=False)
    drained(llm)


def test_a_perplexity_that_is_no_float_is_infinite() -> None:
    assert Score(token_ids=[1, 2], logprobs=[None, -9999.0], context=2, stride=1, windows=1).perplexity == math.inf
