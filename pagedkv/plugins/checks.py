"""Whether what a plugin hands over is what the contract says: one clause for each thing that is not.

A wrong value is refused where it is given, by name, instead of failing later where it is used. Words this core does
not know (a dtype or feature of tomorrow) are no mistake (law G6), wrong types and impossible numbers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from pagedkv.api import Capabilities, DeviceInfo, Option, PoolCost

Rule = tuple[Callable[[Any], bool], str]
"""(what a field's value must satisfy, the same in words)."""


def short(value: Any, to_text: Callable[[Any], str] = repr) -> str:
    """At most a few hundred characters of a plugin's value on one line, with a mark where it was cut."""
    try:
        text = " ".join(to_text(value).split())
    except Exception as error:  # noqa: BLE001 - the text itself is the plugin's code and may raise anything
        return f"a {type(value).__name__} whose text raises {type(error).__name__}"
    return text if len(text) <= 400 else f"{text[:400]}... ({len(text)} characters)"


def missing_methods(cls: type, methods: Iterable[str]) -> list[str]:
    """One clause for each of `methods` that the class does not implement."""
    abstract: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
    return [f"method {m} is missing" for m in methods if m in abstract or not callable(getattr(cls, m, None))]


def is_version(api: Any) -> TypeGuard[tuple[int, int]]:
    """Whether it is a (major, minor) pair."""
    return isinstance(api, tuple) and len(api) == 2 and all(type(part) is int for part in api)


def is_tuple_of(value: Any, cls: type) -> bool:
    """Whether it is a tuple that holds nothing else."""
    return isinstance(value, tuple) and all(isinstance(item, cls) for item in value)


def is_value_of(option: Option, value: Any) -> bool:
    """Whether an option takes the value. bool is a subclass of int: True is no thread count."""
    if value is None:
        return option.default is None
    return isinstance(value, option.type) and (option.type is bool or not isinstance(value, bool))


def option_problems(options: Any) -> list[str]:
    """What is wrong with a descriptor's `options`."""
    if not is_tuple_of(options, Option):
        return [f"options is {short(options)}, must be a tuple of Option"]
    problems = [f"option {short(o.name)}: {clause}" for o in options for clause in _broken(o, _OPTION)]
    if problems:
        return problems
    problems = [
        f"option {o.name!r}: default is {short(o.default)}, must be {o.type.__name__} or None"
        for o in options
        if not is_value_of(o, o.default)
    ]
    names = [name for option in options for name in (option.name, *option.aliases)]
    return problems + [f"two options answer to {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1]


def device_problems(devices: Sequence[DeviceInfo]) -> list[str]:
    """What is wrong with the devices of a `probe`."""
    problems = [clause for device in devices for clause in _broken(device, _DEVICE)]
    indices = [device.index for device in devices]
    if not problems and len(set(indices)) < len(indices):
        problems.append(f"two devices have one index: {indices}")
    return problems


def capability_problems(capabilities: Capabilities) -> list[str]:
    """What is wrong with a capability record."""
    problems = _broken(capabilities, _CAPABILITIES)
    size, sizes = capabilities.preferred_block_size, capabilities.block_sizes
    if not problems and not any(_holds(alternative, size) for alternative in sizes):
        problems.append(f"preferred_block_size is {size}, must be one of its block_sizes {short(sizes)}")
    return problems


def cost_problems(cost: PoolCost) -> list[str]:
    """What is wrong with the answer of a `pool_cost`."""
    return _broken(cost, _COST)


def _broken(record: Any, rules: Mapping[str, Rule]) -> list[str]:
    values = {name: getattr(record, name) for name in rules}
    return [f"{n} is {short(values[n])}, must be {words}" for n, (fine, words) in rules.items() if not fine(values[n])]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_words(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_word, value))


def _is_word_set(value: Any) -> bool:
    return isinstance(value, (set, frozenset)) and all(map(_is_word, value))


def _is_sizes(value: Any) -> bool:
    if isinstance(value, (set, frozenset)):
        return all(map(_is_size, value))
    return isinstance(value, tuple) and len(value) == 3 and all(map(_is_size, value)) and value[1] <= value[2]


def _is_extensions(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_word(name) and is_version(v) for name, v in value.items())


def _is_exclusion(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Mapping) and _is_word(value[1])


def _tuple(fine: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(map(fine, value))


def _optional(fine: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fine(value)


def _a(cls: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, cls)


def _holds(sizes: Any, size: int) -> bool:
    if isinstance(sizes, (set, frozenset)):
        return size in sizes
    multiple, least, most = sizes
    return bool(least <= size <= most and size % multiple == 0)


_COUNT: Rule = (_is_count, "a whole number from 0 on")
_BYTES: Rule = (_optional(_is_count), "a whole number of bytes, or None when unknown")
_WORD: Rule = (_is_word, "a word")
_WORDS: Rule = (_is_words, "a tuple of words")
_WORD_SET: Rule = (_is_word_set, "a frozenset of words")
_SIZES: Rule = (_tuple(_is_sizes), "a tuple of frozensets of sizes or of (multiple_of, min, max)")
_SWITCH: Rule = (_a(bool), "True or False")
_TEXT: Rule = (_a(str), "text")

_OPTION: Mapping[str, Rule] = {"name": _WORD, "type": (_a(type), "a type"), "help": _TEXT, "aliases": _WORDS}
_COST: Mapping[str, Rule] = {"per_block": (_is_size, "a whole number of bytes from 1 on"), "fixed": _COUNT}
_DEVICE: Mapping[str, Rule] = {
    "index": _COUNT,
    "kind": _TEXT,
    "total": _BYTES,
    "free": _BYTES,
    "unified": _SWITCH,
    "score": _COUNT,
    "reason": _TEXT,
}
_CAPABILITIES: Mapping[str, Rule] = {
    "dtypes": _WORDS,
    "kv_dtypes": _WORDS,
    "block_sizes": _SIZES,
    "head_dims": _SIZES,
    "preferred_block_size": (_is_size, "a whole number of tokens from 1 on"),
    "native_dtypes": _WORDS,
    "max_group": (_optional(_is_size), "a whole number from 1 on, or None for any"),
    "kinds": _WORD_SET,
    "features": _WORD_SET,
    "placements": _WORD_SET,
    "execution": _WORD,
    "extensions": (_is_extensions, "a mapping of names to (major, minor)"),
    "graph": _WORD,
    "max_graphs": (_optional(_is_count), "a whole number from 0 on, or None for any"),
    "graph_default": _SWITCH,
    "graph_context": (_optional(_is_size), "a whole number of tokens from 1 on, or None"),
    "async_copy": _SWITCH,
    "collectives": _WORD_SET,
    "weight_formats": _WORD_SET,
    "exclusions": (_tuple(_is_exclusion), "a tuple of (pattern, reason)"),
}
