"""`linear`, one row at a time: slow, and a row's bits depend on nothing but the row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLinear:
    """Weight [N, K] and bias [N] or None, as they came."""

    weight: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Linear:
    """x [T, K] times a weight [N, K], plus bias [N]."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Keep the weights; nothing is copied."""
        return PackedLinear(weight=weight, bias=bias)

    def __call__(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """x [T, K] -> [T, N]."""
        out = x.new_empty(len(x), len(packed.weight))
        rows = x.contiguous()
        for row in range(len(rows)):
            out[row : row + 1] = torch.nn.functional.linear(rows[row : row + 1], packed.weight, packed.bias)
        return out
