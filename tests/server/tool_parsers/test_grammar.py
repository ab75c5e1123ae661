"""Grammars of calls, asked of llguidance itself: all that they allow is read as calls that fit their schemas."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from pagedkv.errors import RequestInvalid
from pagedkv.server.tool_parsers import NAMES, ToolParser, get_parser
from tests.server.tool_parsers.rig import SCHEMAS, TOOLS, accepts, parsed, tool, written

PARSERS = [get_parser(name) for name in NAMES]
EITHER = pytest.mark.parametrize("parser", PARSERS, ids=NAMES)


def call(parser: type[ToolParser], name: str, arguments: str) -> str:
    """A call as the families' chat templates write it."""
    if parser is get_parser("hermes"):
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def several(parser: type[ToolParser], *calls: str) -> str:
    return ("\n" if parser is get_parser("hermes") else "; ").join(calls)


def grammar(
    parser: type[ToolParser],
    tools: Any = TOOLS,
    *,
    name: str | None = None,
    required: bool = True,
    parallel: bool = True,
    form: Any = None,
) -> str:
    return parser.grammar(tools, name=name, required=required, parallel=parallel, form=form)


EXPECTED: dict[str, tuple[set[str], Callable[[set[int]], bool]]] = {
    "required": (set(SCHEMAS), {1, 2}.issubset),
    "one": (set(SCHEMAS), {1}.__eq__),
    **{name: ({name}, {1}.__eq__) for name in SCHEMAS},
    "auto": (set(), {0}.__eq__),  # a text drawn at random begins no call
}
"""Which tools are called, and how often in one answer, over all that is drawn."""


@EITHER
@pytest.mark.parametrize("choice", EXPECTED)
def test_answers_that_a_grammar_allows_are_calls_that_fit_their_schemas(parser: type[ToolParser], choice: str) -> None:
    name = choice if choice in SCHEMAS else None
    lark = grammar(parser, name=name, required=choice != "auto", parallel=choice != "one")
    counts, names = set(), set()
    for seed in range(20):
        answer = written(lark, seed)
        content, calls = parsed(parser, [answer])
        assert choice == "auto" or content == "", answer
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[called])
            names.add(called)
        counts.add(len(calls))
    assert names == EXPECTED[choice][0]
    assert EXPECTED[choice][1](counts)


WEATHER = '{"city": "Brno", "unit": "c"}'
WRONG = {
    "a required argument is missing": ("get_weather", '{"city": "Brno"}'),
    "none is there": ("get_weather", "{}"),
    "one that the schema does not know": ("get_weather", '{"city": "Brno", "unit": "c", "x": 1}'),
    "a value of another type": ("get_weather", '{"city": 5, "unit": "c"}'),
    "a value that is not listed": ("get_weather", '{"city": "Brno", "unit": "k"}'),
    "a wrong value within": ("grow-tree", '{"left": {"value": "1"}, "value": 2}'),
    "arguments of a function without": ("now", '{"x": 1}'),
    "no object": ("now", "[]"),
    "another tool's name": ("rm", "{}"),
}
RIGHT = [
    ("get_weather", WEATHER),
    ("get_weather", '{"city": "B\\"}", "unit": "f", "days": [1, 14], "near": {"lat": -4.5}}'),
    ("grow-tree", '{"left": {"left": {"value": -3}, "value": 2}, "value": 1}'),
    ("now", "{}"),
]


@EITHER
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("reason", WRONG)
def test_a_call_that_misses_its_schema_is_not_allowed(parser: type[ToolParser], required: bool, reason: str) -> None:
    name, arguments = WRONG[reason]
    assert not accepts(grammar(parser, required=required), call(parser, name, arguments))


@EITHER
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("number", range(len(RIGHT)))
def test_a_call_as_templates_write_it_is_allowed(parser: type[ToolParser], required: bool, number: int) -> None:
    name, arguments = RIGHT[number]
    answer = call(parser, name, arguments)
    assert accepts(grammar(parser, required=required), answer)
    assert accepts(grammar(parser, name=name, required=required), answer)
    assert parsed(parser, [answer]) == ("", [RIGHT[number]])


@EITHER
def test_how_many_calls_are_allowed(parser: type[ToolParser]) -> None:
    one, now = call(parser, "get_weather", WEATHER), call(parser, "now", "{}")
    for required in (True, False):
        for count in (1, 2, 3):
            answer = several(parser, *itertools.islice(itertools.cycle([one, now]), count))
            assert accepts(grammar(parser, required=required), answer)
            assert accepts(grammar(parser, required=required, parallel=False), answer) == (count == 1)
    assert not accepts(grammar(parser, name="now"), several(parser, now, now))
    assert not accepts(grammar(parser, name="now"), one)
    assert not accepts(grammar(parser), "")


@EITHER
@pytest.mark.parametrize("text", ["", "Hello <tool", "a {b}\n\n", " \n", "日本"])
def test_text_is_allowed_only_where_no_call_is_required(parser: type[ToolParser], text: str) -> None:
    for parallel in (True, False):
        assert accepts(grammar(parser, required=False, parallel=parallel), text)
        assert not accepts(grammar(parser, parallel=parallel), text)


def test_hermes_text_may_stand_around_calls_and_a_marker_in_it_begins_one() -> None:
    parser = get_parser("hermes")
    auto, now = grammar(parser, required=False), call(parser, "now", "{}")
    assert accepts(auto, f"Let me see.\n{now}\n{now} Done.")
    assert not accepts(auto, "The marker <tool_call> begins a call.")
    assert not accepts(auto, f"{now}\n<tool_call>")


def test_llama_text_may_not_begin_with_a_brace() -> None:
    auto = grammar(get_parser("llama3_json"), required=False)
    assert not accepts(auto, '{"answer": 5}')
    assert not accepts(auto, ' {"answer": 5}')


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@EITHER
def test_an_answer_of_a_form_may_be_calls_instead_and_nothing_else(parser: type[ToolParser]) -> None:
    one, now = call(parser, "get_weather", WEATHER), call(parser, "now", "{}")
    for parallel in (True, False):
        lark = grammar(parser, required=False, parallel=parallel, form={"json": PERSON})
        assert accepts(lark, one)
        assert accepts(lark, '{"name": "Ada", "born": 1815}')
        assert accepts(lark, several(parser, one, now)) == parallel
        assert not accepts(lark, '{"born": 1815}')
        assert not accepts(lark, "Ada")
        assert not accepts(lark, several(parser, one, '{"name": "Ada"}'))
        assert not accepts(lark, call(parser, "get_weather", '{"city": "Brno"}')) or parser is get_parser("llama3_json")
    anything = grammar(parser, required=False, form={"json_object": True})
    assert accepts(anything, '{"born": [1815]}')
    assert accepts(anything, now)
    assert not accepts(anything, "[]")


@EITHER
@pytest.mark.parametrize("form", [{"regex": "a+"}, {"choice": ["a"]}, {"grammar": 'start: "a"'}])
def test_forms_that_leave_calls_no_place_are_refused(parser: type[ToolParser], form: dict[str, Any]) -> None:
    with pytest.raises(RequestInvalid, match=f"guided_{next(iter(form))} leaves no place for calls") as caught:
        grammar(parser, required=False, form=form)
    assert caught.value.field == "tool_choice"


@EITHER
def test_a_bad_schema_of_the_form_is_named_as_such(parser: type[ToolParser]) -> None:
    with pytest.raises(RequestInvalid) as caught:
        grammar(parser, required=False, form={"json": {"type": "text"}})
    assert caught.value.field == "guided_decoding"


@EITHER
def test_a_schema_that_is_not_held_in_full_still_makes_calls(parser: type[ToolParser]) -> None:
    tools = [tool("f", {"properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}})]
    lark = grammar(parser, tools)
    assert accepts(lark, call(parser, "f", '{"a": [1, 1]}'))
    assert not accepts(lark, call(parser, "f", '{"a": [true]}'))


@EITHER
def test_grammars_that_cannot_be_made_are_requests_that_are_wrong(parser: type[ToolParser]) -> None:
    with pytest.raises(RequestInvalid, match="'later'") as caught:
        grammar(parser, name="later")
    assert caught.value.field == "tool_choice"
    wide = {"properties": {f"k{n}": {"pattern": f"^[a-z]{{1,{n}}}[0-9]$"} for n in range(600)}}
    with pytest.raises(RequestInvalid, match="Give fewer or simpler tools") as caught:
        grammar(parser, [tool(f"f{n}", wide) for n in range(40)])
    assert caught.value.field == "tools"
