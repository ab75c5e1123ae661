"""The well-known ops of a decoder: reference implementations, and how a backend replaces them.

`resolve(backend, name, spec)` is the only way a layer gets an op. What each one computes, its signature and the `dims`
of its `OpSpec` stand with its reference in `pagedkv.ops.reference`.
"""

from __future__ import annotations

from pagedkv.ops.reference import REFERENCE, Linear, PackedLinear
from pagedkv.ops.resolve import resolve

__all__ = ["REFERENCE", "Linear", "PackedLinear", "resolve"]
