"""Creates the chosen backend: its options checked before, the instance after."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from pagedkv.api import AttentionBackend, Capabilities, Descriptor, Option, World
from pagedkv.api.errors import ConfigError, PagedKVError
from pagedkv.plugins.discovery import Found
from pagedkv.plugins.loading import blamed, missing_methods, refusal, short
from pagedkv.plugins.selection import Selected

_REQUIRED_METHODS = tuple(sorted(AttentionBackend.__abstractmethods__))
_log = logging.getLogger("pagedkv.plugins")


def create(
    selected: Selected, options: Mapping[str, Any] | None = None, world: World | None = None
) -> AttentionBackend:
    """Create the backend's instance on the selected device, options checked and completed with their defaults.

    Raises `ConfigError` (an option), what the plugin raises of our own errors, and `BackendLoadError` for anything else
    that it raises and for an instance that lacks a required method.
    """
    found = Found(name=selected.name, distribution=selected.distribution, version=selected.version, target="")
    checked = check_options(selected.descriptor, options or {})
    with blamed(found, "creating the backend", passes=(PagedKVError,)):
        instance = selected.descriptor.create(selected.device.index, checked, world or World())
    _check_instance(found, instance)
    if os.environ.get("PAGEDKV_CHECK", "").strip() not in ("", "0"):
        _log.warning("PAGEDKV_CHECK is set, but the checker is not built yet: nothing is checked")
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


def check_options(descriptor: Descriptor, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the backend with its value; old names are accepted with a log line that gives today's.

    Raises `ConfigError` for an unknown name, a value of another type, or one option given under two names.
    """
    values: dict[str, Any] = {}
    for given, value in options.items():
        option = _option(descriptor, given)
        if option.name in values:
            raise ConfigError(f"backend option {option.name!r} is given twice, also as {given!r}; give it once")
        if given != option.name:
            _log.warning("backend option %s is called %s today", given, option.name)
        values[option.name] = _typed(option, value)
    return {option.name: values.get(option.name, option.default) for option in descriptor.options}


def parse_options(descriptor: Descriptor, texts: Iterable[str]) -> dict[str, Any]:
    """Options from "name=value" texts, as a command line gives them, converted to the option's type."""
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"backend option {text!r} has no value; write {text}=VALUE")
        values[name.strip()] = _converted(_option(descriptor, name.strip()), value.strip())
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


def _typed(option: Option, value: Any) -> Any:
    if option.type is float and type(value) is int:
        return float(value)
    unset = value is None and option.default is None
    # bool is a subclass of int: True is no thread count.
    if not unset and (not isinstance(value, option.type) or (isinstance(value, bool) and option.type is not bool)):
        raise ConfigError(
            f"backend option {option.name!r} must be {option.type.__name__}, not {value!r}: {option.help}"
        )
    return value


def _converted(option: Option, text: str) -> Any:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    try:
        return words[text.lower()] if option.type is bool else option.type(text)
    except (ValueError, KeyError):
        kind = option.type.__name__
        raise ConfigError(f"backend option {option.name!r} must be {kind}, not {text!r}: {option.help}") from None
