"""Ops on weights in GGUF blocks: the reference against the gguf package's numbers in float64."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from pagedkv.api import OpSpec
from pagedkv.api.errors import ConfigError
from pagedkv.ops import FormatEmbedding, FormatLinear, resolve
from pagedkv.ops.gguf_quants import READABLE_NAMES, named_type
from tests.helpers.gguf_files import random_k_blocks
from tests.helpers.plain import OpsOnlyBackend

N, K = 12, 512
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}


def stored(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks [N, bytes], the weights they stand for [N, K] in float64)."""
    if kind.endswith("_K"):
        blocks = random_k_blocks(kind, N, K)
    else:
        values = np.random.default_rng(0).standard_normal((N, K), np.float32)
        blocks = np.ascontiguousarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])).view(np.uint8)
    weights = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(blocks.reshape(N, -1).copy()), torch.from_numpy(weights.astype(np.float64))


def spec(name: str, kind: str, dtype: str = "fp32") -> OpSpec:
    dims = {"n": N, "k": K} if name == "linear" else {"vocab": N, "dim": K}
    return OpSpec(dtype=dtype, dims=dims, attributes={"format": kind})


@pytest.mark.parametrize("kind", READABLE_NAMES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_product_is_that_of_the_dequantized_weights(kind: str, dtype: str) -> None:
    blocks, weights = stored(kind)
    bias = torch.linspace(-1, 1, N).to(
        getattr(torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype])
    )
    op = resolve(OpsOnlyBackend(), "linear", spec("linear", kind, dtype))
    assert isinstance(op, FormatLinear)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1)).to(bias.dtype)
    result = op(x, op.pack(blocks, bias))
    expected = x.double() @ weights.T + bias.double()
    assert result.dtype == bias.dtype
    assert (result.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    assert torch.equal(op(x, op.pack(blocks)), torch.nn.functional.linear(x, weights.to(bias.dtype)))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K"])
def test_rows_of_a_table_are_exact_and_the_product_reads_the_same_table(kind: str) -> None:
    blocks, weights = stored(kind)
    embedding, linear = (resolve(None, name, spec(name, kind)) for name in ("embedding", "linear"))
    assert isinstance(embedding, FormatEmbedding) and isinstance(linear, FormatLinear)
    table = embedding.pack(blocks)
    ids = torch.tensor([3, 0, N - 1, 3])
    assert torch.equal(embedding(ids, table).double(), weights[ids])
    x = torch.randn(2, K)
    assert torch.equal(linear(x, table), linear(x, linear.pack(blocks)))
    assert table.nbytes == N * K * 4


def test_a_backends_own_op_comes_first() -> None:
    own = FormatLinear(spec("linear", "Q8_0"))
    backend = OpsOnlyBackend({"linear": own})
    asked = spec("linear", "Q4_0")
    assert resolve(backend, "linear", asked) is own
    assert backend.asked == [("linear", asked)]


def test_what_has_no_format_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="op 'rms_norm' takes no weights in a format of their own; embedding, linear"):
        resolve(None, "rms_norm", OpSpec(dtype="fp32", attributes={"format": "Q4_0"}))
    with pytest.raises(ConfigError, match="weight format 'AWQ' is not known; those of GGUF files are F32, F16, Q4_0"):
        resolve(None, "linear", spec("linear", "AWQ")).pack(torch.zeros(1, 18, dtype=torch.uint8))


def test_bytes_of_whole_blocks() -> None:
    for kind in READABLE_NAMES:
        size, count = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert named_type(kind).nbytes(K) == K // size * count
