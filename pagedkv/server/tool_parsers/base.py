"""What every tool parser shares: its records, the JSON object of a call, and how content around calls is told."""

from __future__ import annotations

import json
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

_log = logging.getLogger("pagedkv.server")

WHITE = " \t\n\r"
"""White space of JSON."""
_WHITE = re.compile(f"[{WHITE}]*")
_OUTSIDE_STRINGS = frozenset(WHITE + '{}[]:,"+-.0123456789E' + "true" + "false" + "null")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call: its id, the name of a tool of the request, and the arguments, a JSON object as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a piece of the answer turned out to be: text for people, and calls that are now complete."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class NoCall(Exception):
    """What began like a call is none; its text says why, without the model's words."""


class ToolParser(ABC):
    """Reads one answer of a model, a character at a time, so that no split of it into pieces can make a difference.

    Text that may belong to a call is held back until that is decided. What is no call after all, because it is cut
    off, malformed, or names no tool of the request, is content, and a log line says why. White space beside calls is
    told only between texts.
    """

    keys: ClassVar[tuple[str, ...]]
    """Under which of these names a call holds its arguments, in the order of preference."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        """`tools`: those of the request, as `check_tools` accepts them."""
        self._names = frozenset(tool["function"]["name"] for tool in tools)
        self._held: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._space: list[str] = []
        self._started = self._after_call = False

    @classmethod
    @abstractmethod
    def grammar(
        cls,
        tools: Sequence[Mapping[str, Any]],
        *,
        name: str | None,
        required: bool,
        parallel: bool,
        form: Mapping[str, Any] | None = None,
    ) -> str:
        """Lark text for llguidance: what an answer may be, each call with arguments after its tool's schema.

        `name`: one call of this tool. `required`: one call or, with `parallel`, several. Neither: any text, in which
        whatever begins as a call is one, or, with `form`, calls or a text of that form, a mapping of one setting of
        `GuidedDecodingParams`. Raises `RequestInvalid`.
        """

    def push(self, text: str) -> Delta:
        """Take in the next piece of the answer."""
        if self._passes(text):
            self._say(text)
            return self._told()
        for char in text:
            try:
                self._take(char)
            except NoCall as reason:
                self._log_text(reason)
                self._release()
        return self._told()

    def finish(self) -> Delta:
        """The answer has ended: what is left of it."""
        self._end()
        if not self._after_call:
            self._content += self._space
        self._space.clear()
        return self._told()

    @abstractmethod
    def _passes(self, text: str) -> bool:
        """Whether all of a piece is content, whatever follows: most are, and need not be looked at by character."""

    @abstractmethod
    def _take(self, char: str) -> None:
        """One more character. Raises `NoCall`, with that character held last."""

    @abstractmethod
    def _release(self) -> None:
        """What is held is no call: read on behind it."""

    @abstractmethod
    def _end(self) -> None:
        """Tell what is held."""

    def _say(self, text: str) -> None:
        if text.isspace() or not text:
            self._space.append(text)
            return
        text = "".join([*self._space, text])
        body = text.rstrip()
        self._space = [text[len(body) :]]
        self._content.append(body.lstrip() if self._after_call and not self._started else body)
        self._started, self._after_call = True, False

    def _say_held(self) -> None:
        self._say("".join(self._held))
        self._held.clear()

    def _tell(self, call: ToolCall) -> None:
        self._calls.append(call)
        self._held.clear()
        self._after_call = True

    def _told(self) -> Delta:
        told = Delta(content="".join(self._content), calls=self._calls)
        self._content, self._calls = [], []
        return told

    def _read(self, text: str) -> ToolCall:
        return read_call(text, self.keys, self._names)

    def _log_text(self, reason: NoCall | str) -> None:
        _log.warning("what began as a tool call stays text: %s", reason)


class ObjectScanner:
    """Finds the end of a JSON object, a character at a time; `read_call` tells whether it is one.

    Words that Python reads as numbers and JSON does not know, NaN and Infinity, end it.
    """

    def __init__(self) -> None:
        self._chars: list[str] = []
        self._depth = 0
        self._state: Callable[[str], None] = self._outside

    def take(self, char: str) -> str | None:
        """The object's text once it is complete. Raises `NoCall` at a character that no JSON has there."""
        self._chars.append(char)
        self._state(char)
        return None if self._depth else "".join(self._chars)

    def _outside(self, char: str) -> None:
        if char not in _OUTSIDE_STRINGS:
            raise NoCall("its JSON breaks off")
        if char == '"':
            self._state = self._inside
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _inside(self, char: str) -> None:
        if char < " ":
            raise NoCall("a string of its JSON holds a control character")
        if char == '"':
            self._state = self._outside
        elif char == "\\":
            self._state = self._escaped

    def _escaped(self, char: str) -> None:
        self._state = self._inside


def read_call(text: str, keys: Sequence[str], names: Collection[str]) -> ToolCall:
    """The call that a JSON object is; its arguments keep their digits and escapes. Raises `NoCall`."""
    members = _members(text)
    name = members.get("name", ("", None))[1]
    if not isinstance(name, str):
        raise NoCall("it has no name")
    if name not in names:
        raise NoCall("its name is that of no tool")
    key = next((key for key in keys if key in members), None)
    if key is None:
        raise NoCall(f"it has no {' or '.join(keys)}")
    arguments, value = members[key]
    if not isinstance(value, dict):
        raise NoCall(f"its {key} are no JSON object")
    return ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=arguments)


# What the numbers are does not matter, and Python refuses to read whole ones of many digits.
_DECODER = json.JSONDecoder(parse_int=float)


def _members(text: str) -> dict[str, tuple[str, Any]]:
    """Name -> text and value of each member of the object that `text` is. Raises `NoCall`."""
    try:
        return dict(_member_items(text))
    except (ValueError, RecursionError) as error:
        raise NoCall("its JSON is malformed") from error


def _member_items(text: str) -> Iterator[tuple[str, tuple[str, Any]]]:
    at = _past("{", text, 0)
    while text[at] != "}":
        _past('"', text, at)
        name, at = _DECODER.raw_decode(text, at)
        start = _past(":", text, at)
        value, end = _DECODER.raw_decode(text, start)
        yield name, (text[start:end], value)
        at = _skip(text, end)
        if text[at] != "}":
            at = _past(",", text, at)
            _past('"', text, at)


def _skip(text: str, at: int) -> int:
    found = _WHITE.match(text, at)
    return found.end() if found else at


def _past(char: str, text: str, at: int) -> int:
    """Where what follows `char` begins. Raises `ValueError` where another character stands."""
    at = _skip(text, at)
    if text[at] != char:
        raise ValueError(f"{char} expected")
    return _skip(text, at + 1)
