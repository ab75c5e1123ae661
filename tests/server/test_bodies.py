"""What bodies accept, what of it reaches the sampler, and how problems of their form are told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic import ValidationError

from pagedkv.api.errors import RequestInvalid, RequestTooLong
from pagedkv.sampling.params import SamplingParams
from pagedkv.server.answers import check, fingerprint, usage
from pagedkv.server.bodies import ChatBody, CompletionBody, Generating, TokenizeBody
from pagedkv.server.errors import HTTPError, as_http, body_of, told_as
from pagedkv.server.messages import Facts, Piece
from pagedkv.server.problems import refusal

MESSAGES: Any = [{"role": "user", "content": "x"}]


def test_settings_that_were_given_reach_the_sampler_under_its_names() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "n": 2,
        "stop": ["a"],
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -1.0},
        "seed": 3,
        "min_tokens": 1,
        "stop_token_ids": [9],
        "bad_words": ["b"],
        "allowed_token_ids": [1, 2],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "prompt_logprobs": 1,
    }
    assert CompletionBody(prompt="x", **given).sampling() == given
    assert SamplingParams(**given)  # which knows each of them
    nulls: dict[str, Any] = dict.fromkeys(given)
    assert CompletionBody(prompt="x", **nulls).sampling() == {}


def test_openais_names_without_a_meaning_here_are_taken_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    body = ChatBody.model_validate(
        {"messages": MESSAGES, "metadata": {}, "store": False, "service_tier": "auto", "prompt_cache_key": "k"}
    )
    body.check_names("label")
    assert not caplog.records


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, TokenizeBody])
def test_u63_each_known_name_that_is_not_built_is_refused_and_its_neutral_values_are_not(kind: Any) -> None:
    rest: Any = {"prompt": "x"} if kind is not ChatBody else {"messages": MESSAGES}
    assert kind.unsupported
    for name, neutral in kind.unsupported.items():
        with pytest.raises(RequestInvalid) as caught:
            kind.model_validate({**rest, name: ["something"]}).check_names("label")
        assert caught.value.field == name and str(caught.value).startswith(f"{name} is not supported")
        for value in neutral:
            kind.model_validate({**rest, name: value}).check_names("label")


def test_u63_unknown_names_are_logged_bounded_and_escaped(caplog: pytest.LogCaptureFixture) -> None:
    names = [f"unknown_{number}" for number in range(12)] + ["x" * 1000, "line\nbreak"]
    body = CompletionBody.model_validate({"prompt": "x", "stream_options": {"speed": 1}} | dict.fromkeys(names, 1))
    with caplog.at_level(logging.WARNING, "pagedkv.server"):
        body.check_names("label")
    (record,) = caplog.records
    assert "'unknown_0', " in record.message and record.message.endswith(" and 7 more")
    few = CompletionBody.model_validate({"prompt": "x", "line\nbreak": 1, "stream_options": {"speed": 1}})
    few.check_names("label")
    assert "'line\\nbreak'" in caplog.text and "'stream_options.speed'" in caplog.text


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("response_format", {"json_object": True})),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            ("response_format", {"json": {"type": "null"}}),
        ),
        ({"guided_json": {}}, ("guided_json", {"json": {}})),
        ({"guided_choice": ["a"]}, ("guided_choice", {"choice": ["a"]})),
        ({"structured_outputs": {"json": {}}}, ("structured_outputs.json", {"json": {}})),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {"json_object": True}}, ("structured_outputs.json_object", {"json_object": True})),
    ],
)
def test_what_form_is_asked_for_and_by_which_field(body: Any, form: Any) -> None:
    read = CompletionBody.model_validate({"prompt": "x", **body})
    assert read.guided() == form
    assert read.names() == ({} if form is None else {"guided_decoding": form[0]})


def test_two_forms_exclude_each_other() -> None:
    body = CompletionBody.model_validate({"prompt": "x", "guided_regex": "a", "structured_outputs": {"regex": "a"}})
    with pytest.raises(RequestInvalid, match=r"guided_regex and structured_outputs\.regex exclude") as caught:
        body.guided()
    assert caught.value.field == "structured_outputs.regex"


def problems(kind: type[Generating], body: Any) -> HTTPError:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    return refusal(caught.value.errors())


def test_problems_are_told_by_path_without_the_value() -> None:
    error = problems(ChatBody, {"messages": [{}, 5], "logit_bias": {"7": "secret"}, "stop": [5]})
    assert (error.status, error.param) == (400, "stop")
    assert str(error) == (
        "stop must be a text or a list of texts; logit_bias.7 must be a number; messages[1] must be an object"
    )


def test_errors_of_the_engine_come_in_the_names_of_the_body() -> None:
    for error, param, message in (
        (RequestTooLong("too long"), "messages", "too long"),
        (RequestInvalid("token id 9 at 0", field="prompt_token_ids"), "messages", "token id 9 at 0"),
        (RequestInvalid("guided_decoding json cannot", field="guided_decoding"), "guided_json", "guided_json cannot"),
        (RequestInvalid("seed must", field="seed"), "seed", "seed must"),
    ):
        with pytest.raises((HTTPError, RequestInvalid)) as caught, told_as("messages", {"guided_decoding": param}):
            raise error
        told = body_of(caught.value)["error"]
        assert (told["param"], told["message"]) == (param, message)
        assert as_http(caught.value).status == 400


def test_a_long_message_is_cut_and_says_so() -> None:
    message = body_of(RequestInvalid("9" * 5000, field="seed"))["error"]["message"]
    assert message == "9" * 2000 + " ... (5000 characters)"


def test_an_answer_without_usable_logits_is_an_error_of_the_server() -> None:
    piece = Piece(key=1, index=0, text="", token_ids=[], finish_reason="error")
    with pytest.raises(HTTPError) as caught:
        check(piece)
    assert (caught.value.status, caught.value.code) == (500, "no_usable_logits")


def test_the_fingerprint_changes_with_what_answers_depend_on() -> None:
    def of(**changes: Any) -> str:
        facts: dict[str, Any] = {"backend": "cpu", "dtype": "fp32", "kv_dtype": "fp32", "quantization": "none"}
        facts |= {"block_size": 16, "num_blocks": 9, "max_model_len": 64, "max_num_seqs": 4, "capacity": 64}
        return fingerprint(Facts(**{**facts, "vocab_size": 9, "pooling": False, "tokenizer": None, **changes}))

    assert of() == of(num_blocks=99, max_num_seqs=8)
    assert len({of(), of(dtype="bf16"), of(backend="other"), of(quantization="gguf")}) == 4


def test_counts_before_any_ending_are_those_of_the_answer() -> None:
    assert usage([], 3)["total_tokens"] == 3
