"""Calls as Llama 3.1 and later models write them: an answer that is nothing but JSON objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pagedkv.server.tool_parsers.base import WHITE, ObjectScanner, ToolParser
from pagedkv.server.tool_parsers.tools import answer_rule, call_rules, checked_grammar

TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """Calls from the first character on, behind `<|python_tag|>` or not, one after another or with semicolons between.

    From the first character that continues no such answer, all is content.
    """

    keys = ("parameters", "arguments")

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._tag = ""
        self._scanner = ObjectScanner()
        self._state: Callable[[str], None] = self._before

    @classmethod
    def grammar(
        cls,
        tools: Sequence[Mapping[str, Any]],
        *,
        name: str | None,
        required: bool,
        parallel: bool,
        form: Mapping[str, Any] | None = None,
    ) -> str:
        rules = call_rules(tools, name, before="", key=cls.keys[0], after="")
        start = 'call ("; " call)*' if parallel and name is None else "call"
        if name is None and not required:
            start += " | answer"
            # Text that begins with a brace would be a call.
            rules += answer_rule(form, like_calls=True) if form is not None else "answer: /\\s*([^{\\s](.|\\n)*)?/\n"
        return checked_grammar(f"start: {start}\n{rules}")

    def _passes(self, text: str) -> bool:
        return self._state == self._text

    def _take(self, char: str) -> None:
        self._held.append(char)
        self._state(char)

    def _before(self, char: str) -> None:
        if self._tag in ("", TAG) and (char == "{" or char in WHITE):
            self._open(char)
        elif TAG.startswith(self._tag + char):
            self._tag += char
        else:
            self._release()

    def _between(self, char: str) -> None:
        if char == "{" or char == ";" or char in WHITE:
            self._open(char)
        else:
            self._release()

    def _open(self, char: str) -> None:
        if char == "{":
            self._scanner = ObjectScanner()
            self._scanner.take(char)
            self._state = self._inside

    def _inside(self, char: str) -> None:
        text = self._scanner.take(char)
        if text is not None:
            self._tell(self._read(text))
            self._state = self._between

    def _text(self, char: str) -> None:
        self._say_held()

    def _release(self) -> None:
        self._say_held()
        self._state = self._text

    def _end(self) -> None:
        if self._state == self._inside:
            self._log_text("the answer ends within it")
        if self._state == self._between:
            self._held.clear()
        self._say_held()
