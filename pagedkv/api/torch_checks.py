"""What `attend` was given, checked before anything is written: for backends that compute with torch. Loads torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pagedkv.api.errors import ContractViolation, UnsupportedError
from pagedkv.api.records import LayerSpec


def check_call(
    layer: LayerSpec,
    dtype: torch.dtype,
    tokens: int,
    slots: int,
    tensors: tuple[Any, Any, Any, Any],
    unbound: Sequence[str] = (),
) -> None:
    """`ContractViolation` unless `tensors`, q, k, v and out, are what a plan of so many tokens and slots needs.

    `unbound`: what the layer needs by `bind` and nobody has bound.
    """
    q, k, v, out = tensors
    if (k is None) != (v is None) or (q is None) != (out is None):
        raise ContractViolation("k and v come together, and so do q and out", law="attend forms")
    if k is not None:
        if layer.kv_of is not None:
            raise ContractViolation(f"layer {layer.index} reads layer {layer.kv_of}'s cache: k = v = None", law="kv_of")
        _check_tensor("k", k, slots, layer.kv_heads, layer.k_dim, dtype)
        _check_tensor("v", v, slots, layer.kv_heads, layer.v_dim, dtype)
    if q is not None:
        _check_tensor("q", q, tokens, layer.q_heads, layer.k_dim, dtype)
        _check_tensor("out", out, tokens, layer.q_heads, layer.v_dim, dtype)
        if not out.is_contiguous():
            raise ContractViolation("out must be contiguous", law="attend tensors")
        if unbound:
            raise ContractViolation(f"bind {list(unbound)} of layer {layer.index} before attend", law="bind")


def _check_tensor(name: str, tensor: Any, rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    shape = tensor.shape
    if len(shape) != 3 or shape[0] < rows or shape[1] != heads or shape[2] != dim or tensor.dtype != dtype:
        raise ContractViolation(
            f"{name} must be {dtype} [>= {rows}, {heads}, {dim}], got {tensor.dtype} {list(shape)}",
            law="attend tensors",
        )
    _, between, inside = tensor.stride()
    if (heads > 1 and between != dim) or (dim > 1 and inside != 1):
        raise ContractViolation(
            f"each token's [{heads}, {dim}] of {name} must be contiguous, got strides {tensor.stride()}",
            law="attend tensors",
        )


def checked_lse(extra: Mapping[str, Any] | None, layer: LayerSpec, tokens: int, q: Any) -> torch.Tensor | None:
    """The tensor of `extra` that takes the log-sum-exp, before anything is written; None where nobody asks for it."""
    if not extra:
        return None
    unknown = sorted(extra.keys() - {"lse"})
    if unknown:
        raise UnsupportedError(f"attend takes no extra {', '.join(map(repr, unknown))}; it accepts 'lse'")
    if q is None:
        raise ContractViolation("an append has no log-sum-exp: give 'lse' together with q and out", law="lse")
    lse, heads = extra["lse"], layer.q_heads
    shaped = isinstance(lse, torch.Tensor) and lse.dim() == 2 and len(lse) >= tokens and lse.shape[1] == heads
    if not shaped or lse.dtype != torch.float32 or not lse.is_contiguous():
        given = f"{lse.dtype} {list(lse.shape)}" if isinstance(lse, torch.Tensor) else type(lse).__name__
        raise ContractViolation(f"lse must be contiguous float32 [>= {tokens}, {heads}], got {given}", law="lse")
    checked: torch.Tensor = lse
    return checked
