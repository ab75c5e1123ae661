"""Ops that torch-npu computes in one launch; everything else is left to the reference, which runs on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pagedkv.api import OpSpec
from pagedkv_ascend.limits import fits, table

DTYPES = ("bf16", "fp16")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """npu_rms_norm; x [..., D], weight [D] of x's dtype."""
    made: torch.Tensor = torch.ops.npu.npu_rms_norm(x.contiguous(), weight, eps)[0]
    return made


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place, then npu_rms_norm of the sum."""
    return rms_norm(residual.add_(x), weight, eps)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """npu_rotary_mul on the first entries of each head, in place; q, k [T, heads, D], cos, sin [T, R / 2] float32."""
    rotary = 2 * cos.shape[1]
    r1, r2 = (torch.cat((half, half), -1).to(q.dtype)[None, :, None] for half in (cos, sin))
    for x in (q, k):
        turned = x[..., :rotary]
        turned.copy_(torch.ops.npu.npu_rotary_mul(turned.contiguous().unsqueeze(0), r1, r2)[0])


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """npu_swiglu; x = [gate, up] [T, 2 I]."""
    made: torch.Tensor = torch.ops.npu.npu_swiglu(x.contiguous(), -1)
    return made


OPS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "rms_norm": ("npu_rms_norm", rms_norm),
    "add_rms_norm": ("npu_rms_norm", add_rms_norm),
    "rope": ("npu_rotary_mul", rope),
    "silu_mul": ("npu_swiglu", silu_mul),
}
"""torch-npu's operator behind each op, and the op."""


class Ops:
    """The ops of what is installed."""

    def get(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        """The op; None for what no operator does, for another dtype, and for attributes and features of any kind."""
        operator, op = OPS.get(name, ("", None))
        if op is None or spec.dtype not in DTYPES or spec.attributes or spec.features:
            return None
        return op if hasattr(torch.ops.npu, operator) and _allowed(name, spec) else None


def _allowed(name: str, spec: OpSpec) -> bool:
    """Whether the dims are within the operator's limits."""
    if name != "rope":
        return True
    most = table()["rope"]
    heads = max(spec.dims.get("q_heads", 1), spec.dims.get("kv_heads", 1))
    return heads <= most["heads"] and fits(spec.dims.get("rotary_dim", 2), most["head_dim"])
