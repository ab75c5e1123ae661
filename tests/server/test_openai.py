"""The official client, unchanged, against a running server: its models of answers, its helpers, its errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, TypeAdapter

from pagedkv.server.app import create_app
from pagedkv.server.errors import QueueFull, Unavailable
from pagedkv.server.guard import guarded
from pagedkv.server.keys import Keys
from pagedkv.server.settings import ServerConfig
from tests.helpers.api_rig import NAME, Api

SEEDED: Any = {"seed": 5, "temperature": 1.0, "max_tokens": 6}


def said(text: str) -> Any:
    return [{"role": "user", "content": f"<<{text}>>"}]


def raw(api: Api, path: str, **body: Any) -> Any:
    return httpx.post(f"{api.url}{path}", json={"model": NAME, **body}).raise_for_status().json()


# -- models ------------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "pagedkv")
    assert client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


# -- answers hold what the client's own models require -----------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True, "top_logprobs": 2}])
def test_a_chat_answer_has_every_field_of_the_clients_model(api: Api, logprobs: Any) -> None:
    answer = raw(api, "/v1/chat/completions", messages=said("Hi"), n=2, **logprobs)
    read = TypeAdapter(ChatCompletion).validate_python(answer)
    assert [choice.message.content for choice in read.choices] == ["Hi", "Hi"]
    assert all(
        choice.message.refusal is None and "refusal" in choice.message.model_fields_set for choice in read.choices
    )
    assert read.usage is not None and read.usage.completion_tokens == 6
    assert answer["system_fingerprint"].startswith("fp_")


def test_a_completion_has_every_field_of_the_clients_model(api: Api) -> None:
    read = TypeAdapter(Completion).validate_python(raw(api, "/v1/completions", prompt="<<Hi>>", logprobs=1))
    assert (read.choices[0].text, read.choices[0].finish_reason) == ("Hi", "stop")
    assert read.choices[0].logprobs is not None and read.choices[0].logprobs.tokens == ["H", "i", "<eos>"]


def events(api: Api, path: str, **body: Any) -> list[Any]:
    text = httpx.post(f"{api.url}{path}", json={"model": NAME, "stream": True, **body}).raise_for_status().text
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_every_chunk_has_every_field_of_the_clients_models(api: Api) -> None:
    usage: Any = {"stream_options": {"include_usage": True}}
    chats = events(api, "/v1/chat/completions", messages=said("Hi"), logprobs=True, **usage)
    texts = events(api, "/v1/completions", prompt="<<Hi>>", logprobs=1, **usage)
    for chunk in chats:
        TypeAdapter(ChatCompletionChunk).validate_python(chunk)
    for chunk in texts[:-1]:
        assert chunk["choices"][0].keys() >= {"index", "text", "logprobs", "finish_reason"}
    for chunks in (chats, texts):
        assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 3)


# -- streams and whole answers say the same ----------------------------------------------------------------------------


def joined(chunks: Iterator[Any]) -> tuple[dict[int, Any], Any]:
    """By choice: what the chunks of a stream come to, and the counts."""
    choices: dict[int, Any] = defaultdict(lambda: {"text": "", "logprobs": [], "end": None})
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            told = choices[choice.index]
            assert told["end"] is None
            told["text"] += choice.text if hasattr(choice, "text") else choice.delta.content or ""
            told["logprobs"] += [choice.logprobs] if choice.logprobs else []
            told["end"] = choice.finish_reason and (choice.finish_reason, choice.stop_reason)
    return dict(choices), usage


@pytest.mark.parametrize("echo", [False, True])
def test_u64_a_stream_of_completions_is_the_whole_answer(client: openai.OpenAI, echo: bool) -> None:
    asked: Any = {**SEEDED, "model": NAME, "prompt": ["one", "two"], "n": 2, "logprobs": 3, "echo": echo}
    whole = client.completions.create(**asked)
    choices, usage = joined(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert sorted(choices) == [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        told = choices[choice.index]
        assert (told["text"], told["end"]) == (choice.text, (choice.finish_reason, choice.stop_reason))
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [getattr(part, name) for part in told["logprobs"]]
            assert [each for part in parts for each in part] == getattr(choice.logprobs, name)
    assert whole.usage is not None and whole.usage.prompt_tokens == 8  # the first token of each is <bos>
    assert (usage.prompt_tokens, usage.completion_tokens) == (8, whole.usage.completion_tokens)
    assert whole.choices[0].text.startswith("one") is echo and whole.choices[0].text != whole.choices[1].text


@pytest.mark.parametrize("prompt", ["one two", [256, 111, 110, 101], [111, 110, 101]])
def test_u40_offsets_are_places_in_the_echoed_text(client: openai.OpenAI, prompt: Any) -> None:
    """The first token of a text's sequence, <bos>, is in no text that a client sent, but is in ids that it sent."""
    asked: Any = {"model": NAME, "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
    choice = client.completions.create(**asked).choices[0]
    told = choice.logprobs
    assert told is not None and told.text_offset and told.tokens
    seen = [(token, at) for token, at in zip(told.tokens, told.text_offset, strict=True)][isinstance(prompt, str) :]
    assert "".join(token for token, _ in seen) == choice.text
    assert all(choice.text[at : at + len(token)] == token for token, at in seen)
    assert seen[0][1] == 0


def test_u64_a_stream_of_chat_is_the_whole_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "n": 2, "logprobs": True}
    asked |= {**SEEDED, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    chunks = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    choices, usage = joined(chunks)
    for choice in whole.choices:
        told = choices[choice.index]
        assert (told["text"], told["end"][0]) == (choice.message.content, choice.finish_reason)
        assert [each for part in told["logprobs"] for each in part.content] == choice.logprobs.content
        assert len(choice.logprobs.content) == 6 and len(choice.logprobs.content[0].top_logprobs) == 2
    assert whole.usage is not None and usage.model_dump(exclude={"prompt_tokens_details"}) == whole.usage.model_dump(
        exclude={"prompt_tokens_details"}
    )


def test_log_probabilities_go_on_while_a_parser_holds_text_back(client: openai.OpenAI) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    asked: Any = {"model": NAME, "messages": said(f"So: {call}"), "tools": tools, "logprobs": True}
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    tokens = [each.token for chunk in chunks if chunk.logprobs for each in chunk.logprobs.content or []]
    assert whole.logprobs is not None
    assert tokens == [each.token for each in whole.logprobs.content or []] == [*f"So: {call}", "<eos>"]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content == "So:"


def test_the_sampled_token_stands_beside_the_most_probable_ones(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "prompt": "x", "max_tokens": 30, "temperature": 2.0, "seed": 1}
    for most in (0, 2):
        found = client.completions.create(**asked, logprobs=most).choices[0].logprobs
        assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs
        for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
            assert logprob in top.values() and most <= len(top) <= max(most, 0) + 1
            assert token in top or token == "\ufffd"


# -- what requests may ask for -----------------------------------------------------------------------------------------


def test_stop_texts_end_an_answer_before_them(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=NAME, messages=said("one END two"), stop=["END", "two"])
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("one ", "stop")
    assert chat.choices[0].stop_reason == "END"  # type: ignore[attr-defined]


def test_limits_under_both_names(client: openai.OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        limit: Any = {name: 2}
        choice = client.chat.completions.create(model=NAME, messages=said("abcd"), **limit).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("ab", "length")


def test_a_bias_forbids_and_demands_tokens(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "prompt": "x", "max_tokens": 3, "temperature": 0}
    assert client.completions.create(**asked, logit_bias={str(ord("z")): 100}).choices[0].text == "zzz"


def test_an_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="abc", echo=True, logprobs=0, max_tokens=0)
    found = answer.choices[0].logprobs
    assert found is not None and answer.choices[0].text == "abc"
    assert found.tokens == ["<bos>", "a", "b", "c"] and found.token_logprobs is not None
    assert found.token_logprobs[0] is None and all(value < 0 for value in found.token_logprobs[1:] if value is not None)
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_parts_of_content_and_the_role_developer_reach_the_template(api: Api, client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "<<o"}, {"type": "text", "text": "k>>"}]
    messages: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert client.chat.completions.create(model=NAME, messages=messages).choices[0].message.content == "ok"
    tokens = raw(api, "/tokenize", messages=messages, return_token_strs=True)
    assert "".join(tokens["token_strs"]) == "[system]Be brief.\n[user]<<ok>>\n[assistant]"  # the template's own words
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])


class Person(BaseModel):
    name: str
    age: int


def test_a_pydantic_class_is_the_form_of_an_answer(client: openai.OpenAI) -> None:
    text = '{"name": "Ada", "age": 36}'
    answer = client.chat.completions.parse(model=NAME, messages=said(text), response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)


def test_any_json_object(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_object"}
    answer = client.chat.completions.create(model=NAME, messages=said('{"a": [1]}'), response_format=form)
    assert json.loads(answer.choices[0].message.content or "") == {"a": [1]}


@pytest.mark.parametrize(
    "form",
    [
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "yes|no"},
        {"guided_grammar": 'start: "yes" | "no"'},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "yes|no", "json_object": False}},
    ],
)
def test_names_of_guided_decoding_that_users_bring(client: openai.OpenAI, form: Any) -> None:
    answer = client.completions.create(model=NAME, prompt="x", extra_body=form, seed=3)
    assert answer.choices[0].text in ("yes", "no") and answer.choices[0].finish_reason == "stop"


def test_the_stream_helper_puts_calls_together(client: openai.OpenAI) -> None:
    calls = [f'<tool_call>\n{{"name": "f", "arguments": {{"x": {x}}}}}\n</tool_call>' for x in (1, 2)]
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    tools: Any = [{"type": "function", "function": function}]
    with client.chat.completions.stream(model=NAME, messages=said("\n".join(calls)), tools=tools) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [call.function.arguments for call in message.tool_calls or []] == ['{"x": 1}', '{"x": 2}']
    assert not message.content


def test_cached_tokens_are_counted(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "prompt": "a prompt of several blocks, twice", "max_tokens": 1}
    client.completions.create(**asked)
    usage = client.completions.create(**asked).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 32  # of 34 with <bos>: 8 whole blocks of 4


def test_the_asynchronous_client_streams_several_at_once(api: Api) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none") as client:

            async def one(text: str) -> str:
                stream = await client.chat.completions.create(model=NAME, messages=said(text), stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(f"text {number}") for number in range(12)))

    assert asyncio.run(ask()) == [f"text {number}" for number in range(12)]


# -- errors as the client knows them -----------------------------------------------------------------------------------


def test_an_error_of_a_request_names_its_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=said("x"), temperature=-1)
    assert caught.value.param == "temperature" and "at least 0" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="x" * 1100)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


@pytest.fixture
def refusing(api: Api, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the server refuse so many requests with an error."""

    def refuse(error: Exception, times: int = 1) -> None:
        assert api.front is not None
        admit, left = api.front.admit, [error] * times

        def admitted(*args: Any) -> None:
            if left:
                raise left.pop()
            admit(*args)

        monkeypatch.setattr(api.front, "admit", admitted)

    return refuse


def test_errors_of_the_server_are_those_of_the_client(client: openai.OpenAI, refusing: Callable[..., None]) -> None:
    refusing(QueueFull("full", retry_after=7))
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model=NAME, prompt="x")
    assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("queue_full", "7")
    refusing(Unavailable("stopping", code="stopping"))
    with pytest.raises(openai.InternalServerError) as stopped:
        client.completions.create(model=NAME, prompt="x")
    assert (stopped.value.status_code, stopped.value.type) == (503, "service_unavailable")


def test_the_client_comes_again_after_the_time_it_was_told(
    client: openai.OpenAI, refusing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(QueueFull("full", retry_after=3), 2)
    waits: list[float] = []
    patient = client.with_options(max_retries=2)
    monkeypatch.setattr("openai._base_client.time.sleep", waits.append)
    assert patient.completions.create(model=NAME, prompt="<<Hi>>").choices[0].text == "Hi"
    assert waits == [3, 3]


def test_with_a_key_another_one_is_an_error_of_authentication(api: Api) -> None:
    assert api.front is not None
    key = "sk-right-0123456789"
    app = guarded(create_app(api.front), ServerConfig(api_keys=(key,)), Keys.of((key,), None))

    async def names(key: str) -> list[str]:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key=key, http_client=http) as client:
            return [model.id async for model in client.models.list()]

    assert asyncio.run(names(key)) == [NAME]
    with pytest.raises(openai.AuthenticationError) as caught:
        asyncio.run(names("sk-wrong"))
    assert (caught.value.code, caught.value.type) == ("invalid_api_key", "authentication_error")


def test_an_error_ends_a_stream_that_has_begun(api: Api, client: openai.OpenAI) -> None:
    front = api.front
    assert front is not None
    texts = []
    with pytest.raises(openai.APIError) as caught:
        for chunk in client.completions.create(
            model=NAME, prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        ):
            texts.append(chunk.choices[0].text)
            if len(texts) == 2:
                error = Unavailable("the engine went away", code="engine_dead")
                api.loop.call_soon_threadsafe(front.engine.cancel_all, "shutdown", error)
    assert caught.value.code == "engine_dead" and "went away" in caught.value.message
    assert 2 <= len(texts) < 200


def test_u37_a_client_that_loses_patience_leaves_nothing_open(api: Api, client: openai.OpenAI) -> None:
    assert api.front is not None
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.02).completions.create(
            model=NAME, prompt="x", max_tokens=250, extra_body={"ignore_eos": True}
        )
    deadline = time.monotonic() + 10
    while api.front.engine.num_open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert api.front.engine.num_open == 0
