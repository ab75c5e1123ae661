"""From what a model writes to the tool calls in it, one parser for each way of writing them."""

from __future__ import annotations

from pagedkv.api.errors import ConfigError
from pagedkv.server.tool_parsers.base import Delta, ToolCall, ToolParser
from pagedkv.server.tool_parsers.hermes import HermesParser
from pagedkv.server.tool_parsers.llama3_json import Llama3JsonParser
from pagedkv.server.tool_parsers.tools import ToolChoice, check_tool_choice, check_tools

_PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": Llama3JsonParser}
NAMES = tuple(_PARSERS)

__all__ = ["NAMES", "Delta", "ToolCall", "ToolChoice", "ToolParser", "check_tool_choice", "check_tools", "get_parser"]


def get_parser(name: str) -> type[ToolParser]:
    """The parser of that name. Raises `ConfigError`."""
    if name not in _PARSERS:
        raise ConfigError(f"no tool call parser is called {name!r}: choose one of {', '.join(NAMES)}")
    return _PARSERS[name]
