"""Ops computed by the kernels in C++ (`csrc/linear.h`, `csrc/elementwise.h`), float32 in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagedkv.api import ContractViolation, OpSpec
from pagedkv_cpu.native import FORMATS, Kernels

GROUP = 32
"""Weights that share a scale, and activations that are rounded together."""
_PLAIN: Mapping[str, frozenset[str]] = {
    "rms_norm": frozenset({"wide"}),
    "add_rms_norm": frozenset({"wide"}),
    "rope": frozenset(),
    "silu_mul": frozenset(),
    "gelu_tanh_mul": frozenset(),
}
"""Op -> the attributes that change nothing in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBlocks:
    """GGUF weights [n, k] in the kernels' panels. `format` is a number of `FORMATS`."""

    panels: torch.Tensor
    address: int
    format: int
    n: int
    k: int
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)


class _Blocks:
    """What both ops over packed blocks share."""

    def __init__(self, kernels: Kernels, spec: OpSpec, rows: str, columns: str) -> None:
        self._kernels, self._context = kernels, kernels.context
        self._format, self._rows, self._columns = (
            FORMATS[spec.attributes["format"]],
            spec.dims[rows],
            spec.dims[columns],
        )

    def pack(self, blocks: torch.Tensor, bias: torch.Tensor | None = None) -> PackedBlocks:
        """GGUF blocks uint8 [n, bytes of a row] into panels; nothing given is kept but the bias."""
        n, k, given = self._rows, self._columns, blocks.contiguous()
        panels = torch.empty(self._kernels.packed_bytes(self._format, n, k), dtype=torch.uint8)
        self._kernels.pack(self._context, self._format, n, k, given.data_ptr(), panels.data_ptr())
        kept = None if bias is None else bias.float().contiguous()
        return PackedBlocks(panels, panels.data_ptr(), self._format, n, k, kept)


class BlockLinear(_Blocks):
    """`linear` with the attribute format: x is rounded to 8 bits in groups of 32, everything after that is exact."""

    def __init__(self, kernels: Kernels, spec: OpSpec) -> None:
        super().__init__(kernels, spec, "n", "k")
        self._work = torch.empty(0, dtype=torch.uint8)

    def __call__(self, x: torch.Tensor, packed: PackedBlocks) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        rows = x if x.is_contiguous() else x.contiguous()
        count = rows.shape[0]
        out = torch.empty(count, packed.n)
        needed = count * (packed.k + packed.k // GROUP * 8)
        if self._work.numel() < needed:
            self._work = torch.empty(needed, dtype=torch.uint8)
        bias = None if packed.bias is None else packed.bias.data_ptr()
        self._kernels.linear(
            self._context,
            packed.format,
            count,
            packed.n,
            packed.k,
            rows.data_ptr(),
            packed.address,
            bias,
            out.data_ptr(),
            self._work.data_ptr(),
        )
        return out


class BlockEmbedding(_Blocks):
    """`embedding` with the attribute format: dequantized rows, exactly."""

    def __init__(self, kernels: Kernels, spec: OpSpec) -> None:
        super().__init__(kernels, spec, "vocab", "dim")

    def __call__(self, ids: torch.Tensor, packed: PackedBlocks) -> torch.Tensor:
        """ids [T] int64 below n -> [T, K]."""
        where = ids.contiguous()
        if len(where) and not 0 <= int(where.min()) <= int(where.max()) < packed.n:
            raise ContractViolation(
                f"ids must be 0..{packed.n - 1}, got {int(where.min())}..{int(where.max())}", law="op arguments"
            )
        out = torch.empty(len(where), packed.k)
        self._kernels.rows(
            self._context, packed.format, len(where), packed.k, where.data_ptr(), packed.address, out.data_ptr()
        )
        return out


class NativeOps:
    """The ops of one backend instance that the kernels compute."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._context = kernels, kernels.context

    def get(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        """The op, or None where the kernels have none for this dtype or these attributes."""
        if spec.dtype != "fp32":
            return None
        if name in ("linear", "embedding") and spec.attributes.keys() == {"format"}:
            return self._blocks(name, spec)
        if name not in _PLAIN or not spec.attributes.keys() <= _PLAIN[name]:
            return None
        found: Callable[..., Any] = getattr(self, f"_{name}")
        return found

    def _blocks(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        columns = spec.dims["k" if name == "linear" else "dim"]
        if spec.attributes["format"] not in FORMATS or columns % GROUP:
            return None
        return BlockLinear(self._kernels, spec) if name == "linear" else BlockEmbedding(self._kernels, spec)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, dim = x.contiguous(), x.shape[-1]
        out = torch.empty_like(rows)
        count = rows.numel() // dim
        self._kernels.add_rms_norm(
            self._context, count, dim, None, rows.data_ptr(), weight.data_ptr(), eps, out.data_ptr()
        )
        return out

    def _add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not residual.is_contiguous():
            residual.add_(x)
            return self._rms_norm(residual, weight, eps)
        added, dim = x if x.is_contiguous() else x.contiguous(), x.shape[-1]
        out = torch.empty_like(residual)
        self._kernels.add_rms_norm(
            self._context,
            residual.numel() // dim,
            dim,
            added.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
        )
        return out

    def _rope(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        if q.stride(2) == k.stride(2) == 1 and q.stride(1) == k.stride(1):
            self._turn(q, k, cos, sin)
            return
        for heads in (q, k):  # the kernel wants the entries of a head one after the other
            copied = heads.contiguous()
            self._turn(copied, copied[:, :0], cos, sin)
            heads.copy_(copied)

    def _turn(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        cos, sin = cos.contiguous(), sin.contiguous()
        self._kernels.rope(
            self._context,
            q.shape[0],
            q.shape[1],
            k.shape[1],
            2 * cos.shape[1],
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            q.stride(1),
            cos.data_ptr(),
            sin.data_ptr(),
        )

    def _silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._gated(0, x)

    def _gelu_tanh_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._gated(1, x)

    def _gated(self, kind: int, x: torch.Tensor) -> torch.Tensor:
        rows, dim = x if x.is_contiguous() else x.contiguous(), x.shape[1] // 2
        out = torch.empty(x.shape[0], dim)
        self._kernels.gated(self._context, kind, x.shape[0], dim, rows.data_ptr(), out.data_ptr())
        return out
