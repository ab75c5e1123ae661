"""Every sampling option through the engine: against transformers, and whatever batches, chunks and preemption do."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagedkv import LLM, RequestOutput, SamplingParams
from pagedkv.errors import RequestInvalid, RequestTooLong
from tests.helpers.engine_rig import (
    SETTINGS,
    drained,
    engine,
    folder,
    greedy,
    seeded,
    some_prompts,
    transformers_greedy,
    transformers_logits,
)
from tests.helpers.forced import force, replace_logits, told
from tests.helpers.tiny_models import VOCAB_SIZE

PROMPT, *OTHERS = some_prompts([11, 3, 18, 7], seed=5)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(folder(), **SETTINGS) as made:
        yield made
        drained(made)


def one(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0]


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder(), attn_implementation="eager").eval()


class Bias:
    """A LogitsProcessor that adds fixed numbers."""

    def __init__(self, bias: dict[int, float]) -> None:
        self._bias = bias

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token, value in self._bias.items():
            scores[:, token] += value
        return scores


class Counts:
    """A LogitsProcessor for presence and frequency penalty, which count the output only."""

    def __init__(self, prompt_len: int, presence: float, frequency: float) -> None:
        self._from, self._presence, self._frequency = prompt_len, presence, frequency

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, self._from :], minlength=scores.shape[1])
        return scores - self._frequency * counts - self._presence * (counts > 0)


def generated(hf: Any, prompt: list[int], count: int, processors: tuple[Any, ...] = (), **names: Any) -> list[int]:
    from transformers import LogitsProcessorList

    hf.generation_config.eos_token_id = names.pop("eos_token_id", None)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            logits_processor=LogitsProcessorList(processors),
            **names,
        )
    return output[0, len(prompt) :].tolist()


BIAS = {3: 4.0, 17: -100.0, 200: 2.5, 41: 6.0}


@pytest.mark.parametrize("penalty", [1.3, 2.5, 0.7])
def test_greedy_with_a_repetition_penalty_equals_transformers(llm: LLM, hf: Any, penalty: float) -> None:
    for prompt in (PROMPT, *OTHERS):
        got = one(llm, prompt, greedy(24, repetition_penalty=penalty)).outputs[0].token_ids
        assert got == generated(hf, prompt, 24, repetition_penalty=penalty)
    assert generated(hf, PROMPT, 24, repetition_penalty=penalty) != transformers_greedy(PROMPT, 24)


def test_greedy_with_other_options_equals_transformers(llm: LLM, hf: Any) -> None:
    plain = transformers_greedy(PROMPT, 24)
    counts = Counts(len(PROMPT), 1.5, 0.75)
    only = sorted({*plain, *range(0, VOCAB_SIZE, 3)} - {plain[0]})
    cases: list[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = [
        ({"logit_bias": BIAS}, (Bias(BIAS),), {}),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.75}, (counts,), {}),
        ({"bad_words": [[plain[0]], plain[3:5]]}, (), {"bad_words_ids": [[plain[0]], plain[3:5]]}),
        ({"allowed_token_ids": only}, (), {"suppress_tokens": [i for i in range(VOCAB_SIZE) if i not in only]}),
        ({"stop_token_ids": [plain[5]], "min_tokens": 9}, (), {"eos_token_id": plain[5], "min_new_tokens": 9}),
    ]
    for ours, processors, theirs in cases:
        got = one(llm, PROMPT, greedy(24, **ours)).outputs[0].token_ids
        assert got == generated(hf, PROMPT, 24, processors, **theirs), ours
        assert got != plain


def test_u42_stop_strings_end_where_transformers_ends(llm: LLM, hf: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder())
    bias = dict.fromkeys(range(94, VOCAB_SIZE), -100.0)  # printable one-byte characters only
    ids = generated(hf, PROMPT, 30, (Bias(bias),))
    text = tokenizer.decode(ids)
    for stop in (text[7:9], text[11:14], text[20]):
        want = generated(hf, PROMPT, 30, (Bias(bias),), stop_strings=[stop], tokenizer=tokenizer)
        answer = one(llm, PROMPT, greedy(30, logit_bias=bias, stop=[stop])).outputs[0]
        assert answer.token_ids == want == ids[: len(want)]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert answer.text == text[: text.index(stop)]


# -- log-probabilities -------------------------------------------------------------------------------------------------


def check_logprobs(entry: Any, logits: torch.Tensor, token: int, count: int) -> None:
    """One token's records against transformers."""
    exact = torch.log_softmax(logits.double(), -1)
    order = exact.argsort(descending=True, stable=True).tolist()
    assert list(entry) == list(dict.fromkeys([token, *order[:count]]))
    for i, record in entry.items():
        assert record.logprob == pytest.approx(float(exact[i]), abs=2e-4)
        assert record.rank == order.index(i) + 1


@pytest.mark.parametrize("params", [greedy(6, logprobs=3), seeded(4, 6, temperature=2.0, logprobs=0)])
def test_logprobs_are_the_models_own(llm: LLM, params: SamplingParams) -> None:
    answer = one(llm, PROMPT, params).outputs[0]
    logits = transformers_logits([*PROMPT, *answer.token_ids])[len(PROMPT) - 1 :]
    assert answer.logprobs is not None and len(answer.logprobs) == 6
    for entry, row, token in zip(answer.logprobs, logits, answer.token_ids, strict=False):
        check_logprobs(entry, row, token, params.logprobs or 0)
    own = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(own))


def test_logprobs_do_not_see_what_sampling_changes(llm: LLM) -> None:
    options = {"repetition_penalty": 1.8, "logit_bias": {7: 30.0}, "top_k": 2, "temperature": 3.0}
    answer = one(llm, PROMPT, seeded(1, 4, logprobs=2, **options)).outputs[0]
    logits = transformers_logits([*PROMPT, *answer.token_ids])[len(PROMPT) - 1 :]
    assert answer.logprobs is not None
    for entry, row, token in zip(answer.logprobs, logits, answer.token_ids, strict=False):
        check_logprobs(entry, row, token, 2)


def test_prompt_logprobs_are_the_models_own_and_texts_are_told(llm: LLM) -> None:
    output = one(llm, "a word", SamplingParams(max_tokens=0, prompt_logprobs=4))
    ids = output.prompt_token_ids
    logits = transformers_logits(ids)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(ids)
    assert output.prompt_logprobs[0] is None
    for at in range(1, len(ids)):
        check_logprobs(output.prompt_logprobs[at], logits[at - 1], ids[at], 4)
    own = [entry[i].decoded_token for entry, i in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]  # type: ignore[index]
    assert "".join(own) == "a word"


def test_every_token_of_the_vocabulary_on_request(llm: LLM) -> None:
    output = one(llm, PROMPT, greedy(1, logprobs=-1, prompt_logprobs=VOCAB_SIZE))
    for entry in (output.outputs[0].logprobs[0], output.prompt_logprobs[3]):  # type: ignore[index]
        assert len(entry) == VOCAB_SIZE
        assert sum(math.exp(record.logprob) for record in entry.values()) == pytest.approx(1, abs=1e-6)
        assert sorted(record.rank for record in entry.values()) == list(range(1, VOCAB_SIZE + 1))


# -- what changes nothing ----------------------------------------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "temperature": 1.7,
    "top_p": 0.95,
    "top_k": 60,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": BIAS,
    "bad_words": ["e", [5, 6], [9]],
    "min_tokens": 4,
    "stop": ["\x00\x00", "zz"],
    "stop_token_ids": [12],
    "logprobs": 2,
    "prompt_logprobs": 1,
    "n": 2,
    "seed": 11,
    "max_tokens": 12,
    "ignore_eos": True,
}


def shape(output: RequestOutput) -> Any:
    """Everything that must not depend on the surroundings."""
    answers = [(a.token_ids, a.text, a.finish_reason, a.stop_reason, a.logprobs) for a in output.outputs]
    return answers, output.prompt_logprobs


def test_all_options_in_any_surroundings() -> None:
    mine = SamplingParams(**EVERYTHING)
    others = [greedy(9, repetition_penalty=1.4), SamplingParams(**EVERYTHING | {"seed": 3, "n": 3}), seeded(1, 9)]
    with engine(enable_prefix_caching=False) as llm:
        expected = shape(one(llm, PROMPT, mine))
    assert len({tuple(answer[0]) for answer in expected[0]}) == 2
    surroundings: list[dict[str, Any]] = [
        {},
        {"max_num_batched_tokens": 5, "max_num_seqs": 4},
        {"num_blocks": 14, "block_size": 3, "max_model_len": 31},
        {"max_num_seqs": 1},
        {"enable_chunked_prefill": False},
    ]
    for settings in surroundings:
        with engine(**settings) as llm:
            for _ in ("uncached", "cached"):
                outputs = llm.generate([*OTHERS, PROMPT, PROMPT], [*others, mine, mine], use_tqdm=False)
                assert shape(outputs[3]) == shape(outputs[4]) == expected, settings
            if "num_blocks" in settings:
                assert llm.engine.scheduler.num_preemptions > 0


def test_interrupted_steps_tell_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = SamplingParams(**EVERYTHING)
    with engine() as llm:
        expected = shape(one(llm, PROMPT, mine))
    for place in ("commit", "append"):
        for at in range(1, 5):
            with engine() as llm:
                original, calls = getattr(llm.engine.scheduler, place), []

                def once(*args: Any, original: Any = original, calls: Any = calls, at: int = at, **names: Any) -> Any:
                    calls.append(1)
                    if len(calls) == at:
                        raise KeyboardInterrupt
                    return original(*args, **names)

                monkeypatch.setattr(llm.engine.scheduler, place, once)
                key, done = llm.engine.add_request(PROMPT, mine, stream=True), {}
                while llm.engine.has_unfinished_requests():
                    with contextlib.suppress(KeyboardInterrupt):
                        done |= dict(llm.engine.step())
                assert shape(done[key]) == expected, (place, at)
                assert len(calls) > at


# -- several samples ---------------------------------------------------------------------------------------------------


def test_a_sample_alone_is_what_it_is_among_many(llm: LLM) -> None:
    """n decides how many samples there are, not what they are; the first is that of n=1."""
    answers = {n: [a.token_ids for a in one(llm, PROMPT, seeded(7, 9, n=n)).outputs] for n in (1, 2, 5, 12)}
    assert answers[12][:5] == answers[5] and answers[5][:2] == answers[2] and answers[2][:1] == answers[1]
    assert len({tuple(ids) for ids in answers[12]}) == 12, "also those that found no row at first"


def test_samples_stream_and_end_on_their_own(llm: LLM) -> None:
    params = seeded(7, 9, n=3)
    whole = one(llm, PROMPT, params)
    others = whole.outputs[0].token_ids + whole.outputs[2].token_ids
    at, stop = next((at, i) for at, i in enumerate(whole.outputs[1].token_ids) if i not in others and at > 1)
    params = seeded(7, 9, n=3, stop_token_ids=[stop])
    samples, output = told(llm, PROMPT, params)
    assert [s.last.finish_reason for s in samples if s.last] == ["length", "stop", "length"]
    assert [a.token_ids for a in output.outputs][::2] == [a.token_ids for a in whole.outputs][::2]
    assert output.outputs[1].token_ids == whole.outputs[1].token_ids[: at + 1]
    assert [s.text for s in samples] == [a.text for a in one(llm, PROMPT, params).outputs]


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_abort_ends_every_sample_whenever(steps: int) -> None:
    with engine(max_num_batched_tokens=6, max_num_seqs=3) as llm:
        key = llm.engine.add_request(PROMPT, seeded(1, 30, n=5))
        other = llm.engine.add_request(PROMPT, seeded(1, 30, n=2))
        for _ in range(steps):
            llm.engine.step()
        output = llm.engine.abort_request(key)
        assert output is not None and output.finished
        assert [a.finish_reason for a in output.outputs] == ["abort"] * 5
        assert llm.engine.abort_request(key) is None
        done: dict[int, RequestOutput] = {}
        while llm.engine.has_unfinished_requests():
            done |= dict(llm.engine.step())
        assert list(done) == [other] and len(done[other].outputs) == 2


def test_unusable_logits_of_the_prompt_end_all_samples(caplog: pytest.LogCaptureFixture) -> None:
    with engine() as llm:
        run = llm.engine.parts.runner.run
        llm.engine.parts.runner.run = lambda step: run(step) * torch.nan  # type: ignore[method-assign]
        for params in (seeded(1, 4, n=3), seeded(1, 4, n=3, prompt_logprobs=1)):
            output = one(llm, PROMPT, params)
            assert [a.finish_reason for a in output.outputs] == ["error"] * 3
            assert [a.token_ids for a in output.outputs] == [[]] * 3
        output = one(llm, PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=1))
        assert output.outputs[0].finish_reason == "error"
        assert "no usable logits" in caplog.text
        assert llm.engine.scheduler.pool.num_cached == 0, "nobody finds what gave them"


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_settings_that_mask_every_token_end_one_request(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    params = greedy(5, allowed_token_ids=[5], bad_words=[[5, 5]])
    outputs = llm.generate([PROMPT, PROMPT], [params, greedy(5)], use_tqdm=False)
    assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].token_ids) == ("error", [5])
    assert outputs[1].outputs[0].token_ids == transformers_greedy(PROMPT, 5)
    assert "mask every token" in caplog.text


@pytest.mark.parametrize(
    ("names", "field"),
    [
        ({"allowed_token_ids": [5], "bad_words": [[5]]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, 6], "stop_token_ids": [5, 6], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"bad_words": [[1, VOCAB_SIZE]]}, "bad_words"),
        ({"logprobs": VOCAB_SIZE + 1}, "logprobs"),
        ({"bad_words": ["\ud800"]}, "prompt"),
    ],
)
def test_what_cannot_be_is_refused_at_submission(llm: LLM, names: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        one(llm, PROMPT, greedy(4, **names))
    assert caught.value.field == field
    drained(llm)


def test_text_options_without_a_tokenizer_are_refused() -> None:
    with engine(skip_tokenizer_init=True) as llm:
        for names, message in (({"stop": "x"}, "use stop_token_ids"), ({"bad_words": ["x"]}, "lists of token ids")):
            with pytest.raises(RequestInvalid, match=message):
                one(llm, PROMPT, greedy(4, **names))
        output = one(llm, PROMPT, greedy(4, logprobs=1, bad_words=[[1]]))
        assert output.outputs[0].logprobs[0].popitem()[1].decoded_token is None  # type: ignore[index]


def test_a_prompt_that_is_scored_fits_to_the_last_token() -> None:
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    with engine(max_model_len=16) as llm:
        (prompt,) = some_prompts([16])
        assert len(one(llm, prompt, score).prompt_logprobs or ()) == 16
        with pytest.raises(RequestTooLong):
            one(llm, [*prompt, 1], score)
    with engine(num_blocks=4, max_model_len=40) as llm:
        (prompt,) = some_prompts([12])
        assert len(one(llm, prompt, score).prompt_logprobs or ()) == 12
        with pytest.raises(RequestTooLong, match=r"13 tokens can never fit: the cache holds"):
            one(llm, [*prompt, 1], score)
        assert one(llm, [1], score).prompt_logprobs == [None]


# -- text --------------------------------------------------------------------------------------------------------------


def test_words_that_are_bad_as_text_never_come(llm: LLM) -> None:
    free = one(llm, PROMPT, greedy(12, allowed_token_ids=list(b"abcdef ")))
    word = free.outputs[0].text[2:4]
    got = one(llm, PROMPT, greedy(12, allowed_token_ids=list(b"abcdef "), bad_words=[word])).outputs[0]
    assert word not in got.text and got.text[:3] == free.outputs[0].text[:3]


def test_what_was_held_back_comes_at_the_end(llm: LLM) -> None:
    with engine() as llm:
        force(llm, list(b"abcEN"))
        samples, output = told(llm, PROMPT, greedy(5, stop=["END"]))
        assert samples[0].pieces == ["a", "b", "c", "", "EN"]
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abcEN", "length")


def test_no_penalty_reaches_a_neighbour(llm: LLM) -> None:
    params = [greedy(9), greedy(9, repetition_penalty=2.0, min_tokens=5), greedy(9), greedy(9, logit_bias={5: 100})]
    outputs = llm.generate([PROMPT] * 4, params, use_tqdm=False)
    ids = [output.outputs[0].token_ids for output in outputs]
    assert ids[0] == ids[2] == transformers_greedy(PROMPT, 9)
    assert ids[3] == [5] * 9


def test_replaced_logits_are_what_is_scored(llm: LLM) -> None:
    with engine() as llm:
        replace_logits(llm, lambda row, request, index: torch.zeros_like(row))
        entry = one(llm, PROMPT, greedy(1, logprobs=1)).outputs[0].logprobs[0]  # type: ignore[index]
        assert entry[0].logprob == pytest.approx(-math.log(VOCAB_SIZE), abs=1e-6)
