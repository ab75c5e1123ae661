"""The kernels' ops: packed GGUF weights against gguf's own numbers, the rest against float64, each row on its own."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from pagedkv.api import ContractViolation, OpSpec
from pagedkv_cpu import host
from pagedkv_cpu.native_ops import NativeLinear, PackedWeights
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
        ("linear", "bf16", {"n": 8, "k": 64}, {"of_tomorrow": 1}),
        ("embedding", "bf16", {"vocab": 8, "dim": 64}, {}),
        ("rms_norm", "fp8", {"dim": 8}, {}),
        ("rope", "fp32", {"q_heads": 1, "kv_heads": 1, "head_dim": 8, "rotary_dim": 8}, {"of_tomorrow": 1}),
    ):
        assert made.op(name, OpSpec(dtype=dtype, dims=dims, attributes=attributes)) is None


UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Largest relative error of one rounding."""


def plain(dtype: str, n: int, k: int, made=None):
    return (made or rig.shared_backend()).op("linear", OpSpec(dtype=dtype, dims={"n": n, "k": k}))


@pytest.fixture
def no_tile_units(monkeypatch):
    """A processor without products of whole matrices, where the kernels' product is taken."""
    monkeypatch.setattr(host, "isa_flags", lambda: frozenset({"avx2"}))


@pytest.mark.parametrize("dtype", list(UNITS))
@pytest.mark.parametrize(("n", "k"), [(1, 1), (50, 75), (576, 1536), (33, 64)])
def test_a_product_of_16_bit_numbers_is_its_float32_sum_rounded_once(no_tile_units, dtype, n, k):
    made = rig.backend()
    weight, bias = torch.randn(n, k).to(rig.TORCH[dtype]), torch.randn(n).to(rig.TORCH[dtype])
    packed = plain(dtype, n, k, made).pack(weight.clone(), bias)
    assert isinstance(packed, PackedWeights) and packed.nbytes >= weight.nbytes + bias.nbytes
    for rows in (0, 1, 5, 70):
        x = torch.randn(rows, k).to(rig.TORCH[dtype])
        want, size = x.double() @ weight.double().T + bias.double(), x.double().abs() @ weight.double().abs().T
        got = plain(dtype, n, k, made)(x, packed)
        assert got.dtype == x.dtype and got.shape == want.shape
        assert bool(((got.double() - want).abs() <= 1.01 * UNITS[dtype] * want.abs() + 4e-6 * (size + 1)).all())
    made.close()


@pytest.mark.parametrize("dtype", list(UNITS))
def test_a_row_of_a_16_bit_product_has_the_same_bits_among_1_to_40_rows(no_tile_units, dtype):
    made = rig.backend(2)
    op = plain(dtype, 100, 75, made)
    packed, x = op.pack(torch.randn(100, 75).to(rig.TORCH[dtype])), torch.randn(40, 75).to(rig.TORCH[dtype])
    alone = torch.cat([op(x[i : i + 1], packed) for i in range(40)])
    for count in range(1, 41):
        assert torch.equal(op(x[40 - count :], packed), alone[40 - count :]), count
    made.close()


def test_a_processor_with_tile_units_for_a_dtype_leaves_its_products_to_onednn(monkeypatch):
    monkeypatch.setattr(host, "isa_flags", lambda: frozenset({"amx_bf16"}))
    made = rig.backend()
    assert not isinstance(plain("bf16", 8, 8, made), NativeLinear)
    assert isinstance(plain("fp16", 8, 8, made), NativeLinear)
    made.close()


@pytest.mark.parametrize("dtype", list(UNITS))
@pytest.mark.parametrize("wide", [False, True])
def test_norms_turns_and_gates_of_16_bit_numbers_are_rounded_once(dtype, wide):
    made, kind, unit = rig.shared_backend(), rig.TORCH[dtype], 1.01 * UNITS[dtype]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(kind)

    def found(name: str):
        return made.op(name, OpSpec(dtype=dtype, dims={"dim": 1}, attributes={"wide": True} if wide else {}))

    x, residual, weight = draw(5, 100), draw(5, 100), draw(100).float() if wide else draw(100)
    before = residual.double()
    got = found("add_rms_norm")(x, residual, weight, 1e-5)
    assert bool(((residual.double() - before - x.double()).abs() <= unit * residual.double().abs()).all())
    want = residual.double() / (residual.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert got.dtype == kind and bool(((got.double() - want).abs() <= unit * want.abs() + 1e-7).all())
    assert torch.equal(found("rms_norm")(residual, weight, 1e-5), got)
    if wide:
        return
    gate, up = (half.double() for half in x.chunk(2, -1))
    want = torch.nn.functional.silu(gate) * up
    assert bool(((found("silu_mul")(x).double() - want).abs() <= unit * want.abs() + 1e-6).all())
    heads, cos, sin = draw(5, 3, 20), torch.randn(5, 8), torch.randn(5, 8)
    left, right, c, s = *heads.double()[..., :16].chunk(2, -1), cos.double()[:, None], sin.double()[:, None]
    want = torch.cat([left * c - right * s, right * c + left * s, heads.double()[..., 16:]], -1)
    found("rope")(heads[:, :2], heads[:, 2:], cos, sin)
    assert bool(((heads.double() - want).abs() <= unit * want.abs() + 1e-6).all())


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
