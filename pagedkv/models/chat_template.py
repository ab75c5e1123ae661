"""Renders a model's chat template, which is untrusted code, in Jinja's immutable sandbox.

On top of the sandbox (no attribute of Python's internals, no mutation, ranges of at most 100,000) everything by which a
short template builds a huge value is bounded: products, powers, sums, joins, padding. A template that loops for ever
over what it has is not stopped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedkv.api.errors import ModelError, RequestInvalid

MAX_CHARS = 1 << 24
"""The longest text, in characters, that a template may build: far above any context."""
MAX_ITEMS = 1 << 20
MAX_BITS = 1 << 12
_WIDTH = re.compile(r"\d+")


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`: it does not accept these messages."""


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The text of a conversation as the template writes it.

    Raises `ModelError` for a template that is broken or forbidden, `RequestInvalid` when it refuses the messages.
    """
    try:
        text: str = _compiled(template).render(messages=messages, **variables)
    except _Refused as error:
        raise RequestInvalid(f"the model's chat template refuses these messages: {error}", field="messages") from error
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"the model's chat template failed: {type(error).__name__}: {error}. Give another chat template."
        ) from error
    except (RecursionError, MemoryError) as error:
        raise ModelError(
            f"the model's chat template needs too much memory or depth ({type(error).__name__})."
        ) from error
    return text


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters.update({name: _guarded(name) for name in _GUARDED_FILTERS}, tojson=_to_json, join=_join_filter)
    for name in ("batch", "slice"):
        del environment.filters[name]
    for name in ("lipsum", "cycler", "joiner"):
        del environment.globals[name]
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_namespace)
    return environment


def _namespace(*args: Any, **kwargs: Any) -> _Namespace:
    values = dict(*args, **kwargs)
    for name in values:
        _check_public(name)
    return _Namespace(values)


def _check_public(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: names with an underscore in front are Python's own")


class _Namespace(jinja2.utils.Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML, which templates of language models do not expect.
    _bounded(indent if isinstance(indent, int) else len(indent or ""), 64, "an indentation")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(CodeGenerator):
    """Sends `a ~ b` through the environment, as the sandbox does for the other operators."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_operands((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


def _bounded(size: int, most: int, what: str) -> None:
    if size > most:
        raise SecurityError(f"{what} of {size} is over the limit of {most}")


def _join(parts: Iterable[str]) -> str:
    kept: list[str] = []
    total = 0
    for part in parts:
        total += len(part)
        _bounded(total, MAX_CHARS, "a text length")
        kept.append(part)
    return "".join(kept)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(_join)

    def join_operands(self, operands: Sequence[Any]) -> str:
        return _join(str(operand) for operand in operands)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _BINOP_GUARDS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str) and (guard := _TEXT_GUARDS.get(getattr(method, "__name__", ""))):
            guard(owner, *args, *kwargs.values())
        return super().call(__context, __obj, *args, **kwargs)


@jinja2.pass_eval_context
def _join_filter(context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    parts = list(value)
    _guard_join(str(d), parts)
    return jinja2.filters.sync_do_join(context, parts, d, attribute)


def _guarded(name: str) -> Callable[..., Any]:
    """Jinja's own filter `name`, after the guard of the text method of that name."""
    guard, plain = _TEXT_GUARDS[name], FILTERS[name]
    passed = getattr(plain, "jinja_pass_arg", None)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        text, *rest = args[1:] if passed else args
        guard(str(text), *rest, *kwargs.values())
        return plain(*args, **kwargs)

    if passed:
        guarded.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return guarded


def _guard_add(left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        _bounded(len(left) + len(right), MAX_CHARS, "a text length")
    elif isinstance(left, Sequence) and isinstance(right, Sequence):
        _bounded(len(left) + len(right), MAX_ITEMS, "a list length")


def _guard_multiply(left: Any, right: Any) -> None:
    if isinstance(right, Sequence):
        left, right = right, left
    if isinstance(left, Sequence) and isinstance(right, int):
        _bounded(len(left) * right, MAX_CHARS if isinstance(left, str) else MAX_ITEMS, "a repetition")
    elif isinstance(left, int) and isinstance(right, int):
        _bounded(left.bit_length() + right.bit_length(), MAX_BITS, "a number of bits")


def _guard_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _bounded(left.bit_length() * right, MAX_BITS, "a number of bits")


def _guard_percent(left: Any, right: Any) -> None:
    if isinstance(left, str):
        _guard_format(left, *(right if isinstance(right, tuple) else (right,)))


def _guard_format(text: str, *args: Any) -> None:
    """Widths stand in the format itself or, as `*` or `{}`, among the arguments."""
    widths = [int(digits[:20]) for digits in _WIDTH.findall(text)]
    widths += [arg for arg in args if isinstance(arg, int)] if "*" in text or "{" in text else []
    _bounded(len(text) + sum(len(arg) for arg in args if isinstance(arg, str)), MAX_CHARS, "a text length")
    _bounded(max(widths, default=0) * max(1, text.count("%") + text.count("{")), MAX_CHARS, "a field width")


def _guard_padding(text: str, *args: Any) -> None:
    """Padding of each line, column or tab, by whole numbers among the arguments."""
    width = max((arg for arg in args if isinstance(arg, int)), default=0)
    _bounded(width * (1 + text.count("\n") + text.count("\t")), MAX_CHARS, "a padding")


def _guard_replace(text: str, old: Any = "", new: Any = "", *_: Any) -> None:
    _bounded((text.count(str(old)) + 1) * len(str(new)), MAX_CHARS, "a replacement")


def _guard_join(text: str, parts: Any = (), *_: Any) -> None:
    if isinstance(parts, Sequence):
        total = sum(len(str(part)) for part in parts) + len(text) * len(parts)
        _bounded(total, MAX_CHARS, "a text length")


_BINOP_GUARDS: Mapping[str, Callable[[Any, Any], None]] = {
    "+": _guard_add,
    "*": _guard_multiply,
    "**": _guard_power,
    "%": _guard_percent,
}
_TEXT_GUARDS: Mapping[str, Callable[..., None]] = {
    "center": _guard_padding,
    "expandtabs": _guard_padding,
    "format": _guard_format,
    "format_map": _guard_format,
    "indent": _guard_padding,
    "join": _guard_join,
    "ljust": _guard_padding,
    "replace": _guard_replace,
    "rjust": _guard_padding,
    "wordwrap": _guard_padding,
    "zfill": _guard_padding,
}
_GUARDED_FILTERS = ("center", "format", "indent", "replace", "wordwrap")
