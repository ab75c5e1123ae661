"""The well-known ops of a decoder: reference implementations, and how a backend replaces them.

`resolve(backend, name, spec)` is the only way a layer gets an op. What each one computes, its signature and the `dims`
of its `OpSpec` stand with its reference in `pagedkv.ops.reference`. The names below load when they are first used, so
that a model file can be opened without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv.ops.reference import REFERENCE, FormatEmbedding, FormatLinear, Linear, PackedLinear
    from pagedkv.ops.resolution import resolve

__all__ = ["REFERENCE", "FormatEmbedding", "FormatLinear", "Linear", "PackedLinear", "resolve"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pagedkv.ops' has no attribute {name!r}")
    return getattr(import_module("pagedkv.ops.resolution" if name == "resolve" else "pagedkv.ops.reference"), name)
