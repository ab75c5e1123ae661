"""Dequantization, bit for bit against `gguf.quants`."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pagedkv.api.errors import ModelError
from pagedkv.models.gguf_quants import READABLE_NAMES, TensorType, dequantize_into, tensor_type

Kind = gguf.GGMLQuantizationType


@pytest.mark.parametrize("name", READABLE_NAMES)
@pytest.mark.parametrize("rows", [1, 3, 1100])
def test_equal_to_the_gguf_package_bit_for_bit(name: str, rows: int) -> None:
    kind = Kind[name]
    rng = np.random.default_rng(rows)
    values = (rng.standard_normal((rows, 96)) * rng.lognormal(0, 2, (rows, 1))).astype(np.float32)
    values[0, :32] = 0.0
    stored = np.ascontiguousarray(gguf.quants.quantize(values, kind))
    raw = stored.view(np.uint8).reshape(-1)
    out = np.full((rows, 96), np.nan, np.float32)
    dequantize_into(raw, tensor_type(kind.value), out)
    np.testing.assert_array_equal(out.view(np.uint32), gguf.quants.dequantize(stored, kind).view(np.uint32))


def test_the_table_of_types_is_that_of_ggml() -> None:
    for kind in Kind:
        ours = tensor_type(kind.value)
        assert ours.name == kind.name
        if kind.name in READABLE_NAMES:
            assert (ours.block_size, ours.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="Q4_K cannot be read; supported are F32"):
        dequantize_into(np.zeros(4, np.uint8), TensorType("Q4_K"), np.zeros(4, np.float32))
    assert tensor_type(999).name == "type 999"
