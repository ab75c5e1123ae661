"""What each op means, in plain torch: the oracle of a backend's ops, and what runs where a backend has none.

Shapes: T tokens, D entries of a vector. Tensors have the model's dtype unless said; arithmetic between the entries of a
vector is in float32 and is rounded once at the end.

In float32 a row's bits depend on that row alone: reductions run over the last dimension only, and no function is used
whose scalar tail differs from its vector body (`torch.sigmoid` and `silu` do). `linear` is the exception: what a
matrix product does with the number of rows is its library's choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagedkv.api import OpSpec
from pagedkv.api.torch import DTYPES
from pagedkv.ops.gguf_quants import dequantized, named_type


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLinear:
    """Weights of the reference `linear`, as they came: weight [N, K], bias [N] or None."""

    weight: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Linear:
    """`linear`: x [T, K] -> x weight' + bias [T, N]. Dims: n, k."""

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Keep weight [N, K] and bias [N]; nothing is copied."""
        return PackedLinear(weight=weight, bias=bias)

    def __call__(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return F.linear(x, packed.weight, packed.bias)


class FormatLinear(Linear):
    """`linear` with the attribute format=F, a tensor type of GGUF: x times the dequantized weights. Dims: n, k.

    An op may round each group of 32 entries of x to 8 bits under one scale; this one is exact. A row's bits depend on
    the row alone where the backend promises batch invariance.
    """

    def __init__(self, spec: OpSpec) -> None:
        self._spec = spec

    def pack(self, blocks: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Dequantize uint8 [N, K / block size * block bytes], the blocks as they lie in the file; bias [N] in dtype."""
        return PackedLinear(weight=_dequantized(blocks, self._spec), bias=bias)


class FormatEmbedding:
    """`embedding` with the attribute format=F: exact rows of the dequantized table. Dims: vocab, dim.

    What it packs, `linear` of the same format, dims and provider takes too: a tied head costs nothing more.
    """

    def __init__(self, spec: OpSpec) -> None:
        self._spec = spec

    def pack(self, blocks: Tensor) -> PackedLinear:
        """Dequantize uint8 [V, D / block size * block bytes], the blocks as they lie in the file."""
        return PackedLinear(weight=_dequantized(blocks, self._spec), bias=None)

    def __call__(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        return embedding(ids, packed.weight)


def _dequantized(blocks: Tensor, spec: OpSpec) -> Tensor:
    kind = named_type(spec.attributes["format"])
    shape = (len(blocks), blocks.shape[1] // kind.block_bytes * kind.block_size)
    weight = dequantized(blocks.cpu().numpy().reshape(-1), kind, shape, DTYPES[spec.dtype])
    return weight.to(blocks.device)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm`: x / sqrt(mean(x^2) + eps), rounded to x's dtype, times weight. x [..., D], weight [D]. Dims: dim.

    With the attribute wide=True the weight is float32 whatever x is, and is applied before rounding.
    Source: Zhang and Sennrich 2019; the two orders of rounding are those of transformers' Llama and Gemma.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype) if weight.dtype == x.dtype else (wide * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`add_rms_norm`: residual += x in place, then rms_norm of the sum. x, residual [T, D]. Dims, attributes: same."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`rope`: turn the first R entries of each head in place, entry i paired with i + R/2.

    q [T, Hq, D] and k [T, Hkv, D] may be slices of one tensor; cos, sin [T, R/2] float32, R <= D.
    Dims: q_heads, kv_heads, head_dim, rotary_dim. Source: Su et al. 2021, halves paired as in GPT-NeoX.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    _turn(q, cos, sin)
    _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = cos.shape[-1]
    left, right = x[..., :half], x[..., half : 2 * half]
    turned_left = left * cos - right * sin
    turned_right = right * cos + left * sin
    left.copy_(turned_left)
    right.copy_(turned_right)


def silu_mul(x: Tensor) -> Tensor:
    """`silu_mul`: silu(gate) * up of x = [gate, up] [T, 2 I] -> [T, I], silu(g) = g / (1 + exp(-g)). Dims: dim = I."""
    gate, up = x.chunk(2, dim=-1)
    # Not F.silu: the bits of its last few entries depend on the shape of the whole tensor.
    return _gated(gate, gate.neg().float(), up)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """`gelu_tanh_mul`: gelu(gate) * up of x = [gate, up] [T, 2 I] -> [T, I], gelu by its tanh form. Dims: dim = I.

    g / 2 (1 + tanh u) = g / (1 + exp(-2 u)) with u = sqrt(2 / pi) (g + 0.044715 g^3). Source: Hendrycks and Gimpel
    2016.
    """
    gate, up = x.chunk(2, dim=-1)
    return _gated(gate, gate.float().square().mul_(0.044715).add_(1.0).mul_(gate).mul_(_GELU), up)


_GELU = -2.0 * math.sqrt(2.0 / math.pi)


def _gated(gate: Tensor, exponent: Tensor, up: Tensor) -> Tensor:
    """gate / (1 + exp(exponent)), rounded, times up; `exponent` [T, I] float32 is overwritten."""
    exponent.exp_().add_(1.0)
    torch.div(gate, exponent, out=exponent)
    return exponent.to(gate.dtype).mul_(up)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """`embedding`: rows of table [V, D] by ids [T] int64 -> [T, D]. Dims: vocab, dim."""
    return F.embedding(ids, table)


def greedy(logits: Tensor) -> Tensor:
    """`greedy`: the most probable id of each row, of equal logits the lowest: logits [n, V] -> int32 [n]. Dims: vocab.

    -1 stands for a row with a NaN, or with nothing above minus infinity.
    """
    best = logits.argmax(-1)  # a NaN counts as larger than anything, and compares as nothing
    top = logits.gather(-1, best[:, None])[:, 0]
    return torch.where(top > -torch.inf, best, -1).to(torch.int32)


def sample(logits: Tensor, numbers: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`sample`: one id for each row: logits [n, V], numbers [n] in [0, 1) -> int32 [n]. Dims: vocab.

    By (logit down, id up), the top_k [n] first tokens stay (int32, at least 1; V is off), of these the fewest that hold
    top_p [n] of their mass exp(logit / temperature), at least one (1 is off). The id is the first, in the order of ids,
    whose cumulated mass exceeds the row's number times the whole. temperature [n]; 0 is greedy. Plus infinity takes the
    lowest id that has it; -1 as in `greedy`. numbers, temperature and top_p are float32.

    An op may add up masses in float32: where a number, or a cut, is within 1e-6 of a token's edge, the token on either
    side will do. A row's id depends on that row alone. Source of top-p: Holtzman et al. 2020.
    """
    best = greedy(logits)
    ends = _kept_mass(logits.double(), temperature.double(), top_k, top_p.double()).cumsum(-1)
    whole = ends[:, -1]
    aim = torch.minimum(numbers * whole, torch.nextafter(whole, torch.zeros_like(whole)))  # below the last end
    drawn = (ends <= aim[:, None]).sum(-1)
    certain = (temperature == 0) | (best < 0) | (logits == torch.inf).any(-1)
    return torch.where(certain, best, drawn.to(torch.int32))


def _kept_mass(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """exp((logit - top) / temperature) of the tokens that stay, 0 of the others, in the order of ids: [n, V]."""
    ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
    mass = ((ranked - ranked[:, :1]) / temperature[:, None]).exp()
    mass *= torch.arange(mass.shape[1], device=mass.device) < top_k[:, None]
    ends = mass.cumsum(-1)
    before = F.pad(ends[:, :-1], (1, 0), value=-1.0)  # the first stays even where top_p is 0
    mass *= before < top_p[:, None] * ends[:, -1:]
    return torch.empty_like(mass).scatter_(-1, ids, mass)


REFERENCE: Mapping[str, Callable[..., Any]] = {
    "linear": Linear(),
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "rope": rope,
    "silu_mul": silu_mul,
    "gelu_tanh_mul": gelu_tanh_mul,
    "embedding": embedding,
    "greedy": greedy,
    "sample": sample,
}

FORMATTED: Mapping[str, Callable[[OpSpec], Callable[..., Any]]] = {
    "linear": FormatLinear,
    "embedding": FormatEmbedding,
}
"""The ops that know the attribute "format"."""
