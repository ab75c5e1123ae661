"""Calls between `<tool_call>` and `</tool_call>`: what is one, what stays text, and when it is told."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.server.tool_parsers.hermes import HermesParser
from tests.server.tool_parsers.rig import TOOLS, parsed

NOW = '{"name": "now", "arguments": {}}'
ARGUMENTS = (
    '{"city": "Brno {\\"}] </tool_call>\\n <tool_call>", "unit": "\\u0063", "days": [1, 2.50, 1e999], "x": [[{}]]}'
)
WEATHER_CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_calls_are_read_and_text_around_them_is_content() -> None:
    answer = f"Let me see.\n{call(WEATHER_CALL)}\n{call(NOW)}"
    assert parsed(HermesParser, [answer]) == ("Let me see.", [("get_weather", ARGUMENTS), ("now", "{}")])


def test_arguments_keep_every_digit_and_escape() -> None:
    digits = "1" * 5000  # more than Python converts to a number
    arguments = f'{{"a": 0.10000000000000000001, "b": {digits}, "c": "\\ud800\\/\\u00e9é", "d":-0}}'
    _, calls = parsed(HermesParser, [call(f'{{"name":"now","arguments":{arguments}}}')])
    assert calls == [("now", arguments)]


@pytest.mark.parametrize(
    "body",
    [
        NOW,
        '{"name":"now","arguments":{}}',
        '  \n{"arguments" : {}, "id": 7, "name" : "now"}  \n ',
        '{"name": "later", "name": "n\\u006fw", "arguments": {}}',
    ],
)
def test_form_and_order_of_members_do_not_matter(body: str) -> None:
    for answer in (call(body), f"<tool_call>{body}</tool_call>"):
        assert parsed(HermesParser, [answer]) == ("", [("now", "{}")])


NO_CALLS = {
    "it has no name": '{"arguments": {}}',
    "it has no arguments": '{"name": "now", "parameters": {}}',
    "its name is that of no tool": '{"name": "rm", "arguments": {}}',
    "its arguments are no JSON object": '{"name": "now", "arguments": "{}"}',
    "its JSON is malformed": '{"name": "now", "arguments": {"a": 1,}}',
    "its JSON breaks off": '{"name": "now", "arguments": {}',
    "a string of its JSON holds a control character": '{"name": "now", "arguments": {"a": "b\nc"}}',
    "its closing marker does not follow its object": f"{NOW}}}",
    "no JSON object follows its marker": f"[{NOW}]",
}
MALFORMED = [
    '{"name" "now", "arguments": {}}',
    '{"name": "now" "arguments": {}}',
    '{"name": "now", "arguments": {},}',
    '{, "name": "now", "arguments": {}}',
    '{1: 2, "name": "now", "arguments": {}}',
    '{"name": "now", "arguments": {"a": [1}]}',
    '{"name": "now", "arguments": {"a": 01}}',
    '{"name": "now", "arguments": {"a": "\\x"}}',
    '{"name": "now", "arguments": {"a": tru}}',
    '{"name": "now", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
    "{]",
]


@pytest.mark.parametrize(
    ("reason", "body"),
    [*NO_CALLS.items(), *(("its JSON is malformed", body) for body in MALFORMED)],
    ids=[*NO_CALLS, *map(str, range(len(MALFORMED)))],
)
def test_what_is_no_call_stays_text_and_a_later_call_is_found(
    caplog: pytest.LogCaptureFixture, reason: str, body: str
) -> None:
    with caplog.at_level("WARNING", "pagedkv.server"):
        answer = parsed(HermesParser, [f"a {call(body)} b\n", call(NOW)])
    assert answer == (f"a {call(body)} b", [("now", "{}")])
    assert [record.getMessage() for record in caplog.records] == [f"what began as a tool call stays text: {reason}"]


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_words_that_only_python_takes_for_numbers_are_no_json(word: str) -> None:
    broken = call(f'{{"name": "now", "arguments": {{"a": {word}}}}}')
    assert parsed(HermesParser, [broken]) == (broken, [])


@pytest.mark.parametrize("cut", [*range(12, len(call(NOW)) - len("\n</tool_call>"))])
def test_an_answer_that_ends_within_a_call_is_text(caplog: pytest.LogCaptureFixture, cut: int) -> None:
    answer = "a " + call(NOW)[:cut]
    with caplog.at_level("WARNING", "pagedkv.server"):
        assert parsed(HermesParser, [answer]) == (answer, [])
    assert "the answer ends within it" in caplog.text
    assert "now" not in caplog.text, "the log holds none of the model's words"


@pytest.mark.parametrize("left", ["", "\n", "\n<", "\n</tool_call"])
def test_a_complete_object_at_the_end_needs_no_closing_marker(left: str) -> None:
    assert parsed(HermesParser, [f"a\n<tool_call>\n{NOW}{left}"]) == ("a", [("now", "{}")])


def test_a_call_is_told_with_its_last_character_and_text_as_soon_as_it_cannot_be_a_call() -> None:
    parser = HermesParser(TOOLS)
    answer = call(NOW)
    assert [len(parser.push(char).calls) for char in answer] == [0] * (len(answer) - 1) + [1]
    assert [parser.push(char).content for char in "a <tool <"] == ["a", "", "", "", "", "", "", " <tool", ""]
    assert parser.finish().content == " <"


@pytest.mark.parametrize("text", ["", " \n", "no call\n\n", "  <tool_call", "</tool_call>", "a < b <tool_cal <"])
def test_text_without_calls_is_told_as_it_is(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert parsed(HermesParser, [text]) == (text, [])
    assert not caplog.records


def test_a_nested_marker_begins_the_call() -> None:
    assert parsed(HermesParser, [f"<tool_call><tool_call>{NOW}</tool_call>"]) == ("<tool_call>", [("now", "{}")])


WHITE = st.text(" \n\t", max_size=3)
TEXT = st.text(st.characters(exclude_categories=["Z", "C"], exclude_characters="<"), min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
CALL = st.tuples(
    st.sampled_from([tool["function"]["name"] for tool in TOOLS]),
    st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(WHITE, TEXT | CALL), max_size=6), WHITE)
def test_any_answer_of_texts_and_calls(parts: list[tuple[str, object]], end: str) -> None:
    answer, content, calls = "", "", []
    for space, part in parts:
        answer, content = answer + space, content + space
        if isinstance(part, tuple):
            name, arguments, ascii_only = part
            text = json.dumps(arguments, ensure_ascii=ascii_only)
            answer += call(f'{{"name": "{name}", "arguments": {text}}}')
            calls.append((name, text))
        else:
            answer, content = answer + str(part), content + str(part)
    answer, content = answer + end, content + end
    if parts and isinstance(parts[0][1], tuple):
        content = content.lstrip(" \n\t")
    if parts and isinstance(parts[-1][1], tuple):
        content = content.rstrip(" \n\t")
    assert parsed(HermesParser, [answer]) == (content, calls)
