"""Ops computed by the kernels in C++ (`csrc/linear.h`, `csrc/plain.h`, `csrc/elementwise.h`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagedkv.api import ContractViolation, OpSpec
from pagedkv.api.torch import DTYPES
from pagedkv_cpu import host, native
from pagedkv_cpu.native import FORMATS, PLAIN, Kernels

GROUP = 32
"""Weights that share a scale, and activations that are rounded together."""
_ELEMENTWISE: Mapping[str, frozenset[str]] = {
    "rms_norm": frozenset({"wide"}),
    "add_rms_norm": frozenset({"wide"}),
    "rope": frozenset(),
    "silu_mul": frozenset(),
    "gelu_tanh_mul": frozenset(),
}
"""Op -> the attributes it knows; the weight's own dtype says whether it is wide."""
_CODES: Mapping[torch.dtype, int] = {DTYPES[name]: code for name, code in native.DTYPES.items()}
_TILE_FLAGS: Mapping[str, str] = {"bf16": "amx_bf16", "fp16": "amx_fp16"}
"""Processors that multiply whole matrices in this dtype: the kernels have no such instruction, oneDNN has."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """Weights [n, k] in the kernels' panels. `format` is a number of `FORMATS` or `PLAIN`."""

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


class _Packing:
    """What all ops over packed weights [n, k] share."""

    def __init__(self, kernels: Kernels, format: int, dtype: str, n: int, k: int) -> None:
        self._kernels, self._context = kernels, kernels.context
        self._format, self._dtype, self._n, self._k = format, DTYPES[dtype], n, k

    def pack(self, weights: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeights:
        """GGUF blocks uint8 [n, bytes of a row], or plain numbers [n, k], into panels; only the bias is kept."""
        n, k, given = self._n, self._k, weights.contiguous()
        panels = torch.empty(self._kernels.packed_bytes(self._format, n, k), dtype=torch.uint8)
        self._kernels.pack(self._context, self._format, n, k, given.data_ptr(), panels.data_ptr())
        kept = None if bias is None else bias.to(self._dtype).contiguous()
        return PackedWeights(panels, panels.data_ptr(), self._format, n, k, kept)


class NativeLinear(_Packing):
    """`linear` on packed weights; a row's bits depend on that row alone.

    On GGUF blocks x is rounded to 8 bits in groups of 32, and everything after that is exact. On plain numbers sums are
    float32.
    """

    def __init__(self, kernels: Kernels, format: int, dtype: str, n: int, k: int) -> None:
        super().__init__(kernels, format, dtype, n, k)
        self._row_work = kernels.linear_work(format, 1, k)
        self._work = torch.empty(0, dtype=torch.uint8)

    def __call__(self, x: torch.Tensor, packed: PackedWeights) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        rows = x if x.is_contiguous() else x.contiguous()
        count = rows.shape[0]
        out = torch.empty(count, packed.n, dtype=self._dtype)
        if self._work.numel() < (needed := count * self._row_work):
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


class BlockEmbedding(_Packing):
    """`embedding` with the attribute format: dequantized rows, exactly."""

    def __call__(self, ids: torch.Tensor, packed: PackedWeights) -> torch.Tensor:
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
        flags = host.isa_flags()
        self._plain = {dtype: code for dtype, code in PLAIN.items() if _TILE_FLAGS[dtype] not in flags}

    def get(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        """The op, or None where the kernels have none for this dtype or these attributes."""
        if name in ("linear", "embedding"):
            return self._over_blocks(name, spec) if spec.attributes else self._over_numbers(name, spec)
        known = name in _ELEMENTWISE and spec.attributes.keys() <= _ELEMENTWISE[name] and spec.dtype in native.DTYPES
        return getattr(self, f"_{name}") if known else None

    def _over_blocks(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        n, k = (spec.dims[dim] for dim in (("n", "k") if name == "linear" else ("vocab", "dim")))
        format = FORMATS.get(spec.attributes["format"]) if spec.attributes.keys() == {"format"} else None
        if spec.dtype != "fp32" or format is None or k % GROUP:
            return None
        kind = NativeLinear if name == "linear" else BlockEmbedding
        return kind(self._kernels, format, spec.dtype, n, k)

    def _over_numbers(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        if name != "linear" or spec.dtype not in self._plain:
            return None
        return NativeLinear(self._kernels, self._plain[spec.dtype], spec.dtype, spec.dims["n"], spec.dims["k"])

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, dim = x.contiguous(), x.shape[-1]
        out = torch.empty_like(rows)
        count = rows.numel() // dim
        self._kernels.add_rms_norm(
            self._context,
            _CODES[x.dtype],
            _CODES[weight.dtype],
            count,
            dim,
            None,
            rows.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
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
            _CODES[x.dtype],
            _CODES[weight.dtype],
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
            _CODES[q.dtype],
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
        out = torch.empty(x.shape[0], dim, dtype=x.dtype)
        self._kernels.gated(self._context, _CODES[x.dtype], kind, x.shape[0], dim, rows.data_ptr(), out.data_ptr())
        return out
