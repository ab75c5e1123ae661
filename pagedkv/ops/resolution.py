"""Choosing between a backend's op and the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedkv.api import AttentionBackend, OpSpec
from pagedkv.api.errors import ConfigError
from pagedkv.ops.reference import FORMATTED, REFERENCE


def resolve(backend: AttentionBackend | None, name: str, spec: OpSpec) -> Callable[..., Any]:
    """The backend's form of the op `name` for `spec`, or the reference when it has none (or `backend` is None).

    Raises `ConfigError` for a name that has no reference, or none for weights in a format.
    """
    if name not in REFERENCE:
        raise ConfigError(f"there is no op named {name!r}; the ops are {', '.join(sorted(REFERENCE))}")
    own = backend.op(name, spec) if backend is not None else None
    return _reference(name, spec) if own is None else own


def _reference(name: str, spec: OpSpec) -> Callable[..., Any]:
    if "format" not in spec.attributes:
        return REFERENCE[name]
    if name not in FORMATTED:
        raise ConfigError(f"op {name!r} takes no weights in a format of their own; {', '.join(sorted(FORMATTED))} do")
    return FORMATTED[name](spec)
