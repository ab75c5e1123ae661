"""Answers that are nothing but JSON objects with a tool's name: what is a call, what stays text, when it is told."""

from __future__ import annotations

import pytest

from pagedkv.server.tool_parsers.llama3_json import Llama3JsonParser
from tests.server.tool_parsers.rig import TOOLS, parsed

NOW = '{"name": "now", "parameters": {}}'
ARGUMENTS = '{"city": "B } ; {\\"", "unit": "c"}'
WEATHER_CALL = f'{{"type": "function", "name": "get_weather", "arguments": {ARGUMENTS}}}'
BOTH = [("now", "{}"), ("get_weather", ARGUMENTS)]


@pytest.mark.parametrize("start", ["", " \n", "<|python_tag|>", "\n<|python_tag|> "])
@pytest.mark.parametrize("between", ["; ", ";", "\n", "", " ;\n"])
@pytest.mark.parametrize("end", ["", "\n", ";"])
def test_an_answer_of_objects_is_calls_and_nothing_else(start: str, between: str, end: str) -> None:
    assert parsed(Llama3JsonParser, [start + NOW + between + WEATHER_CALL + end]) == ("", BOTH)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "Hello",
        f"Hello {NOW}",
        " \n[1]",
        "<|python",
        "<|python_tag|>",
        "<|python_tag|>print(1)\n",
        f"<|python_tag|><|python_tag|>{NOW}",
        "<| python_tag|>",
    ],
)
def test_text_that_does_not_begin_as_a_call_is_told_as_it_is(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert parsed(Llama3JsonParser, [text]) == (text, [])
    assert not caplog.records


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"answer": 5}', "it has no name"),
        ('{"name": 5, "parameters": {}}', "it has no name"),
        ('{"name": "Ada", "parameters": {}} and more', "its name is that of no tool"),
        ('{"name": "now", "arguments": null}', "its arguments are no JSON object"),
        ('{"name": "now"}', "it has no parameters or arguments"),
        ("{name: 'now'}", "its JSON breaks off"),
        ('{"name": "now", "parameters": {}', "the answer ends within it"),
        ("{", "the answer ends within it"),
        ('  {"name": "now", "parameters": {"a": Infinity}} ', "its JSON breaks off"),
    ],
)
def test_what_began_as_a_call_and_is_none_is_text_with_a_reason(
    text: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "pagedkv.server"):
        assert parsed(Llama3JsonParser, [text]) == (text, [])
    assert [record.getMessage() for record in caplog.records] == [f"what began as a tool call stays text: {reason}"]


@pytest.mark.parametrize("rest", ["and more", '{"name": "rm", "parameters": {}}', "}", f"x; {NOW}"])
def test_from_the_first_text_behind_a_call_on_all_is_text(rest: str) -> None:
    assert parsed(Llama3JsonParser, [f"{NOW}\n{rest} "]) == (f"{rest} ", [("now", "{}")])
    assert parsed(Llama3JsonParser, [f"{NOW}; {rest}"]) == (f"; {rest}", [("now", "{}")])


def test_parameters_come_before_arguments() -> None:
    both = '{"name": "now", "arguments": {"a": 1}, "parameters": {"b": 2}}'
    assert parsed(Llama3JsonParser, [both]) == ("", [("now", '{"b": 2}')])


def test_each_call_is_told_with_its_last_character_and_text_at_once() -> None:
    parser = Llama3JsonParser(TOOLS)
    told = [len(parser.push(char).calls) for char in f"{NOW}; {NOW}"]
    assert told == ([0] * (len(NOW) - 1) + [1]) + [0, 0] + ([0] * (len(NOW) - 1) + [1])
    parser = Llama3JsonParser(TOOLS)
    assert [parser.push(char).content for char in "\n<|pyx y"] == ["", "", "", "", "", "\n<|pyx", "", " y"]
