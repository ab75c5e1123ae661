"""npu_rms_norm, npu_rotary_mul and npu_swiglu. Emulation, as `operators` says."""

from __future__ import annotations

from typing import Any

import torch

from tests.backends.ascend.emulation.rules import need

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def rms_norm(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(input / root mean square x gamma, float32 1 / root mean square) over the dimensions of gamma."""
    x, gamma = given["input"], given["gamma"]
    need(x.dtype in DTYPES, f"input of {x.dtype}")
    need(gamma.dtype in (x.dtype, torch.float32), f"gamma of {gamma.dtype}, input of {x.dtype}")
    need(x.shape[x.dim() - gamma.dim() :] == gamma.shape, f"gamma {tuple(gamma.shape)} for input {tuple(x.shape)}")
    axes = tuple(range(-gamma.dim(), 0))
    inverse = torch.rsqrt(x.float().square().mean(axes, keepdim=True) + given["epsilon"])
    return (x.float() * inverse * gamma.float()).to(x.dtype), inverse


def rotary_mul(given: dict[str, Any]) -> torch.Tensor:
    """r1 x input + r2 x (input turned by a quarter), in halves or in pairs."""
    x, r1, r2, mode = given["input"], given["r1"], given["r2"], given["rotary_mode"]
    need(given["rotate"] is None, "rotate is documented, but not emulated")
    need(mode in ("half", "interleave"), f"unknown rotary_mode {mode}")
    _check_rotary(x, r1, r2, mode)
    wide = x.float()
    if mode == "half":
        first, second = wide.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    return (r1.float() * wide + r2.float() * turned).to(x.dtype)


def _check_rotary(x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, mode: str) -> None:
    for name, tensor in (("input", x), ("r1", r1), ("r2", r2)):
        need(tensor.dim() == 4, f"{name} of {tensor.dim()} dimensions: 4")
        need(tensor.dtype == x.dtype and x.dtype in DTYPES, f"{name} of {tensor.dtype}")
        need(tensor.is_contiguous(), f"{name} is not contiguous")
    need(x.shape[-1] < 896 and x.shape[-1] % 2 == 0, f"head dim {x.shape[-1]}: even, below 896")
    need(r1.shape == r2.shape, "r1 unlike r2")
    need(any(_layouts(tuple(x.shape), tuple(r1.shape), mode)), f"r1 {tuple(r1.shape)} for input {tuple(x.shape)}")
    if r1.numel():
        most = max(float(r1.float().abs().max()), float(r2.float().abs().max()))
        need(most <= 1, f"r1 and r2 lie within [-1, 1], not {most}")


def _layouts(x: tuple[int, ...], r: tuple[int, ...], mode: str) -> list[bool]:
    """Whether r1 fits the input, read as BNSD, BSND and SBND."""
    a, b, c, d = x
    readings = (
        (a, b, ((1, 1, c, d), (a, 1, c, d), x)),
        (a, c, ((1, b, 1, d), (a, b, 1, d), x)),
        (b, c, ((a, 1, 1, d), (a, b, 1, d), x)),
    )
    if mode == "half":
        return [batch < 1000 and heads < 1000 and r in shapes for batch, heads, shapes in readings]
    return [batch * heads < 1000 and r == shapes[0] for batch, heads, shapes in readings]


def swiglu(given: dict[str, Any]) -> torch.Tensor:
    """silu of the first half along `dim`, times the second."""
    x, dim = given["input"], given["dim"]
    need(x.dtype in DTYPES, f"input of {x.dtype}")
    need(x.shape[dim] % 2 == 0, f"{x.shape[dim]} numbers along dim {dim}: an even number")
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
