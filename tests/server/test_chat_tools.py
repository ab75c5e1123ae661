"""Tools over HTTP with the official client: calls whole and in streams, forced ones, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.helpers.api_rig import NAME

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get", "parameters": CITY}},
    {"type": "function", "function": {"name": "n"}},
]
ARGUMENTS = '{"city": "Brň>", "unit": "c"}'
CALL = f'<tool_call>\n{{"name": "get", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOTHING = '<tool_call>\n{"name": "n", "arguments": {}}\n</tool_call>'


def ask(client: openai.OpenAI, says: str, **settings: Any) -> Any:
    messages: Any = [{"role": "user", "content": f"<<{says}>>" if says else "Hello"}]
    return client.chat.completions.create(model=NAME, messages=messages, **{"tools": TOOLS, **settings})


def test_a_call_and_the_text_before_it(client: openai.OpenAI) -> None:
    (choice,) = ask(client, f"See.\n{CALL}").choices
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("See.", "tool_calls")
    assert (call.type, call.function.name, call.function.arguments) == ("function", "get", ARGUMENTS)


def test_u42_a_stream_tells_the_same(client: openai.OpenAI) -> None:
    chunks = list(ask(client, f"See <to.\n{CALL}\n{NOTHING}", stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert "".join(delta.content or "" for delta in deltas) == "See <to."
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "get", ARGUMENTS),
        (1, "n", "{}"),
    ]
    assert len({call.id for call in calls}) == 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("says", [CALL[:-30], CALL.replace("get", "rm"), "Hello <tool_call"])
def test_what_is_no_call_is_content(client: openai.OpenAI, says: str) -> None:
    (choice,) = ask(client, says).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (says, None, "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}])
def test_a_call_that_must_be_made_fits_its_schema(client: openai.OpenAI, choice: Any) -> None:
    answer = ask(
        client, "", tool_choice=choice, parallel_tool_calls=False, n=4, temperature=1.5, seed=3, max_tokens=150
    )
    for each in answer.choices:
        (call,) = each.message.tool_calls
        assert (each.message.content, each.finish_reason) == (None, "tool_calls")
        jsonschema.validate(
            json.loads(call.function.arguments), CITY if call.function.name == "get" else {"maxItems": 0}
        )
        assert choice == "required" or call.function.name == "get"


def test_one_call_only_where_several_are_not_wanted(client: openai.OpenAI) -> None:
    both = f"{NOTHING}\n{NOTHING}"
    assert len(ask(client, both).choices[0].message.tool_calls) == 2
    assert len(ask(client, both, parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_a_strict_function_is_called_with_arguments_that_fit(client: openai.OpenAI) -> None:
    wrong = CALL.replace('"c"', '"k"')
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    (loose,) = ask(client, wrong).choices[0].message.tool_calls
    (held,) = ask(client, wrong, tools=strict, max_tokens=120).choices[0].message.tool_calls
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(loose.function.arguments), CITY)
    jsonschema.validate(json.loads(held.function.arguments), CITY)


def test_an_answer_in_json_may_be_a_call_instead(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"properties": {"n": {"const": 5}}}}}
    text = '{"n": 5}'
    assert ask(client, text, response_format=form).choices[0].message.content == text
    assert ask(client, CALL, response_format=form).choices[0].message.tool_calls[0].function.arguments == ARGUMENTS


def test_without_a_choice_of_tools_a_call_is_text(client: openai.OpenAI) -> None:
    (choice,) = ask(client, CALL, tool_choice="none").choices
    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)


def test_a_conversation_goes_on_after_a_call(client: openai.OpenAI) -> None:
    message = ask(client, CALL).choices[0].message
    messages = [
        {"role": "user", "content": "Weather?"},
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "<<rain>>"},
    ]
    answer = client.chat.completions.create(model=NAME, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "rain"


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"extra_body": {"functions": [{"name": "n"}]}}, "functions"),
    ],
    ids=str,
)
def test_bad_tools_are_named(client: openai.OpenAI, settings: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "ok", **settings)
    assert caught.value.param == param
    assert ask(client, "ok").choices[0].message.content == "ok"
