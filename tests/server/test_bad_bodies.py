"""Bodies that are wrong in every way: the right status, an error that names the field, and the next request served."""

from __future__ import annotations

import builtins
import io
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedkv.server.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.helpers.api_rig import Api

SECRET = "Zaubersprueche"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "<<Hi>>"}]
GOOD: dict[str, Any] = {
    TEXT: {"prompt": "<<Hi>>"},
    CHAT: {"messages": MESSAGES},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [72]},
}
BODIES: Any = {TEXT: CompletionBody, CHAT: ChatBody, "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}


@pytest.fixture(scope="module")
def http(api: Api) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, timeout=30) as made:
        yield made


@pytest.fixture(autouse=True)
def served_after(http: httpx.Client) -> Iterator[None]:
    yield
    answer = http.post(TEXT, json=GOOD[TEXT])
    assert answer.json()["choices"][0]["text"] == "Hi"


def post(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return http.post(path, content=text, headers={"Content-Type": "application/json"})


def refused(answer: httpx.Response, status: int = 400) -> Any:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and len(error["message"]) < 2100
    return error


# -- what is no JSON ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is missing"),
        (b"{", "no JSON"),
        (b"{'prompt': 'x'}", "no JSON"),
        (b'{"prompt": "x",}', "no JSON"),
        (b'{"prompt": "x"} {}', "Extra data at character 16"),
        (b"null", "the body must be an object"),
        (b"[]", "the body must be an object"),
        (b'"text"', "the body must be an object"),
        (b"7", "the body must be an object"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        ('{"prompt": "x"}'.encode("utf-16"), "not UTF-8 at byte 0"),
        (b'\xef\xbb\xbf{"prompt": "x"}', "BOM"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN and Infinity"),
        (b'{"prompt": "x", "temperature": -Infinity}', "NaN and Infinity"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature must be a finite number"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"prompt": "x", "user": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", "nested too deeply"),
    ],
)
def test_a_body_that_is_no_json_object(http: httpx.Client, body: bytes, says: str) -> None:
    assert says in refused(post(http, TEXT, body))["message"]


# -- fields ------------------------------------------------------------------------------------------------------------

FIELDS: Any = [
    (TEXT, {"prompt": 5}, "prompt", "must be a text, a list of texts, a list of token ids"),
    (TEXT, {"prompt": None}, "prompt", "must be a text"),
    (TEXT, {"prompt": ["x", 5]}, "prompt", "must be a text"),
    (TEXT, {"prompt": [True]}, "prompt", "must be a text"),
    (TEXT, {"prompt": [1.0]}, "prompt", "must be a text"),
    (TEXT, {"prompt": ""}, None, None),  # a text of no characters is <bos> with this model, and is served
    (TEXT, {"prompt": []}, "prompt", "is empty"),
    (TEXT, {"prompt": [[]]}, "prompt", "is empty"),
    (TEXT, {"prompt": [[1], []]}, "prompt", "prompt 1 is empty"),
    (TEXT, {"prompt": [320]}, "prompt", "outside the vocabulary of 320"),
    (TEXT, {"prompt": [-1]}, "prompt", "outside the vocabulary of 320"),
    (TEXT, {"prompt": [10**30]}, "prompt", "outside the vocabulary of 320"),
    (TEXT, {"prompt": "\ud800"}, "prompt", "lone surrogate"),
    (TEXT, {"prompt": "x" * 1100}, "prompt", "can never fit"),
    (TEXT, {"prompt": ["x"] * 129}, "prompt", "--max-choices"),
    (TEXT, {"prompt": "x", "n": 129}, "n", "--max-choices"),
    (TEXT, {"prompt": "x", "n": 0}, "n", "from 1"),
    (TEXT, {"prompt": "x", "n": -(10**9)}, "n", "from 1"),
    (TEXT, {"prompt": "x", "max_tokens": "5"}, "max_tokens", "max_tokens must be a whole number"),
    (TEXT, {"prompt": "x", "max_tokens": 1.5}, "max_tokens", "whole number"),
    (TEXT, {"prompt": "x", "max_tokens": True}, "max_tokens", "whole number"),
    (TEXT, {"prompt": "x", "max_tokens": -1}, "max_tokens", "at least 1"),
    (TEXT, {"prompt": "x", "max_tokens": 10**40}, "prompt", "can never fit"),
    (TEXT, {"prompt": "x", "temperature": "hot"}, "temperature", "must be a number"),
    (TEXT, {"prompt": "x", "temperature": -0.1}, "temperature", "at least 0"),
    (TEXT, {"prompt": "x", "top_p": 1.1}, "top_p", "from 0 to 1"),
    (TEXT, {"prompt": "x", "seed": 2**63}, "seed", "2**63"),
    (TEXT, {"prompt": "x", "stop": ""}, "stop", "none of them empty"),
    (TEXT, {"prompt": "x", "stop": [1]}, "stop", "must be a text or a list of texts"),
    (TEXT, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    (TEXT, {"prompt": "x", "logit_bias": {"999": 1}}, "logit_bias", "319"),
    (TEXT, {"prompt": "x", "logit_bias": {"1": 1e9}}, "logit_bias", "-100 to 100"),
    (TEXT, {"prompt": "x", "stop_token_ids": [320]}, "stop_token_ids", "319"),
    (TEXT, {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    (TEXT, {"prompt": "x", "logprobs": -1}, "logprobs", "at least 0"),
    (TEXT, {"prompt": "x", "logprobs": 321}, "logprobs", "at most the vocabulary's 320"),
    (TEXT, {"prompt": "x", "priority": 2**40}, "priority", "less than"),
    (TEXT, {"prompt": "x", "stream": "yes"}, "stream", "true or false"),
    (TEXT, {"prompt": "x", "stream_options": {}}, "stream_options", "set stream to true"),
    (TEXT, {"prompt": "x", "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    (TEXT, {"prompt": "x", "model": 5}, "model", "must be text"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
    (TEXT, {"prompt": "x", "best_of": 2}, "best_of", "not supported"),
    (TEXT, {"prompt": "x", "use_beam_search": True}, "use_beam_search", "not supported"),
    (TEXT, {"prompt": "x", "response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
    (TEXT, {"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
    (TEXT, {"prompt": "x", "structured_outputs": {"xml": 1}}, "structured_outputs.xml", "is not known"),
    (TEXT, {"prompt": "x", "guided_json": 5}, "guided_json", "must be a JSON schema"),
    (TEXT, {"prompt": "x", "guided_json": {}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
    (TEXT, {"prompt": "x", "guided_regex": "a", "ignore_eos": True}, "guided_regex", "ignore_eos forbids"),
    (CHAT, {"messages": []}, "messages", "at least one message"),
    (CHAT, {"messages": "Hi"}, "messages", "messages must be a list"),
    (CHAT, {"messages": ["Hi"]}, "messages[0]", "must be an object"),
    (CHAT, {"messages": [{"content": "Hi"}]}, "messages", 'messages[0] needs a "role"'),
    (CHAT, {"messages": [*MESSAGES, {"role": "user"}]}, "messages", 'messages[1] has no "content"'),
    (CHAT, {"messages": [{"role": "user", "content": "\udfff"}]}, "messages", "lone surrogate"),
    (CHAT, {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
    (CHAT, {"messages": MESSAGES, "functions": [{"name": "f"}]}, "functions", "not supported"),
    (CHAT, {"messages": MESSAGES, "logprobs": 1}, "logprobs", "true or false"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 1}, "top_logprobs", "needs logprobs"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "give one"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice", "no tools"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "'messages'"),
    ("/tokenize", {}, "prompt", "either prompt or messages"),
    ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt", "either prompt or messages"),
    ("/detokenize", {"tokens": [320]}, "tokens", "outside the vocabulary of 320"),
    ("/detokenize", {}, "tokens", "tokens is missing"),
]


@pytest.mark.parametrize(("path", "body", "param", "says"), FIELDS)
def test_u46_u47_a_wrong_field_is_named(http: httpx.Client, path: str, body: Any, param: Any, says: Any) -> None:
    answer = post(http, path, body)
    if says is None:
        assert answer.status_code == 200
        return
    error = refused(answer)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert says in error["message"]


def test_of_many_wrong_fields_the_first_are_named(http: httpx.Client) -> None:
    error = refused(post(http, TEXT, {"prompt": 1, "n": "a", "seed": "b", "top_p": "c", "top_k": "d"}))
    assert error["param"] == "top_p" and error["message"].endswith("; and 2 more")
    assert error["message"].startswith("top_p must be a number; n must be a whole number; ")


# Values of every JSON type, among them those that are legal somewhere.
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec=None), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@st.composite
def changed(draw: st.DrawFn) -> tuple[str, str, Any]:
    path = draw(st.sampled_from(sorted(BODIES)))
    known = sorted(BODIES[path].model_fields) + sorted(BODIES[path].unsupported)
    return path, draw(st.sampled_from(known)), draw(ANYTHING)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(changed())
def test_any_value_in_any_field_is_served_or_refused(http: httpx.Client, change: tuple[str, str, Any]) -> None:
    path, name, value = change
    body = {"max_tokens": 4, **GOOD[path]} | {name: value}
    answer = post(http, path, body)
    if answer.status_code == 200:
        return
    error = refused(answer, 404 if name == "model" and isinstance(value, str) else 400)
    assert str(error["param"]).split(".")[0].split("[")[0] in (name, "prompt", "messages", "n"), (name, value, error)


# -- hostile forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        {"guided_regex": "(((("},
        {"guided_regex": "\ud800"},
        {"guided_regex": "x" * 200_000},
        {"guided_choice": []},
        {"guided_choice": ["\ud800"]},
        {"guided_grammar": 'start: "a'},
        {"guided_json": {"type": "nothing"}},
        {"guided_json": {"$ref": "file:///etc/passwd"}},
        {"guided_json": {"$ref": "http://127.0.0.1:1/schema.json"}},
        {"guided_json": "{"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        {"guided_json": {"allOf": [{"type": "string", "pattern": f"a{n}.*b{n}"} for n in range(40)]}},
    ],
)
def test_a_form_that_cannot_be_is_refused_under_its_name(http: httpx.Client, form: Any) -> None:
    error = refused(post(http, TEXT, {"prompt": "x", "max_tokens": 2, **form}))
    assert error["param"] == next(iter(form)) and error["message"].startswith(error["param"])


# -- files and addresses -----------------------------------------------------------------------------------------------


def test_no_path_in_a_request_is_ever_opened(
    http: httpx.Client, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / SECRET
    secret.mkdir()
    (secret / "config.json").write_text("{}")
    opened: list[str] = []
    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat")):
        real = getattr(module, name)

        def noting(path: Any, *args: Any, _real: Any = real, **given: Any) -> Any:
            opened.append(str(path))
            return _real(path, *args, **given)

        monkeypatch.setattr(module, name, noting)
    path = str(secret)
    image = {"type": "image_url", "image_url": {"url": f"file://{path}/config.json"}}
    assert refused(post(http, TEXT, {"model": path, "prompt": "x"}), 404)["code"] == "model_not_found"
    assert "image_url" in refused(post(http, CHAT, {"messages": [{"role": "user", "content": [image]}]}))["message"]
    for extra in ({"tokenizer": path}, {"lora_path": path}, {"user": path}, {"stop": path}, {"cache_salt": path}):
        assert post(http, TEXT, {"prompt": path, "max_tokens": 1, **extra}).status_code == 200
    refused(post(http, TEXT, {"prompt": "x", "guided_json": path}))
    refused(http.get(f"/v1/models/{path}"), 404)
    refused(http.get(f"/{path}"), 404)
    assert not [each for each in opened if SECRET in each]


# -- the log -----------------------------------------------------------------------------------------------------------


def test_u63_names_of_unknown_fields_are_logged_and_no_value(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pagedkv")
    wrong: Any = [
        (TEXT, {"prompt": SECRET, "temprature": SECRET, "max_tokens": 1}),
        (TEXT, {"prompt": 5, "user": SECRET}),
        (TEXT, {"prompt": SECRET, "stop": SECRET, "guided_regex": f"(({SECRET}"}),
        (TEXT, f'{{"prompt": "{SECRET}'.encode()),
        (CHAT, {"messages": [{"role": "user", "content": SECRET, "extra": SECRET}], "max_tokens": 1}),
        (CHAT, {"messages": [{"role": SECRET, "content": [{"type": SECRET}]}]}),
        (CHAT, {"messages": MESSAGES, "tools": [{"type": SECRET}]}),
    ]
    for path, body in wrong:
        post(http, path, body)
    assert "'temprature' (did you mean temperature?)" in caplog.text
    assert SECRET not in caplog.text
