"""Creates the chosen backend: its options checked before, the instance after."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from pagedkv.api import AttentionBackend, Capabilities, Descriptor, Option, PoolCost, PoolSpec, World
from pagedkv.api.errors import ConfigError, PagedKVError
from pagedkv.plugins.checks import capability_problems, cost_problems, is_value_of, missing_methods, short
from pagedkv.plugins.discovery import Found
from pagedkv.plugins.loading import Watch, blamed, described, refusal
from pagedkv.plugins.selection import Selected

_REQUIRED_METHODS = tuple(sorted(AttentionBackend.__abstractmethods__))
_log = logging.getLogger("pagedkv.plugins")


def create(
    selected: Selected, options: Mapping[str, Any] | None = None, world: World | None = None
) -> AttentionBackend:
    """Create the backend's instance on the selected device; `PAGEDKV_CHECK` wraps it in the law checker.

    Raises what `make` raises.
    """
    found, instance = selected.found, make(selected, options, world)
    if os.environ.get("PAGEDKV_CHECK", "").strip() in ("", "0"):
        return instance
    _log.warning("PAGEDKV_CHECK is set: every call of backend %s is checked, which makes it slower", selected.name)
    from pagedkv.checking import check  # here, because every probe's child process imports this module

    offered = described(found, selected.descriptor, selected.device)
    return check(instance, offered, name=selected.name, around=Watch(found).over)


def make(selected: Selected, options: Mapping[str, Any] | None = None, world: World | None = None) -> AttentionBackend:
    """The instance itself, whatever `PAGEDKV_CHECK` says, its options checked and completed with their defaults.

    Raises `ConfigError` (an option), what the plugin raises of our own errors, and `BackendLoadError` for anything else
    that it raises and for an instance that lacks a required method.
    """
    checked = check_options(selected.descriptor, options or {})
    with blamed(selected.found, "creating the backend", passes=(PagedKVError,)):
        instance = selected.descriptor.create(selected.device.index, checked, world or World())
    _check_instance(selected.found, instance)
    return instance


def _check_instance(found: Found, instance: Any) -> None:
    problems = missing_methods(type(instance), _REQUIRED_METHODS)
    if not isinstance(instance, AttentionBackend):
        problems.insert(0, f"create() returned {short(instance)}, no pagedkv.api.AttentionBackend")
    if problems:
        raise refusal(found, "; ".join(problems))
    with blamed(found, "reading its capabilities"):
        capabilities = instance.capabilities()
    if not isinstance(capabilities, Capabilities):
        raise refusal(found, f"capabilities() returned {short(capabilities)}, must return Capabilities")
    if problems := capability_problems(capabilities):
        raise refusal(found, f"capabilities() returned wrong ones: {'; '.join(problems)}")


def pool_cost(selected: Selected, backend: AttentionBackend, spec: PoolSpec) -> PoolCost:
    """The backend's own cost of a pool, checked.

    Raises what the backend raises of our own errors, and `BackendLoadError` for anything else and for another type.
    """
    with blamed(selected.found, "computing the cost of a pool", passes=(PagedKVError,)):
        cost = backend.pool_cost(spec)
    if not isinstance(cost, PoolCost):
        raise refusal(selected.found, f"pool_cost() returned {short(cost)}, must return PoolCost")
    if problems := cost_problems(cost):
        raise refusal(selected.found, f"pool_cost() returned a wrong cost: {'; '.join(problems)}")
    return cost


def check_options(descriptor: Descriptor, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the backend with its value; old names are accepted with a log line that gives today's.

    Raises `ConfigError` for an unknown name, a value of another type, or one option given under two names.
    """
    values: dict[str, Any] = {}
    for given, value in options.items():
        option = _option(descriptor, given)
        if option.name in values:
            raise ConfigError(
                f"backend {descriptor.name!r}: option {option.name!r} is given twice, also as {given!r}; give it once"
            )
        if given != option.name:
            _log.warning("backend option %s is called %s today", given, option.name)
        values[option.name] = _typed(descriptor, option, value)
    return {option.name: values.get(option.name, option.default) for option in descriptor.options}


def parse_options(descriptor: Descriptor, texts: Iterable[str]) -> dict[str, Any]:
    """Options from "name=value" texts, as a command line gives them, converted to the option's type."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"backend option {text!r} has no value; write {text}=VALUE")
        values[name.strip()] = _converted(descriptor, _option(descriptor, name.strip()), value.strip())
    return values


def _option(descriptor: Descriptor, name: str) -> Option:
    for option in descriptor.options:
        if name in (option.name, *option.aliases):
            return option
    known = [option.name for option in descriptor.options]
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]!r}? " if close else ""
    names = ", ".join(known) or "it has none"
    raise ConfigError(f"backend {descriptor.name!r} has no option {name!r}; {advice}its options: {names}")


def _typed(descriptor: Descriptor, option: Option, value: Any) -> Any:
    if option.type is float and type(value) is int:
        return float(value)
    if not is_value_of(option, value):
        raise _wrong_type(descriptor, option, value)
    return value


def _converted(descriptor: Descriptor, option: Option, text: str) -> Any:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    try:
        return words[text.lower()] if option.type is bool else option.type(text)
    except (ValueError, KeyError):
        raise _wrong_type(descriptor, option, text) from None


def _wrong_type(descriptor: Descriptor, option: Option, value: Any) -> ConfigError:
    kind = option.type.__name__
    return ConfigError(
        f"backend {descriptor.name!r}: option {option.name!r} must be {kind}, not {value!r}: {option.help}"
    )
