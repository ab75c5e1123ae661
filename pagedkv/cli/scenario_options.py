"""The options of `pagedkv bench --scenario`, and which of them, with which defaults, belong to which scenario."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import click
from click.core import ParameterSource

SIZES: Mapping[str, Mapping[str, int]] = {
    "chat": {"users": 8, "turns": 4, "context_len": 256, "input_len": 48, "output_len": 48, "concurrency": 4},
    "documents": {
        "documents": 6,
        "questions": 4,
        "context_len": 512,
        "input_len": 32,
        "output_len": 32,
        "concurrency": 4,
    },
    "agents": {"branches": 3, "depth": 2, "context_len": 512, "input_len": 32, "output_len": 48, "concurrency": 8},
}
"""Scenario -> its sizes and what they are when not given."""

CACHE_SHARE = 0.5
"""Of what the whole work would fill, the part that the device's cache holds."""

_COUNT: Mapping[str, Any] = {"type": click.IntRange(min=1), "metavar": "N"}
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "users": {"help": "chat: conversations that go on side by side.", **_COUNT},
    "turns": {"help": "chat: turns of each conversation.", **_COUNT},
    "documents": {"help": "documents: how many there are.", **_COUNT},
    "questions": {"help": "documents: questions about each.", **_COUNT},
    "branches": {"help": "agents: samples of a request that branches.", **_COUNT},
    "depth": {"help": "agents: how often branches branch.", **_COUNT},
    "context_len": {"help": "Tokens of what prompts begin with: system prompt, document or task.", **_COUNT},
    "concurrency": {"help": "Requests that are open at the same time.", **_COUNT},
    "cache_share": {
        "help": "Part of the work's tokens that the cache holds.",
        "type": click.FloatRange(min=0, min_open=True),
        "metavar": "SHARE",
    },
}
_OF_ALL = frozenset({"cache_share"})
_OF_BATCH_SIZES = ("batch_sizes", "repeats", "with_floor")
_SHARED = ("input_len", "output_len")
_SET_HERE = ("enable_host_caching",)  # by the three engines


def scenario_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --scenario and its sizes; those that were given arrive as the keyword `sizes`, a dict."""

    @functools.wraps(command)
    def with_sizes(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in _OPTIONS}
        return command(*args, sizes={name: v for name, v in given.items() if v is not None}, **kwargs)

    for name, settings in reversed(list(_OPTIONS.items())):
        text = f"{settings['help']}  [default: {_defaults(name)}]"
        with_sizes = click.option(_flag(name), default=None, **{**settings, "help": text})(with_sizes)
    about = "Measure work with more prefixes than the cache holds, in place of the batch sizes."
    return click.option("--scenario", type=click.Choice(list(SIZES)), help=about)(with_sizes)


def _defaults(name: str) -> str:
    """The default, or those of the scenarios in their order."""
    values = [str(own[name]) for own in SIZES.values() if name in own] or [str(CACHE_SHARE)]
    return ", ".join(values)


def scenario_sizes(
    context: click.Context, scenario: str | None, sizes: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The scenario's sizes, defaults filled in; `cache_share` None where a setting sizes the cache.

    Raises `click.UsageError` for options that do not go with the scenario, or for sizes without one.
    """
    if scenario is None:
        _refuse(sizes, "need --scenario chat, documents or agents")
        return {}
    own = SIZES[scenario]
    _refuse([name for name in _OF_BATCH_SIZES if _given(context, name)], f"do not go with --scenario {scenario}")
    options = ", ".join(map(_flag, own))
    _refuse([name for name in sizes if name not in own.keys() | _OF_ALL], f"are not of {scenario}; it has {options}")
    _refuse([name for name in _SET_HERE if name in settings], "cannot be set: a scenario runs both ways")
    lengths = {name: context.params[name] for name in _SHARED if _given(context, name)}
    sized = [name for name in ("num_blocks", "kv_cache_memory") if name in settings]
    if sized and "cache_share" in sizes:
        _refuse(["cache_share", *sized], "both size the cache: give one of them")
    return {**own, **lengths, "cache_share": None if sized else CACHE_SHARE, **sizes}


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def _refuse(names: Collection[str], why: str) -> None:
    if names:
        raise click.UsageError(f"{', '.join(map(_flag, names))} {why}")


def _flag(name: str) -> str:
    return "--" + {"with_floor": "floor"}.get(name, name).replace("_", "-")
