"""The reference ops against float64, their promise about rows, and the choice between them and a backend's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagedkv.api import OpSpec
from pagedkv.api.errors import ConfigError
from pagedkv.ops import REFERENCE, Linear, resolve
from tests.helpers.plain import OpsOnlyBackend
from tests.helpers.plain_sampler import reference as plain_probabilities

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SIZES = (7, 80, 193, 1531)
"""Entries of a row: odd ones, so that a vector loop has a tail and rows start unaligned."""


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def _close(actual: Tensor, expected: Tensor) -> None:
    tolerance = DTYPES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def _norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x64 = x.double()
    return weight.double() * x64 / (x64.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = _random(5, 3, 40, dtype=dtype), _random(40, dtype=dtype, seed=1)
    _close(REFERENCE["rms_norm"](x, weight, 1e-5), _norm64(x, weight, 1e-5))
    heads = x[:, 1:]
    _close(REFERENCE["rms_norm"](heads, weight, 0.5), _norm64(heads, weight, 0.5))


def test_a_wide_weight_is_applied_before_rounding() -> None:
    """Gemma's order: 1 + w in float32 times the normed vector, rounded once."""
    x, weight = _random(50, 40, dtype=torch.bfloat16), 1.0 + 0.01 * _random(40, seed=1)
    result = REFERENCE["rms_norm"](x, weight, 1e-6)
    assert result.dtype == torch.bfloat16
    assert (result == _norm64(x, weight, 1e-6).bfloat16()).float().mean() > 0.99
    narrow = REFERENCE["rms_norm"](x, weight.bfloat16(), 1e-6)
    assert (narrow == _norm64(x, weight, 1e-6).bfloat16()).float().mean() < 0.8


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_in_place(dtype: torch.dtype) -> None:
    x, residual, weight = (_random(*s, dtype=dtype, seed=i) for i, s in enumerate([(5, 40), (5, 40), (40,)]))
    total = (x.double() + residual.double()).to(dtype)
    before = x.clone()
    _close(REFERENCE["add_rms_norm"](x, residual, weight, 1e-6), _norm64(total, weight, 1e-6))
    assert torch.equal(residual, total)
    assert torch.equal(x, before)


def _turned64(x: Tensor, angles: Tensor) -> Tensor:
    """Each pair (i, i + R / 2) as a complex number times e^(i angle); the rest as it is."""
    half = angles.shape[-1]
    pairs = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :].double()], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [8, 3])
def test_rope_turns_slices_of_one_tensor_in_place(dtype: torch.dtype, half: int) -> None:
    heads = _random(6, 7, 16, dtype=dtype)
    q, k, v = torch.split(heads, [4, 2, 1], dim=1)
    angles = _random(6, half, seed=1).double()
    expected_q, expected_k, before = _turned64(q, angles), _turned64(k, angles), v.clone()
    REFERENCE["rope"](q, k, angles.cos().float(), angles.sin().float())
    _close(q, expected_q)
    _close(k, expected_k)
    assert torch.equal(v, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    x = _random(5, 62, dtype=dtype)
    before = x.clone()
    gate, up = x.double().chunk(2, dim=-1)
    _close(REFERENCE["silu_mul"](x), gate * torch.sigmoid(gate) * up)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_tanh_mul(dtype: torch.dtype) -> None:
    x = _random(5, 62, dtype=dtype)
    before = x.clone()
    gate, up = x.double().chunk(2, dim=-1)
    _close(REFERENCE["gelu_tanh_mul"](x), torch.nn.functional.gelu(gate, approximate="tanh") * up)
    assert torch.equal(x, before)


def test_gelu_tanh_mul_stays_finite_at_the_ends() -> None:
    gate = torch.tensor([-3e38, -1e20, -100.0, -0.0, 100.0, 1e20, 3e38])
    result = REFERENCE["gelu_tanh_mul"](torch.cat([gate, torch.ones(7)])[None])
    assert torch.equal(result[0], torch.tensor([0.0, 0.0, 0.0, 0.0, 100.0, 1e20, 3e38]))


def test_silu_mul_stays_finite_at_the_ends() -> None:
    gate = torch.tensor([-3e38, -100.0, -0.0, 100.0, 3e38])
    result = REFERENCE["silu_mul"](torch.cat([gate, torch.ones(5)])[None])
    assert torch.equal(result[0], torch.tensor([0.0, 0.0, 0.0, 100.0, 3e38]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_and_its_bytes(dtype: torch.dtype) -> None:
    x, weight, bias = (_random(*s, dtype=dtype, seed=i) * 0.2 for i, s in enumerate([(5, 24), (11, 24), (11,)]))
    op = Linear()
    packed = op.pack(weight, bias)
    assert packed.nbytes == (11 * 24 + 11) * dtype.itemsize
    _close(op(x, packed), x.double() @ weight.double().T + bias.double())
    _close(op(x, op.pack(weight)), x.double() @ weight.double().T)


def test_embedding_picks_rows() -> None:
    table = _random(9, 4)
    ids = torch.tensor([8, 0, 0])
    assert torch.equal(REFERENCE["embedding"](ids, table), torch.stack([table[8], table[0], table[0]]))
    with pytest.raises(IndexError):
        REFERENCE["embedding"](torch.tensor([9]), table)


def _rope_rows(x: Tensor) -> Tensor:
    """`rope` over rows of one head each, with angles that belong to the row."""
    size = x.shape[-1] // 2 * 2
    q, k = x[:, None, :size].clone(), x[:, None, :size].flip(-1).clone()
    angles = x[:, : size // 2]
    REFERENCE["rope"](q, k, angles.mul(0.1), angles.mul(-0.2))
    return torch.cat([q, k], dim=-1)


ROW_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: REFERENCE["rms_norm"](x, torch.linspace(0.5, 2, x.shape[-1]), 1e-6),
    "add_rms_norm": lambda x: REFERENCE["add_rms_norm"](x, x.flip(-1), torch.linspace(0.5, 2, x.shape[-1]), 1e-6),
    "silu_mul": lambda x: REFERENCE["silu_mul"](torch.cat([x, x.flip(-1)], dim=-1)),
    "gelu_tanh_mul": lambda x: REFERENCE["gelu_tanh_mul"](torch.cat([x, x.flip(-1)], dim=-1)),
    "rope": _rope_rows,
    "embedding": lambda x: REFERENCE["embedding"](torch.arange(len(x)), x),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ROW_OPS)
def test_a_rows_bits_do_not_depend_on_the_other_rows(name: str, size: int) -> None:
    """In float32: alone, in small batches, in another place of the batch, in a batch that many threads share."""
    op, x = ROW_OPS[name], _random(300, size)
    whole = op(x)
    for start, count in [(0, 1), (1, 1), (299, 1), (0, 2), (3, 5), (7, 17), (1, 64), (2, 257)]:
        part = op(x[start : start + count].clone())
        assert torch.equal(part, whole[start : start + count]), (start, count)


def test_resolve_prefers_the_backends_op_and_falls_back_to_the_reference() -> None:
    def own(x: Tensor) -> Tensor:
        return x

    backend, spec = OpsOnlyBackend({"silu_mul": own}), OpSpec(dtype="bf16", dims={"dim": 8})
    assert resolve(backend, "silu_mul", spec) is own
    assert resolve(backend, "rms_norm", spec) is REFERENCE["rms_norm"]
    assert resolve(None, "silu_mul", spec) is REFERENCE["silu_mul"]
    assert backend.asked == [("silu_mul", spec), ("rms_norm", spec)]


def test_an_unknown_op_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'gelu'.*silu_mul"):
        resolve(OpsOnlyBackend({"gelu": torch.nn.functional.gelu}), "gelu", OpSpec(dtype="fp32"))


# -- sampling ----------------------------------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")
SPECIAL = torch.tensor([[0.0, 2, 2, -1], [-INF] * 4, [1, NAN, 0, 9], [3, INF, INF, 0], [-INF, -5, -0.0, 0]])
"""A tie, nothing at all, a NaN, certainty twice, zeros of both signs."""


def _sampled(logits: Tensor, numbers: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    def each(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((len(logits),), value, dtype=dtype)

    return REFERENCE["sample"](logits, numbers, each(temperature), each(top_k, torch.int32), each(top_p))


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_first_of_the_largest(dtype: torch.dtype) -> None:
    assert REFERENCE["greedy"](SPECIAL.to(dtype)).tolist() == [1, -1, -1, 1, 2]
    assert REFERENCE["greedy"](SPECIAL).dtype == torch.int32
    for temperature in (0.0, 1.0):
        assert _sampled(SPECIAL.to(dtype), torch.full((5,), 0.25), temperature, 4, 1.0)[1:4].tolist() == [-1, -1, 1]
    assert _sampled(SPECIAL, torch.full((5,), 0.999), 0.0, 4, 1.0).tolist() == [1, -1, -1, 1, 2]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 300, 1.0), (0.4, 300, 1.0), (1.0, 9, 1.0), (1.7, 300, 0.7), (0.8, 20, 0.9), (1.0, 300, 0.0), (1.0, 1, 1.0)],
)
def test_sample_inverts_the_exact_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """Every id stands where its stretch of [0, 1) is; the probabilities come from a sampler written the plain way."""
    logits = _random(300).mul(8).round().div(8)  # with ties
    exact, margin = plain_probabilities(logits.tolist(), temperature, top_k, top_p)
    assert margin > 1e-9
    numbers = torch.linspace(0, 1 - 2**-24, 501)
    ids = _sampled(logits.expand(501, 300), numbers, temperature, top_k, top_p).numpy()
    ends = exact.cumsum()
    assert (exact[ids] > 0).all()
    assert (ends[ids] > numbers.double().numpy() - 1e-12).all()
    assert (ends[ids] - exact[ids] <= numbers.double().numpy() + 1e-12).all()


def test_the_largest_number_finds_the_last_token_that_stays() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, -9.0, -INF]])
    for number in (1 - 2**-24, 1 - 2**-53):
        assert _sampled(logits, torch.tensor([number], dtype=torch.float64), 1.0, 2, 1.0).tolist() == [2]
        assert _sampled(logits, torch.tensor([number], dtype=torch.float64), 1.0, 5, 1.0).tolist() == [3]


def test_a_sampled_id_does_not_depend_on_the_other_rows() -> None:
    logits, numbers = _random(300, 193), torch.rand(300, generator=torch.Generator().manual_seed(1))
    whole = _sampled(logits, numbers, 1.3, 90, 0.95)
    for start, count in [(0, 1), (299, 1), (3, 5), (2, 257)]:
        part = slice(start, start + count)
        assert torch.equal(_sampled(logits[part].clone(), numbers[part], 1.3, 90, 0.95), whole[part])
