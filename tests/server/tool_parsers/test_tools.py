"""Tools and the choice among them: what is refused, by which field, and what is only said."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv.errors import RequestInvalid
from pagedkv.server.tool_parsers import ToolChoice, check_tool_choice, check_tools
from tests.server.tool_parsers.rig import TOOLS, WEATHER, tool

NESTED: dict[str, Any] = {"type": "object"}
for _ in range(2000):
    NESTED = {"type": "object", "properties": {"a": NESTED}}

BAD: list[tuple[Any, str, str]] = [
    ({"type": "function"}, "tools", "must be a list"),
    ("tools", "tools", "must be a list"),
    ([tool(f"f{n}") for n in range(1025)], "tools", "1025 tools: give at most 1024"),
    (["now"], "tools[0]", "must be an object"),
    ([*TOOLS, {"function": {"name": "f"}}], "tools[3].type", 'must be "function", not None'),
    ([{"type": "custom", "custom": {"name": "f"}}], "tools[0].type", "not 'custom'"),
    ([{"type": "function", "name": "f"}], "tools[0].function", "must be an object"),
    ([{"type": "function", "function": {}}], "tools[0].function.name", "1 to 64 letters"),
    ([tool("")], "tools[0].function.name", "1 to 64 letters"),
    ([tool("a" * 65)], "tools[0].function.name", "1 to 64 letters"),
    ([tool("a.b")], "tools[0].function.name", "1 to 64 letters"),
    ([tool("f\n")], "tools[0].function.name", "1 to 64 letters"),
    ([tool("ž")], "tools[0].function.name", "1 to 64 letters"),
    ([tool("f"), tool("g"), tool("f")], "tools[2].function.name", "the name of tools[0] too"),
    ([tool("f", description=3)], "tools[0].function.description", "must be text"),
    ([tool("f", strict="yes")], "tools[0].function.strict", "must be true or false"),
    ([tool("f", "{}")], "tools[0].function.parameters", "must be a JSON schema"),
    ([tool("f", [])], "tools[0].function.parameters", "must be a JSON schema"),
    ([tool("f", {"type": "array"})], "tools[0].function.parameters", "must describe an object"),
    ([tool("f", {"type": ["null", "string"]})], "tools[0].function.parameters", "must describe an object"),
    ([tool("f", {"properties": {"a": {"type": "text"}}})], "tools[0].function.parameters", "Invalid type: text"),
    ([tool("f", {"properties": []})], "tools[0].function.parameters", "properties must be an object"),
    ([tool("f", {"properties": {"a": {"$ref": "#/no"}}})], "tools[0].function.parameters", "'/no' does not exist"),
    ([tool("f", {"$ref": "file:///etc/passwd"})], "tools[0].function.parameters", "makes no grammar"),
    ([tool("f", {"properties": {"a": {"pattern": "(?=a)"}}})], "tools[0].function.parameters", "look-around"),
    ([tool("f", {"properties": {"a": {"pattern": "("}}})], "tools[0].function.parameters", "regex parse error"),
    ([tool("f", {"properties": {"a": {"const": float("nan")}}})], "tools[0].function.parameters", "written as JSON"),
    ([tool("f", {"properties": {"a": {"const": {1, 2}}}})], "tools[0].function.parameters", "written as JSON"),
    ([tool("f", NESTED)], "tools[0].function.parameters", "simplify it"),
    ([tool("f", {"x": "y" * (1 << 17)})], "tools[0].function.parameters", "more than 131072"),
    ([tool("f", {"required": ["a"], "additionalProperties": False})], "tools[0].function.parameters", "nsatisfiable"),
]


@pytest.mark.parametrize(("tools", "field", "message"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_tools_are_refused_by_field(tools: Any, field: str, message: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        check_tools(tools)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "tools",
    [
        [],
        TOOLS,
        [{"type": "function", "function": {"name": "f"}}],
        [tool("f", {}), tool("F", {"type": ["object", "null"]}, description="x", strict=True)],
        [tool("a-Z_9" * 12, {"anyOf": [WEATHER, {"type": "object"}]})],
    ],
    ids=str,
)
def test_tools_as_the_api_has_them_are_accepted(tools: Any, caplog: pytest.LogCaptureFixture) -> None:
    check_tools(tools)
    assert not caplog.records


LOOSE = {"properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"type": "string", "format": "colour\n"}}}


def test_what_a_grammar_cannot_hold_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "pagedkv.server"):
        check_tools([tool("paint", LOOSE)])
        check_tools([tool("paint", LOOSE)])
    (record,) = caplog.records
    assert "calls of tool paint are not held to all of its schema" in record.getMessage()
    assert "uniqueItems" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_what_a_grammar_cannot_hold_is_an_error_for_a_strict_function() -> None:
    with pytest.raises(RequestInvalid, match=r'Unimplemented keys: \["uniqueItems"\].*leave strict out') as caught:
        check_tools([tool("paint", LOOSE, strict=True)])
    assert caught.value.field == "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("choice", "tools", "expected"),
    [
        (None, None, ToolChoice(mode="none")),
        (None, [], ToolChoice(mode="none")),
        (None, TOOLS, ToolChoice(mode="auto")),
        ("auto", TOOLS, ToolChoice(mode="auto")),
        ("auto", None, ToolChoice(mode="none")),
        ("none", TOOLS, ToolChoice(mode="none")),
        ("required", TOOLS, ToolChoice(mode="required")),
        ({"type": "function", "function": {"name": "now"}}, TOOLS, ToolChoice(mode="function", name="now")),
    ],
)
def test_choices(choice: Any, tools: Any, expected: ToolChoice) -> None:
    assert check_tool_choice(choice, tools) == expected


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("any", TOOLS, 'must be "none", "auto", "required" or'),
        (3, TOOLS, "must be"),
        ([], TOOLS, "must be"),
        ({"type": "function", "name": "now"}, TOOLS, "must be"),
        ({"type": "function", "function": "now"}, TOOLS, "must be"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, TOOLS, "must be"),
        ({"type": "function", "function": {"name": "later"}}, TOOLS, "'later', which is none of the request's tools"),
        ({"type": "function", "function": {"name": "now"}}, None, "the request has no tools"),
        ("required", [], "the request has no tools"),
    ],
)
def test_bad_choices_are_refused(choice: Any, tools: Any, message: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        check_tool_choice(choice, tools)
    assert caught.value.field == "tool_choice"
    assert message in str(caught.value)
