"""However an answer is cut into pieces, it is the same answer; and a parser is found by its name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import ConfigError
from pagedkv.server.tool_parsers import NAMES, ToolParser, get_parser
from tests.server.tool_parsers.rig import parsed

PARSERS = [get_parser(name) for name in NAMES]
FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_", "call>", "</", "<", "<|python_tag|>", "<|python", "_tag|>"),
    *('{"name": "now", "', "arguments", "parameters", '": {', "}}", '"a": "', '\\"', "\\u00e9", "\\", "[", "]", '"'),
    *(" ", "\n", "; ", ";", "text", "日本", "1e5", "NaN", "\x00", "\u00a0"),
    '{"name": "now", "arguments": {}}',
    '<tool_call>\n{"name": "now", "arguments": {"a": "</tool_call>"}}\n</tool_call>',
    '{"name": "later", "parameters": {}}',
]
ANSWERS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join) | st.text(max_size=20)


def pieces(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(ends)] or [""]


@pytest.mark.parametrize("parser", PARSERS, ids=NAMES)
@settings(max_examples=200, deadline=None)
@given(text=ANSWERS, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_u42_any_split_tells_the_same(parser: type[ToolParser], text: str, cuts: list[int]) -> None:
    whole = parsed(parser, [text])
    assert parsed(parser, pieces(text, cuts)) == whole
    assert parsed(parser, text) == whole, "a character a piece"
    if not whole[1]:
        assert whole[0] == text, "an answer without calls is told as it is"


@pytest.mark.parametrize("parser", PARSERS, ids=NAMES)
def test_every_cut_of_an_answer_with_calls(parser: type[ToolParser]) -> None:
    one = '{"name": "now", "arguments": {"a": "é\\"}"}}'
    text = f"\n<tool_call>{one}</tool_call>\nb <" if parser is get_parser("hermes") else f"<|python_tag|>{one}; {one}"
    whole: Any = parsed(parser, [text])
    assert whole[1]
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert parsed(parser, [text[:first], text[first:second], text[second:]]) == whole


@pytest.mark.parametrize("name", ["Hermes", "mistral", ""])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="hermes, llama3_json"):
        get_parser(name)
