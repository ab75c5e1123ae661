"""Conversations with tool calls: what templates are given, beside transformers on messages as its guide has them."""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

import pytest

from pagedkv.engine.chat import chat_prompt
from pagedkv.errors import RequestInvalid
from pagedkv.models.tokenizer import Tokenizer, load_hf_tokenizer
from pagedkv.server.tool_parsers import get_parser
from tests.helpers.engine_rig import folder

# Written for these tests in the ways that templates of the families go about it.
HERMES = """{% for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'tool' %}
<tool_response>
{{ message.content }}
</tool_response>
{% elif message.content %}
{{ message.content }}
{% endif %}
{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{% endfor %}
<|im_end|>
{% endfor %}"""
LLAMA = """{% for message in messages -%}
<|{{ 'ipython' if message.role == 'tool' else message.role }}|>
{% if 'tool_calls' in message %}
{% if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{% set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{% elif message.role == 'tool' %}
{{ message.content | tojson }}
{% else %}
{{ message.content | trim }}
{% endif %}
{% endfor %}"""
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ARGUMENTS = {"city": 'B"rno é', "days": [1, 2.5, None, True], "near": {}}


def conversation(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Weather?", "name": None},
        {"role": "assistant", "tool_calls": [call], **more},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "It rains.", "tool_calls": None, "refusal": None, "audio": None},
        {"role": "assistant", "content": "Take a coat.", "tool_calls": []},
    ]


@functools.cache
def tokenizer() -> Tokenizer:
    return load_hf_tokenizer(folder())


def prompt(messages: Any, template: str = HERMES) -> str:
    return chat_prompt(tokenizer(), messages, chat_template=template, add_generation_prompt=False)["prompt"]


@pytest.mark.parametrize("template", [HERMES, LLAMA], ids=["hermes", "llama"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_messages_as_the_api_has_them_render_as_transformers_renders_its_own(
    template: str, content: dict[str, Any], ascii_only: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs = conversation(ARGUMENTS)
    theirs[2]["content"] = "rain"
    for message in theirs[3:]:
        del message["tool_calls"]
    ours = conversation(json.dumps(ARGUMENTS, ensure_ascii=ascii_only), **content)
    expected = render_jinja_template([theirs], chat_template=template)[0][0]
    assert prompt(ours, template) == expected
    assert json.dumps(ARGUMENTS, ensure_ascii=False) in expected


def test_arguments_may_be_mappings_or_nothing() -> None:
    assert prompt(conversation(ARGUMENTS)) == prompt(conversation(json.dumps(ARGUMENTS)))
    for nothing in ("", None, "{}", {}):
        assert '"arguments": {}}' in prompt(conversation(nothing))


@pytest.mark.parametrize(("name", "template"), [("hermes", HERMES), ("llama3_json", LLAMA)])
def test_a_call_that_was_read_is_written_as_the_model_wrote_it(name: str, template: str) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    key = "arguments" if name == "hermes" else "parameters"
    body = f'{{"name": "get_weather", "{key}": {json.dumps(ARGUMENTS, ensure_ascii=False)}}}'
    answer = f"<tool_call>\n{body}\n</tool_call>" if name == "hermes" else body
    (call,) = get_parser(name)(tools).push(answer).calls
    assert f"assistant{'|>' if name != 'hermes' else ''}\n{answer}\n" in prompt(conversation(call.arguments), template)


def test_a_missing_text_is_never_the_word_none() -> None:
    assert prompt(conversation("{}", content=None), PLAIN) == (
        "[user]Weather?[assistant][tool]rain[assistant]It rains.[assistant]Take a coat."
    )


def test_a_template_without_a_place_for_calls_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pagedkv.engine"):
        prompt(conversation("{}"), PLAIN)
    assert [record.getMessage() for record in caplog.records] == [
        "the chat template has no place for tool calls: the model does not see them"
    ]
    caplog.clear()
    prompt(conversation("{}"), HERMES)
    prompt(conversation("{}")[:1], PLAIN)
    assert not caplog.records


BAD: list[tuple[Any, str]] = [
    ("now", '"tool_calls" of messages[1] must be a list'),
    ({"name": "now"}, '"tool_calls" of messages[1] must be a list'),
    (["now"], "tool_calls[0] of messages[1] must be a mapping"),
    ([{"name": "now", "arguments": "{}"}], "tool_calls[0] of messages[1] must be a mapping"),
    ([{"function": {"name": 3}}], "tool_calls[0] of messages[1] must be a mapping"),
    ([{"function": {"name": "f"}}, {"function": {"name": "f", "arguments": "{"}}], "tool_calls[1] of messages[1] are"),
    ([{"function": {"name": "f", "arguments": "[1]"}}], '"arguments" of tool_calls[0] of messages[1] must be a JSON'),
    ([{"function": {"name": "f", "arguments": 3}}], "must be a JSON object"),
    ([{"function": {"name": "f", "arguments": "[" * 100_000}}], "are not JSON"),
    ([], 'messages[1] has no "content"'),
    (None, 'messages[1] has no "content"'),
]


@pytest.mark.parametrize(("calls", "message"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_calls_are_named(calls: Any, message: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        prompt([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}])
    assert caught.value.field == "messages"
    assert message in str(caught.value)
