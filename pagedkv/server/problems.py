"""What is wrong with the form of a body, in a sentence that names the field and never quotes the body."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException, Request

from pagedkv.server.errors import HTTPError

_MOST = 3
_LONGEST = 64  # characters of a name, which is the client's own
_REASONS = {
    "missing": "is missing",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "extra_forbidden": "is not known",
}
_UNIONS = {
    "prompt": "must be a text, a list of texts, a list of token ids, or a list of lists of token ids",
    "input": "must be a text, a list of texts, a list of token ids, or a list of lists of token ids",
    "stop": "must be a text or a list of texts",
    "tool_choice": 'must be "none", "auto", "required", or an object that names a function',
    "guided_json": "must be a JSON schema, as an object or as text",
}
"""Fields that may be of several kinds, of which each would have a problem of its own."""


class StrictRequest(Request):
    """A request whose body is JSON as RFC 8259 has it, in UTF-8."""

    async def json(self) -> Any:
        """The body's value. Raises `HTTPException` with what is wrong."""
        try:
            return json.loads((await self.body()).decode(), parse_constant=_no_number)
        except UnicodeDecodeError as error:
            raise HTTPException(400, f"the body is not UTF-8 at byte {error.start}") from error
        except json.JSONDecodeError as error:
            raise HTTPException(400, f"the body is no JSON: {error.msg} at character {error.pos}") from error
        except ValueError as error:  # of Python's own limit too, 4300 digits
            reason = str(error) if str(error).startswith("NaN") else "a number has too many digits"
            raise HTTPException(400, f"the body is no JSON that can be read: {reason}") from error
        except RecursionError as error:
            raise HTTPException(400, "the body is nested too deeply") from error


def _no_number(_: str) -> Any:
    raise ValueError("NaN and Infinity are no numbers of JSON")


def refusal(problems: Sequence[Mapping[str, Any]]) -> HTTPError:
    """The error for what pydantic found; of more than three fields it tells the first ones."""
    found: dict[str, str] = {}
    for problem in problems:
        where, reason = _described([part for part in problem["loc"] if part != "body"], problem)
        found.setdefault(where, reason)
    shown = "; ".join(f"{where or 'the body'} {reason}" for where, reason in list(found.items())[:_MOST])
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return HTTPError(400, shown + more, param=next(iter(found), None) or None, code="invalid_value")


def _described(loc: Sequence[str | int], problem: Mapping[str, Any]) -> tuple[str, str]:
    if loc and loc[0] in _UNIONS and len(loc) > 1:
        return str(loc[0]), _UNIONS[str(loc[0])]
    reason = _REASONS.get(problem["type"])
    if problem["type"] == "literal_error":
        reason = f"must be {problem['ctx']['expected']}"
    return _path(loc), reason or problem["msg"].replace("Input should be", "must be")


def _path(loc: Sequence[str | int]) -> str:
    """As clients write it: messages[0].role."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f"{'.' if path else ''}{ascii(part[:_LONGEST])[1:-1]}"
    return path
