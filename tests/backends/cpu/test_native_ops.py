"""The kernels' ops: packed GGUF weights against gguf's own numbers, the rest against float64, each row on its own."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from pagedkv.api import ContractViolation, OpSpec
from tests.backends.cpu import rig

pytestmark = pytest.mark.parametrize("kernels", ["native"], indirect=True)
FORMATS = ["Q4_0", "Q4_1", "Q8_0"]


def quantized(name: str, n: int, k: int) -> tuple[torch.Tensor, np.ndarray]:
    """(GGUF blocks [n, bytes of a row], the weights they stand for [n, k] in float64)."""
    kind = getattr(gguf.GGMLQuantizationType, name)
    blocks = gguf.quants.quantize(np.random.default_rng(n + k).standard_normal((n, k), np.float32), kind)
    return torch.from_numpy(blocks.copy()), gguf.quants.dequantize(blocks, kind).astype(np.float64)


def rounded(x: torch.Tensor) -> np.ndarray:
    """x as the product sees it: 8 bits in groups of 32, scaled by the largest."""
    groups = x.double().numpy().reshape(len(x), x.shape[1] // 32, 32)
    scale = np.abs(groups).max(-1, keepdims=True) / 127
    return (np.rint(groups / np.where(scale > 0, scale, 1)) * scale).reshape(x.shape)


def linear(name: str, n: int, k: int):
    op = rig.shared_backend().op("linear", OpSpec(dtype="fp32", dims={"n": n, "k": k}, attributes={"format": name}))
    assert op is not None
    return op


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (50, 64), (576, 576), (33, 1536)])
def test_the_product_with_packed_weights(name, n, k):
    blocks, weights = quantized(name, n, k)
    bias = torch.linspace(-1, 1, n)
    packed = linear(name, n, k).pack(blocks, bias)
    for rows in (0, 1, 5, 40, 300):
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
        want = rounded(x) @ weights.T + bias.double().numpy()
        got = linear(name, n, k)(x, packed).double().numpy()
        # A code that lies between two whole numbers may be rounded either way.
        assert got.shape == want.shape and np.abs(got - want).max(initial=0) <= 2e-2 + 2e-3 * np.sqrt(k)
        assert np.median(np.abs(got - want)) <= 1e-5 if rows else True


@pytest.mark.parametrize("name", FORMATS)
def test_codes_that_fit_exactly_give_the_exact_product(name):
    blocks, weights = quantized(name, 48, 96)
    codes = np.random.default_rng(1).integers(-127, 128, (7, 96))
    codes[:, ::32] = 127  # the largest of every group, so that a code is the number itself
    got = linear(name, 48, 96)(torch.from_numpy(codes.astype(np.float32)), linear(name, 48, 96).pack(blocks))
    want = codes @ weights.T
    assert np.abs(got.double().numpy() - want).max() <= 2e-6 * np.abs(codes).sum(1).max()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_the_product_depends_on_that_row_alone(name, threads, kernels):
    blocks, _ = quantized(name, 200, 96)
    made = rig.backend(threads)
    op = made.op("linear", OpSpec(dtype="fp32", dims={"n": 200, "k": 96}, attributes={"format": name}))
    packed, x = op.pack(blocks), torch.randn(300, 96)
    whole = op(x, packed)
    for start, count in ((0, 1), (7, 1), (31, 2), (33, 31), (255, 45)):
        assert torch.equal(op(x[start : start + count], packed), whole[start : start + count])
    made.close()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_packed_table_are_exact_and_a_tied_head_shares_it(name):
    blocks, weights = quantized(name, 50, 64)
    spec = OpSpec(dtype="fp32", dims={"vocab": 50, "dim": 64}, attributes={"format": name})
    embedding = rig.shared_backend().op("embedding", spec)
    table = embedding.pack(blocks)
    ids = torch.tensor([0, 49, 17, 17])
    assert torch.equal(embedding(ids, table), torch.from_numpy(weights[ids.numpy()].astype(np.float32)))
    x = torch.ones(1, 64)
    assert torch.equal(linear(name, 50, 64)(x, table), linear(name, 50, 64)(x, linear(name, 50, 64).pack(blocks)))
    with pytest.raises(ContractViolation, match=r"0\.\.49"):
        embedding(torch.tensor([50]), table)


def test_what_the_kernels_do_not_compute_is_left_to_others():
    made = rig.shared_backend()
    for name, dtype, dims, attributes in (
        ("linear", "fp32", {"n": 8, "k": 64}, {"format": "Q6_K"}),
        ("linear", "fp32", {"n": 8, "k": 48}, {"format": "Q4_0"}),
        ("linear", "bf16", {"n": 8, "k": 64}, {"format": "Q4_0"}),
        ("rms_norm", "bf16", {"dim": 8}, {}),
        ("rope", "fp32", {"q_heads": 1, "kv_heads": 1, "head_dim": 8, "rotary_dim": 8}, {"of_tomorrow": 1}),
    ):
        assert made.op(name, OpSpec(dtype=dtype, dims=dims, attributes=attributes)) is None


def op(name: str):
    return rig.shared_backend().op(name, OpSpec(dtype="fp32", dims={"dim": 1}))


@pytest.mark.parametrize("dim", [1, 7, 64, 100, 576])
def test_norms_against_float64(dim):
    x, residual, weight = torch.randn(5, dim), torch.randn(5, dim), torch.randn(dim)
    total = (residual + x).double()
    want = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = op("add_rms_norm")(x, residual, weight, 1e-5)
    assert torch.equal(residual.double(), total.float().double()) and (got - want).abs().max() < 2e-5
    heads = torch.randn(3, 4, 2 * dim)[..., :dim]
    wide = heads.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert (op("rms_norm")(heads, weight, 1e-5) - want).abs().max() < 2e-5


@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (64, 32), (20, 10), (16, 2)])
def test_rope_turns_slices_of_one_tensor_in_place(dim, rotary):
    fused = torch.randn(70, 5, dim)
    q, k = fused[:, :3], fused[:, 3:]
    cos, sin = torch.randn(70, rotary // 2), torch.randn(70, rotary // 2)
    before, half = fused.double(), rotary // 2
    left, right = before[..., :half], before[..., half:rotary]
    c, s = cos.double()[:, None], sin.double()[:, None]
    want = torch.cat([left * c - right * s, right * c + left * s, before[..., rotary:]], -1)
    op("rope")(q, k, cos, sin)
    assert (fused - want).abs().max() < 2e-6


@pytest.mark.parametrize("dim", [1, 13, 64, 1536])
def test_gates_against_float64(dim):
    x = torch.randn(30, 2 * dim) * 5
    x[0, 0], x[1, 0], x[2, 0] = 200.0, -200.0, 0.0
    gate, up = x.double()[:, :dim], x.double()[:, dim:]
    for name, gated in (("silu_mul", torch.nn.functional.silu(gate)), ("gelu_tanh_mul", None)):
        want = (torch.nn.functional.gelu(gate, approximate="tanh") if gated is None else gated) * up
        got = op(name)(x).double()
        assert ((got - want).abs() <= 1e-6 * (1 + want.abs())).all(), name
        assert torch.equal(op(name)(x[3:4]), op(name)(x)[3:4])
