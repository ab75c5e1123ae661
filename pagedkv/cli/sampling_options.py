"""The options that say how tokens are drawn, the same for every command that answers prompts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import click

_log = logging.getLogger("pagedkv.cli")
_RANDOM = ("top_p", "top_k", "min_p", "seed")


def _token_limit(text: str) -> int | str:
    """A number of tokens, or the word none: None itself would mean that nothing was given."""
    if text.lower() == "none":
        return "none"
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a number of tokens nor none") from None


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "max_tokens": {
        "type": _token_limit,
        "show_default": True,
        "metavar": "N",
        "help": "Tokens of an answer, at most; none: as many as model and cache allow.",
    },
    "min_tokens": {"type": int, "metavar": "N", "help": "Tokens before an end token may come."},
    "temperature": {
        "type": float,
        "default": 0.0,
        "metavar": "T",
        "help": "How freely tokens are drawn. Default 0: always the most probable one, so that an answer can be "
        "repeated.",
    },
    "top_p": {"type": float, "metavar": "P", "help": "Draw from the most probable tokens that make up P."},
    "top_k": {"type": int, "metavar": "K", "help": "Draw from the K most probable tokens."},
    "min_p": {"type": float, "metavar": "P", "help": "Drop tokens less probable than P times the best one."},
    "repetition_penalty": {
        "type": float,
        "metavar": "X",
        "help": "Above 1: what stands in prompt or answer becomes less probable.",
    },
    "presence_penalty": {"type": float, "metavar": "X", "help": "Taken from what stands in the answer already."},
    "frequency_penalty": {"type": float, "metavar": "X", "help": "The same, for each time that it stands there."},
    "seed": {"type": int, "metavar": "N", "help": "Seed of the draws; else --engine-seed decides."},
    "stop": {"multiple": True, "metavar": "TEXT", "help": "A text that ends the answer; may be repeated."},
    "stop_token_ids": {"type": int, "multiple": True, "metavar": "ID", "help": "An end id more."},
    "ignore_eos": {"is_flag": True, "help": "Go on after the model's end token."},
}
"""Field of `SamplingParams` -> how its flag reads it, in the order of the help text."""

_FLAGS = {"stop_token_ids": "--stop-token-id"}


def _read(_context: click.Context, _parameter: click.Parameter, file: TextIO | None) -> str | None:
    """The text of a file that was given."""
    try:
        return None if file is None else file.read()
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{file.name if file else ''} is not UTF-8 ({error.reason})") from error


_FILE: Mapping[str, Any] = {"type": click.File(encoding="utf-8"), "callback": _read, "metavar": "FILE"}

FORMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "json": ("--json-schema", {**_FILE, "help": "Answers are JSON that keeps to the schema in FILE."}),
    "regex": ("--regex", {"metavar": "EXPRESSION", "help": "Answers match an expression as a whole."}),
    "choice": ("--choice", {"multiple": True, "metavar": "TEXT", "help": "Answers are one of these; repeat it."}),
    "grammar": ("--grammar", {**_FILE, "help": "Answers keep to the grammar in FILE, Lark or GBNF."}),
}
"""Field of `GuidedDecodingParams` -> its flag, and how that reads it."""


def sampling_options(max_tokens: int | str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command these options; those that were given arrive as the keyword `sampling`, a dict."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_sampling(*args: Any, **kwargs: Any) -> Any:
            given = _given({name: kwargs.pop(name) for name in OPTIONS})
            form = {name: value for name in FORMS if (value := kwargs.pop(f"guided_{name}")) not in (None, ())}
            return command(*args, sampling=given | ({"guided_decoding": form} if form else {}), **kwargs)

        for name, (flag, settings) in reversed(list(FORMS.items())):
            with_sampling = click.option(flag, f"guided_{name}", **settings)(with_sampling)
        for name, settings in reversed(list(OPTIONS.items())):
            flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
            default = {"default": str(max_tokens)} if name == "max_tokens" else {}
            with_sampling = click.option(flag, name, **{**settings, **default})(with_sampling)
        return with_sampling

    return decorate


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, under the names of `SamplingParams`."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if given["max_tokens"] == "none":
        given["max_tokens"] = None
    idle = [f"--{name.replace('_', '-')}" for name in _RANDOM if name in given]
    if idle and given["temperature"] == 0:
        _log.warning("%s: no effect at --temperature 0, which always takes the most probable token", ", ".join(idle))
    return given
