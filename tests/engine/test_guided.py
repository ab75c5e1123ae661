"""Guided decoding through the engine: every answer keeps to its grammar, whatever the model wants and whoever runs."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import torch

from pagedkv import LLM, CompletionOutput, GuidedDecodingParams, SamplingParams
from pagedkv.errors import RequestInvalid
from tests.helpers.engine_rig import SETTINGS, drained, engine, folder, greedy, seeded, solo, some_prompts
from tests.helpers.forced import force, replace_logits, told
from tests.helpers.tiny_models import BOS, EOS, VOCAB_SIZE

PROMPT, *OTHERS = some_prompts([11, 3, 18, 7], seed=5)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None, 2.5]}, "maxItems": 3},
        "of": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[a-z]{1,4}"
SUM = 'start: term ("+" term){1,3}\nterm: /[1-9][0-9]?/ | "(" start ")"'


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(folder(), **SETTINGS) as made:
        yield made
        drained(made)


def guided(seed: int, max_tokens: int | None = None, **names: Any) -> SamplingParams:
    sampling = {key: names.pop(key) for key in list(names) if key not in ("json", "regex", "choice", "grammar")}
    return SamplingParams(
        **{"temperature": 1.5, "seed": seed, "max_tokens": max_tokens, "guided_decoding": names} | sampling
    )


def answers(llm: LLM, params: list[SamplingParams], prompt: Any = PROMPT) -> list[CompletionOutput]:
    outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_json_validates_against_its_schema(llm: LLM) -> None:
    found = answers(llm, [guided(seed, json=PERSON) for seed in range(12)])
    for answer in found:
        assert answer.finish_reason == "stop" and answer.token_ids[-1] in (BOS, EOS)
        jsonschema.validate(json.loads(answer.text), PERSON)
    assert len({answer.text for answer in found}) == 12


def test_regex_choice_and_grammar(llm: LLM) -> None:
    for seed in range(4):
        date, choice, total = answers(
            llm,
            [guided(seed, regex=DATE), guided(seed, choice=["yes", "yes, of course", "né"]), guided(seed, grammar=SUM)],
        )
        assert re.fullmatch(DATE, date.text) and date.finish_reason == "stop"
        assert choice.text in ("yes", "yes, of course", "né") and choice.finish_reason == "stop"
        if total.finish_reason == "stop":
            assert re.fullmatch(r"[0-9+()]+", total.text) and eval(total.text) > 1


def test_any_json_object_and_any_json_text_that_was_asked_for_as_text(llm: LLM) -> None:
    params = [SamplingParams(seed=seed, max_tokens=60, guided_decoding={"json_object": True}) for seed in range(8)]
    ended = [answer.text for answer in answers(llm, params) if answer.finish_reason == "stop"]
    assert ended and all(isinstance(json.loads(text), dict) for text in ended)
    (one,) = answers(llm, [guided(3, json='{"type": "boolean"}')])
    assert json.loads(one.text) in (True, False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_fight_the_grammar(temperature: float) -> None:
    with engine() as llm:
        force(llm, [*b'Sure! Here is your JSON: {"name"', EOS, EOS, EOS])
        for answer in answers(llm, [guided(seed, json=PERSON, temperature=temperature) for seed in range(2)]):
            jsonschema.validate(json.loads(answer.text), PERSON)
        (chosen,) = answers(llm, [guided(0, choice=["no", "yes"], temperature=temperature)])
        assert chosen.text in ("no", "yes")


def test_the_most_probable_of_what_the_grammar_allows_is_taken(llm: LLM) -> None:
    """Against a masked argmax over the engine's own logits."""
    with engine() as llm:
        row = torch.zeros(VOCAB_SIZE)
        row[ord("z")], row[ord("q")], row[ord("c")], row[EOS] = 9, 8, 7, 6
        replace_logits(llm, lambda *_: row)
        for regex, text in (("[a-f]{3}", "ccc"), ("[a-f]*", "c" * 12), ("(a|q)?[bc]?", "qc")):
            (answer,) = answers(llm, [guided(0, 12, regex=regex, temperature=0)])
            assert answer.text == text


def test_a_stream_gives_the_same_text(llm: LLM) -> None:
    params = guided(5, json=PERSON, logprobs=2)
    (sample,), output = told(llm, PROMPT, params)
    assert sample.text == answers(llm, [params])[0].text == output.outputs[0].text
    jsonschema.validate(json.loads(sample.text), PERSON)
    records = output.outputs[0].logprobs
    assert records is not None and len(records) == len(output.outputs[0].token_ids)


# -- with others -------------------------------------------------------------------------------------------------------


def test_u54_neighbours_keep_their_tokens(llm: LLM) -> None:
    free = [greedy(20), seeded(7, 20), seeded(8, 20, top_k=5)]
    alone = [solo(prompt, params) for prompt, params in zip(OTHERS, free, strict=True)]
    prompts = [PROMPT, OTHERS[0], PROMPT, OTHERS[1], PROMPT, OTHERS[2]]
    mixed = [guided(1, json=PERSON), free[0], guided(2, regex=DATE), free[1], guided(3, choice=["no"]), free[2]]
    outputs = llm.generate(prompts, mixed, use_tqdm=False)
    assert [outputs[at].outputs[0].token_ids for at in (1, 3, 5)] == alone
    assert outputs[4].outputs[0].text == "no"
    for at in (2, 4):
        (again,) = answers(llm, [mixed[at]])
        assert again.token_ids == outputs[at].outputs[0].token_ids


@pytest.mark.parametrize("host", [{}, {"swap_blocks": 40, "preemption_mode": "swap"}])
def test_preemption_goes_on_in_the_middle_of_the_grammar(llm: LLM, host: dict[str, Any]) -> None:
    params = [guided(seed, json=PERSON) for seed in range(4)]
    prompts = some_prompts([9, 12, 10, 11], seed=2)
    with engine(num_blocks=24, enable_prefix_caching=False, **host) as small:
        outputs = small.generate(prompts, params, use_tqdm=False)
        assert small.engine.scheduler.num_preemptions > 0
        assert any(output.metrics.num_swaps for output in outputs) == bool(host)
    unhindered = llm.generate(prompts, params, use_tqdm=False)
    for output, other in zip(outputs, unhindered, strict=True):
        jsonschema.validate(json.loads(output.outputs[0].text), PERSON)
        assert output.outputs[0].token_ids == other.outputs[0].token_ids


def test_u64_each_of_n_answers_has_its_own_place(llm: LLM) -> None:
    found = answers(llm, [guided(4, json=PERSON, n=5), guided(4, regex=DATE, n=3)])
    for answer in found[:5]:
        jsonschema.validate(json.loads(answer.text), PERSON)
    assert all(re.fullmatch(DATE, answer.text) for answer in found[5:])
    assert len({answer.text for answer in found}) == 8


def test_a_prompt_that_arrives_in_chunks_and_a_cached_one(llm: LLM) -> None:
    prompt = some_prompts([150], seed=9)[0]
    first, second = (answers(llm, [guided(6, regex=DATE)], prompt)[0] for _ in range(2))
    assert first.token_ids == second.token_ids and re.fullmatch(DATE, first.text)


# -- with other settings -----------------------------------------------------------------------------------------------


def test_other_masks_hold_too(llm: LLM) -> None:
    base = {"regex": "[a-e]{4,}f"}
    (words,) = answers(llm, [guided(1, 40, **base, bad_words=["c", [ord("a"), ord("b")]])])
    assert not {"c", "ab"} & {words.text[at : at + n] for n in (1, 2) for at in range(len(words.text))}
    (allowed,) = answers(llm, [guided(1, 12, **base, allowed_token_ids=[ord("b"), ord("z")])])
    assert (allowed.text, allowed.finish_reason) == ("b" * 12, "length")
    (longer,) = answers(llm, [guided(1, 40, regex="a*", min_tokens=9, temperature=0, logit_bias={EOS: 100, BOS: 99})])
    assert (longer.text, longer.token_ids[-1]) == ("a" * 9, EOS)
    (biased,) = answers(llm, [guided(1, 9, **base, temperature=0, logit_bias={ord("z"): 100, ord("d"): 90})])
    assert biased.text == "d" * 9


def test_a_stop_string_and_a_stop_id_end_the_answer_before_its_grammar_does(llm: LLM) -> None:
    (text,) = answers(llm, [guided(1, regex="ab{3}c{9}", stop=["bc"])])
    assert (text.text, text.finish_reason, text.stop_reason) == ("abb", "stop", "bc")
    (by_id,) = answers(llm, [guided(1, regex="ab{3}c{9}", stop_token_ids=[ord("c")])])
    assert (by_id.text, by_id.stop_reason) == ("abbb", ord("c"))


@pytest.mark.parametrize(
    "names",
    [
        {"regex": "ab", "min_tokens": 5},
        {"regex": "ab", "allowed_token_ids": [97, 99]},
        {"regex": "ab[cd]", "bad_words": ["c", "d"]},
    ],
)
def test_where_nothing_is_left_only_that_request_ends(llm: LLM, names: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "pagedkv.engine"):
        outputs = llm.generate([PROMPT, PROMPT], [guided(0, **names), greedy(8)], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[0].outputs[0].text in ("a", "ab")
    assert outputs[1].outputs[0].token_ids == solo(PROMPT, greedy(8))
    assert "the request's settings mask every token" in caplog.text


def test_where_llguidance_gives_up_only_that_request_ends_and_the_log_says_why(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700)}}
    with caplog.at_level(logging.ERROR, "pagedkv.engine"):
        outputs = llm.generate([PROMPT, PROMPT], [guided(0, json=wide), greedy(8)], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[1].outputs[0].token_ids == solo(PROMPT, greedy(8))
    assert "its grammar cannot go on" in caplog.text and "items" in caplog.text


# -- refused before anything runs --------------------------------------------------------------------------------------


def test_what_only_the_tokens_show_is_refused_before_it_is_queued(llm: LLM) -> None:
    for grammar, reason in (("start: <|nothing|>", "unknown special token"), ("start: <[999999]>", "too large")):
        with pytest.raises(RequestInvalid, match=reason) as caught:
            llm.engine.add_request(PROMPT, guided(0, grammar=grammar))
        assert caught.value.field == "guided_decoding"
    with pytest.raises(RequestInvalid, match="cannot be used"):
        llm.generate(PROMPT, guided(0, grammar="start: start"), use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def test_a_special_token_that_the_grammar_names_may_come(llm: LLM) -> None:
    (answer,) = answers(llm, [guided(0, grammar='start: "a" <[256]> "b"', skip_special_tokens=False)])
    assert answer.token_ids[:1] == [ord("a")]


def test_without_a_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    with engine(skip_tokenizer_init=True) as llm:
        with pytest.raises(RequestInvalid, match="skip_tokenizer_init") as caught:
            llm.generate(PROMPT, guided(0, choice=["a"]), use_tqdm=False)
        assert caught.value.field == "guided_decoding"
        assert not llm.engine.has_unfinished_requests()


def test_the_newer_name(llm: LLM) -> None:
    params = GuidedDecodingParams(choice=["b"])
    for names in (
        {"structured_outputs": params},
        {"structured_outputs": {"choice": ["b"]}},
        {"guided_decoding": params},
    ):
        (answer,) = answers(llm, [SamplingParams(**names)])
        assert answer.text == "b"
