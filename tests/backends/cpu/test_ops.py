"""Packed linear: right, row-invariant in bits, and honest where it cannot be had."""

from __future__ import annotations

import logging

import pytest
import torch

from pagedkv.api import OpSpec
from pagedkv_cpu import ops
from tests.backends.cpu.rig import shared_backend


def linear(dtype: str = "fp32"):
    return shared_backend().op("linear", OpSpec(dtype=dtype, dims={"n": 1, "k": 1}))


@pytest.mark.parametrize(("n", "k"), [(960, 576), (5, 3), (1, 16), (33, 77), (128, 100)])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_linear_is_right_and_steady(n, k, biased):
    op = linear()
    weight, x = torch.randn(n, k), torch.randn(70, k)
    bias = torch.randn(n) if biased else None
    packed = op.pack(weight, bias)
    assert packed.nbytes >= weight.nbytes + (bias.nbytes if biased else 0)
    out = op(x, packed)
    want = x.double() @ weight.double().T + (bias.double() if biased else 0)
    torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-4)
    for rows in (1, 2, 3, 4, 7, 16, 31, 33, 64):
        for start in (0, 5):
            assert torch.equal(op(x[start : start + rows], packed), out[start : start + rows])


def test_x_may_be_strided_or_empty():
    op = linear()
    weight = torch.randn(8, 6)
    packed = op.pack(weight)
    wide = torch.randn(9, 12)
    torch.testing.assert_close(op(wide[:, 3:9], packed), wide[:, 3:9] @ weight.T)
    assert op(torch.empty(0, 6), packed).shape == (0, 8)


def test_unsteady_products_run_in_fixed_tiles(monkeypatch, caplog):
    true = ops._product

    def unsteady(x, weight, bias):
        return true(x, weight, bias) + 1e-3 * len(x)

    caplog.set_level(logging.INFO, logger="pagedkv")
    monkeypatch.setattr(ops, "_product", unsteady)
    op = ops.Linear()
    packed, again = op.pack(torch.ones(4, 4)), op.pack(torch.ones(4, 4))
    assert packed.tiled and again.tiled
    assert caplog.text.count("tiles of 32 rows") == 1
    x = torch.randn(70, 4)
    out = op(x, packed)
    torch.testing.assert_close(out, x @ torch.ones(4, 4) + 0.032)
    assert torch.equal(op(x[33:50], packed), out[33:50])


def test_without_the_operator_the_reference_is_used(monkeypatch, caplog):
    def missing(*args):
        raise AttributeError("no such operator")

    caplog.set_level(logging.INFO, logger="pagedkv")
    monkeypatch.setattr(ops, "_product", missing)
    found = ops.Ops()
    assert found.get("linear", OpSpec(dtype="fp32")) is None
    assert found.get("linear", OpSpec(dtype="fp32")) is None
    assert caplog.text.count("no such operator") == 1


@pytest.mark.parametrize("kernels", ["torch"], indirect=True)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_without_kernels_narrow_dtypes_only_where_the_processor_multiplies_them(dtype):
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported")()
    op = linear(dtype)
    assert (op is not None) == supported
    if op is not None:
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        weight, x = torch.randn(32, 64).to(kind), torch.randn(5, 64).to(kind)
        torch.testing.assert_close(op(x, op.pack(weight)), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("kernels", ["torch"], indirect=True)
def test_ops_whose_reference_is_as_good_are_left_to_it():
    for name in ("rms_norm", "add_rms_norm", "rope", "silu_mul", "embedding", "unheard_of"):
        assert shared_backend().op(name, OpSpec(dtype="fp32")) is None
    assert shared_backend().op("linear", OpSpec(dtype="fp64")) is None
