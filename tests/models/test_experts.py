"""Experts against a plain sum over them in float64, and a row's independence of the rows beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagedkv.models.experts import Experts, FeedForward
from pagedkv.models.packing import Projection
from pagedkv.ops import REFERENCE, Linear
from pagedkv_cpu.ops import Linear as CpuLinear

HIDDEN, INNER, NUM = 24, 16, 6


def _weights(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Router [E, H], gate and up [E, 2 I, H], down [E, H, I]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((NUM, HIDDEN), (NUM, 2 * INNER, HIDDEN), (NUM, HIDDEN, INNER))
    router, gate_up, down = (torch.randn(shape, generator=generator) * 0.4 for shape in shapes)
    return router, gate_up, down


def _experts(linear: Linear | CpuLinear, per_token: int, normalize: bool) -> Experts:
    router, gate_up, down = _weights()

    def packed(weight: Tensor) -> Projection:
        return Projection(linear, linear.pack(weight.clone()))

    made = [
        FeedForward(gate_up=packed(gate_up[i]), activate=REFERENCE["silu_mul"], down=packed(down[i]))
        for i in range(NUM)
    ]
    return Experts(router=packed(router), experts=tuple(made), per_token=per_token, normalize=normalize)


def _plain(x: Tensor, per_token: int, normalize: bool) -> Tensor:
    router, gate_up, down = (weight.double() for weight in _weights())
    rows = []
    for row in x.double():
        shares = torch.softmax(router @ row, dim=0)
        picked = sorted(range(NUM), key=lambda e: -float(shares[e]))[:per_token]
        total = sum(float(shares[e]) for e in picked) if normalize else 1.0
        gated = [(e, (gate_up[e] @ row).chunk(2)) for e in picked]
        outputs = [shares[e] / total * (down[e] @ (g * torch.sigmoid(g) * u)) for e, (g, u) in gated]
        rows.append(torch.stack(outputs).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("per_token", [1, 2, NUM])
def test_the_weighted_sum_of_the_preferred_experts(per_token: int, normalize: bool) -> None:
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))
    result = _experts(Linear(), per_token, normalize)(x)
    torch.testing.assert_close(result.double(), _plain(x, per_token, normalize), atol=1e-5, rtol=1e-5)


def test_a_rows_bits_do_not_depend_on_the_other_rows() -> None:
    experts = _experts(CpuLinear(), 3, normalize=True)
    x = torch.randn(150, HIDDEN, generator=torch.Generator().manual_seed(2))
    whole = experts(x)
    for start, count in [(0, 1), (149, 1), (3, 5), (7, 17), (1, 64), (2, 140)]:
        assert torch.equal(experts(x[start : start + count]), whole[start : start + count]), (start, count)


def test_no_tokens_and_tokens_that_agree() -> None:
    experts = _experts(Linear(), 2, normalize=True)
    assert experts(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)
    same = torch.ones(7, HIDDEN)
    result = experts(same)
    torch.testing.assert_close(result, result[:1].expand(7, HIDDEN), atol=1e-6, rtol=1e-6)


def test_half_precision_adds_in_float32_and_rounds_once() -> None:
    x = torch.randn(60, HIDDEN, generator=torch.Generator().manual_seed(3))
    router, gate_up, down = _weights()
    linear = Linear()

    def packed(weight: Tensor) -> Projection:
        return Projection(linear, linear.pack(weight.bfloat16()))

    made = [
        FeedForward(gate_up=packed(gate_up[i]), activate=REFERENCE["silu_mul"], down=packed(down[i]))
        for i in range(NUM)
    ]
    experts = Experts(router=packed(router), experts=tuple(made), per_token=NUM, normalize=True)
    result = experts(x.bfloat16())
    assert result.dtype == torch.bfloat16
    expected = _plain(x.bfloat16().float(), NUM, normalize=True)
    assert (result.double() - expected).square().mean().sqrt() < 0.02 * expected.std()
