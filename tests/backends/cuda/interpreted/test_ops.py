"""The fused ops against the formulas in float64, and against where the reference rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.ops import reference
from pagedkv_cuda.kernels import ops
from tests.backends.cuda.interpreted import errors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ULP = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative differences allowed: one unit in the last place, as exp and sqrt may differ by theirs."""


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32)).to(dtype)


def close(got: torch.Tensor, exact: torch.Tensor, kernel: str) -> None:
    assert got.dtype in DTYPES
    errors.note(kernel, got.dtype, got, exact.numpy())
    torch.testing.assert_close(got.double(), exact, rtol=2 * ULP[got.dtype], atol=ULP[got.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_rms_norm_of_slices(dtype, wide):
    x = numbers(3, 2, 200, dtype=dtype)[:, :, 40:140]
    weight = numbers(100, dtype=torch.float32 if wide else dtype, seed=1)
    got = ops.rms_norm(x, weight, 1e-5)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(got, exact, "rms_norm")
    if dtype != torch.float32:  # rounded where the reference rounds: all but a few sums at the edge of two numbers
        assert (got != reference.rms_norm(x, weight, 1e-5)).float().mean() < 0.01


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 5000), (torch.float32, 48)])
def test_add_rms_norm_adds_in_place(dtype, dim):
    x, residual, weight = (numbers(2, dim, dtype=dtype, seed=seed) for seed in range(3))
    weight = weight[0]
    total = (x + residual).clone()
    got = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    close(
        got,
        total.double() / (total.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double(),
        "add_rms_norm",
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (80, 20)])
def test_rope_turns_the_first_entries(dtype, dim, half):
    both = numbers(3, 24, dim, dtype=dtype)
    q, k = both[:, :18], both[:, 18:21]
    angle = numbers(3, half, seed=5).double() * 3
    cos, sin = angle.cos().float(), angle.sin().float()
    expected = both.double().clone()
    pairs = torch.complex(expected[:, :21, :half], expected[:, :21, half : 2 * half])
    turned = pairs * torch.complex(cos.double(), sin.double())[:, None]
    expected[:, :21, :half], expected[:, :21, half : 2 * half] = turned.real, turned.imag
    ops.rope(q, k, cos, sin)
    close(both, expected, "rope")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gates(dtype, name):
    x = numbers(2, 2600, dtype=dtype)[:, :2400] * 4
    gate, up = x.double().chunk(2, 1)
    exact = torch.nn.functional.silu(gate) if name == "silu_mul" else torch.nn.functional.gelu(gate, approximate="tanh")
    close(getattr(ops, name)(x), exact * up, name)


def test_no_tokens_is_no_launch():
    empty = torch.empty((0, 64))
    assert ops.rms_norm(empty, torch.ones(64), 1e-5).shape == (0, 64)
    assert ops.silu_mul(empty).shape == (0, 32)
    ops.rope(torch.empty(0, 2, 8), torch.empty(0, 1, 8), torch.empty(0, 4), torch.empty(0, 4))
