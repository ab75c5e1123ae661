"""The tools of a request and the choice among them, checked, and the grammar of one call of any of them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from pagedkv.api.errors import RequestInvalid
from pagedkv.sampling.guided import GuidedDecodingParams

_log = logging.getLogger("pagedkv.server")

MAX_TOOLS = 1024
_ASKED = re.compile("^guided_decoding (json|grammar) (cannot be used: )?")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# As chat templates write arguments into prompts, so that a forced call reads as the calls that the model has seen.
_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether an answer may, must or must not call tools; `name` is the one to call in mode "function"."""

    mode: Literal["none", "auto", "required", "function"]
    name: str | None = None


def check_tools(tools: Any) -> None:
    """Raise `RequestInvalid` with the field for what is no list of function tools as the OpenAI API has them.

    A function's schema must be one of an object that compiles to a grammar. What calls cannot be held to is an error
    where the function is `strict`, and logged otherwise, once a tool.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise _invalid("must be a list of function tools", "tools")
    if len(tools) > MAX_TOOLS:
        raise _invalid(f"holds {len(tools)} tools: give at most {MAX_TOOLS}", "tools")
    seen: dict[str, int] = {}
    for number, tool in enumerate(tools):
        name = _check_tool(tool, f"tools[{number}]")
        if name in seen:
            raise _invalid(
                f"is the name of tools[{seen[name]}] too: names must differ", f"tools[{number}].function.name"
            )
        seen[name] = number


def check_tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]] | None) -> ToolChoice:
    """What `tool_choice` asks for, with `tools` checked before; None is "auto" where there are tools.

    Raises `RequestInvalid`.
    """
    if choice is None or choice in ("none", "auto"):
        return ToolChoice(mode="auto" if tools and choice != "none" else "none")
    name = None if choice == "required" else _chosen(choice)
    if not tools:
        raise _invalid("asks for a call, and the request has no tools: give some", "tool_choice")
    chosen_tools(tools, name)
    return ToolChoice(mode="required") if name is None else ToolChoice(mode="function", name=name)


def chosen_tools(tools: Sequence[Mapping[str, Any]], name: str | None) -> list[Mapping[str, Any]]:
    """The functions that may be called: that of `name`, or all. Raises `RequestInvalid` if there is none."""
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not functions:
        raise _invalid(f"names {name!r}, which is none of the request's tools", "tool_choice")
    return functions


def call_rules(tools: Sequence[Mapping[str, Any]], name: str | None, *, before: str, key: str, after: str) -> str:
    """Lark rules of `call`: an object with name and arguments, between `before` and `after`, of one of the tools.

    Arguments are a grammar of their own each, so that references within a schema keep their root.
    """
    functions = chosen_tools(tools, name)
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(functions)))]
    for number, function in enumerate(functions):
        # In the parts in which a JSON schema is read too: what is longer would win over them where both may stand.
        parts = (before + "{", '"name"', ": ", f'"{function["name"]}"', ", ", f'"{key}"', ": ")
        opening = " ".join(json.dumps(part) for part in parts)
        rules.append(f"call_{number}: {opening} arguments_{number} {json.dumps('}' + after)}")
        rules.append(f"arguments_{number}: %json {_schema(function, lenient=not function.get('strict'))}")
    return "\n".join(rules) + "\n"


def answer_rule(form: Mapping[str, Any], *, like_calls: bool = False) -> str:
    """The Lark rule `answer`: a JSON text as `response_format` or `guided_json` asks for it.

    `form` is a mapping for `GuidedDecodingParams`. `like_calls`: with the white space of calls, so that both may begin
    alike. Raises `RequestInvalid`, also for forms that leave calls no place.
    """
    if not form.keys() <= {"json", "json_object"}:
        raise RequestInvalid(
            f"guided_{next(iter(form))} leaves no place for calls of tools: leave it out, or set tool_choice to none",
            field="tool_choice",
        )
    (grammar,) = json.loads(GuidedDecodingParams(**form).llguidance)["grammars"]
    schema = grammar["json_schema"] | ({"x-guidance": _FORM} if like_calls else {})
    return f"answer: %json {json.dumps(schema)}\n"


def checked_grammar(lark: str) -> str:
    """The grammar, which compiles. Raises `RequestInvalid` where tools that compile one by one do not together."""
    try:
        GuidedDecodingParams(grammar=lark)
    except RequestInvalid as error:
        raise _invalid(f"make no grammar together: {_reason(error)}. Give fewer or simpler tools", "tools") from error
    return lark


def _check_tool(tool: Any, where: str) -> str:
    """The tool's name. Raises `RequestInvalid`."""
    if not isinstance(tool, Mapping):
        raise _invalid('must be an object such as {"type": "function", "function": {"name": ...}}', where)
    if tool.get("type") != "function":
        raise _invalid(f'must be "function", not {tool.get("type")!a:.50}', f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _invalid('must be an object such as {"name": ..., "parameters": {...}}', f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid("must be 1 to 64 letters, digits, underscores and hyphens", f"{where}.function.name")
    for key, kind in (("description", str), ("strict", bool), ("parameters", Mapping)):
        if not isinstance(function.get(key), kind | None):
            raise _invalid(f"must be {_KINDS[key]}", f"{where}.function.{key}")
    _check_parameters(function, f"{where}.function.parameters")
    return name


_KINDS = {"description": "text", "strict": "true or false", "parameters": "a JSON schema, an object"}


def _check_parameters(function: Mapping[str, Any], where: str) -> None:
    kind = (function.get("parameters") or {}).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise _invalid('must describe an object: arguments have names. Give it "type": "object"', where)
    try:
        reason = _reason_against_all(function)
    except (RecursionError, TypeError, ValueError) as error:
        raise _invalid(f"cannot be written as JSON ({type(error).__name__}): simplify it", where) from error
    if reason:
        hint = ", or leave strict out: then calls are not held to all of it" if function.get("strict") else ""
        raise _invalid(f"makes no grammar: {reason}. Change it{hint}", where)


def _reason_against_all(function: Mapping[str, Any]) -> str:
    """Why a function's schema cannot be used, or nothing; what a lenient one leaves out is logged."""
    reason = _reason_against(_schema(function, lenient=False))
    if not reason or function.get("strict"):
        return reason
    lenient_reason = _reason_against(_schema(function, lenient=True))
    if not lenient_reason:
        _say_left_out(function["name"], reason)
    return lenient_reason


def _schema(function: Mapping[str, Any], *, lenient: bool) -> str:
    """The schema of a function's arguments as JSON text; without parameters it takes none.

    `lenient`: with what llguidance cannot hold left out. Options of llguidance in the schema itself go first.
    """
    given = function.get("parameters")
    schema = {"properties": {}, "additionalProperties": False} if given is None else given
    return json.dumps({"x-guidance": {**_FORM, "lenient": lenient}, **schema, "type": "object"}, allow_nan=False)


@lru_cache(maxsize=256)
def _reason_against(schema: str) -> str:
    """Why a schema makes no grammar, or nothing."""
    try:
        GuidedDecodingParams(json=schema)
    except RequestInvalid as error:
        return _reason(error)
    return ""


@lru_cache(maxsize=256)
def _say_left_out(name: str, what: str) -> None:
    _log.warning("calls of tool %s are not held to all of its schema: %s", name, what)


def _reason(error: RequestInvalid) -> str:
    return ascii(_ASKED.sub("", str(error))[:300])[1:-1]


def _chosen(choice: Any) -> str:
    """The function that a choice names. Raises `RequestInvalid`."""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return str(function["name"])
    raise _invalid(
        'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}', "tool_choice"
    )


def _invalid(what: str, field: str) -> RequestInvalid:
    return RequestInvalid(f"{field} {what}", field=field)
