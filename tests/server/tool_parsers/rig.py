"""Tools, whole and split answers, and answers that a grammar allows, for the tests of tool calls."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np

from pagedkv.server.tool_parsers import ToolParser

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 14}, "maxItems": 3},
        "near": {
            "type": "object",
            "properties": {"lat": {"type": "number", "minimum": -90, "maximum": 90}},
            "required": ["lat"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}},
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("get_weather", WEATHER), tool("grow-tree", TREE), tool("now")]
SCHEMAS: dict[str, Any] = {
    "get_weather": WEATHER,
    "grow-tree": TREE,
    "now": {"type": "object", "additionalProperties": False},
}

Answer = tuple[str, list[tuple[str, str]]]


def parsed(parser: type[ToolParser], pieces: Iterable[str], tools: Sequence[Any] = TOOLS) -> Answer:
    """(content, [(name, arguments)]) of an answer that comes in pieces."""
    reading = parser(tools)
    deltas = [*(reading.push(piece) for piece in pieces), reading.finish()]
    calls = [call for delta in deltas for call in delta.calls]
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.id.startswith("call_") for call in calls)
    return "".join(delta.content for delta in deltas), [(call.name, call.arguments) for call in calls]


class _Bytes:
    """One token a byte, and the end."""

    eos_token_id = 256
    bos_token_id = None
    tokens = [*(bytes([value]) for value in range(256)), b"\xff<end>"]  # noqa: RUF012
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


ENDS = {*b'"}],', _Bytes.eos_token_id}
TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


def accepts(grammar: str, text: str) -> bool:
    """Whether an answer may be `text`."""
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(grammar: str, seed: int, most: int = 4000) -> str:
    """An answer drawn at random among those that a grammar allows, with a liking for what ends things."""
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    draw, out = random.Random(seed), bytearray()
    mask = llguidance.numpy.allocate_token_bitmask(1, TOKENIZER.vocab_size)
    while len(out) < most:
        llguidance.numpy.fill_next_token_bitmask(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:257])
        ending = [token for token in allowed if token in ENDS]
        token = int(draw.choice(ending if ending and draw.random() < 0.4 else list(allowed)))
        if token == _Bytes.eos_token_id:
            return out.decode()
        assert matcher.consume_token(token), matcher.get_error()
        out.append(token)
    raise AssertionError(f"no end after {most} bytes: {out.decode(errors='replace')[-200:]}")
