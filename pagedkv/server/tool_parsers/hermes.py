"""Calls as Hermes and Qwen models write them: each an object between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pagedkv.server.tool_parsers.base import WHITE, NoCall, ObjectScanner, ToolCall, ToolParser
from pagedkv.server.tool_parsers.tools import answer_rule, call_rules, checked_grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Any number of calls, with text before, between and behind them.

    A call is told at the end of its closing marker. At the end of the answer a complete object without one is a call
    too, since stop strings and limits cut markers off. Markers in strings of the arguments are text of those strings.
    """

    keys = ("arguments",)

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._marker = ""
        self._scanner = ObjectScanner()
        self._call: ToolCall | None = None
        self._state: Callable[[str], None] = self._outside

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
        rules = call_rules(tools, name, before="\n", key=cls.keys[0], after="\n" + CLOSE)
        several = parallel and name is None
        calls = f'"{OPEN}" call' + (f' ("\\n{OPEN}" call)*' if several else "")
        if name is not None or required:
            start = calls
        elif form is not None:
            start, rules = f"{calls} | answer", rules + answer_rule(form)
        else:
            start = "(text_open call)* TEXT" if several else "text_open call | TEXT"
            rules += f'text_open[lazy]: TEXT "{OPEN}"\nTEXT: /(.|\\n)*/\n'
        return checked_grammar(f"start: {start}\n{rules}")

    def _passes(self, text: str) -> bool:
        return self._state == self._outside and not self._marker and OPEN[0] not in text

    def _take(self, char: str) -> None:
        self._state(char)

    def _outside(self, char: str) -> None:
        self._marker += char
        while not OPEN.startswith(self._marker):
            self._say(self._marker[0])
            self._marker = self._marker[1:]
        if self._marker == OPEN:
            self._held, self._marker, self._state = [OPEN], "", self._before

    def _before(self, char: str) -> None:
        self._held.append(char)
        if char == "{":
            self._scanner = ObjectScanner()
            self._scanner.take(char)
            self._state = self._inside
        elif char not in WHITE:
            raise NoCall("no JSON object follows its marker")

    def _inside(self, char: str) -> None:
        self._held.append(char)
        text = self._scanner.take(char)
        if text is not None:
            self._call = self._read(text)
            self._state = self._behind

    def _behind(self, char: str) -> None:
        self._held.append(char)
        if self._marker or char not in WHITE:
            self._marker += char
        if not CLOSE.startswith(self._marker):
            raise NoCall("its closing marker does not follow its object")
        if self._marker == CLOSE:
            self._tell_call()

    def _tell_call(self) -> None:
        if self._call is not None:
            self._tell(self._call)
        self._call, self._marker, self._state = None, "", self._outside

    def _release(self) -> None:
        last = self._held.pop()
        self._say_held()
        self._call, self._marker, self._state = None, "", self._outside
        self._outside(last)  # it may begin the next marker

    def _end(self) -> None:
        if self._call is not None:
            self._tell_call()
        elif self._held:
            self._log_text("the answer ends within it")
            self._say_held()
        self._say(self._marker)
        self._marker = ""
