"""Dequantization, bit for bit against `gguf.quants`."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pagedkv.api.errors import ModelError
from pagedkv.ops.gguf_quants import READABLE_NAMES, TensorType, dequantize_into, tensor_type
from tests.helpers.gguf_files import random_k_blocks

Kind = gguf.GGMLQuantizationType


K_TYPES = ("Q4_K", "Q5_K", "Q6_K")


def _check(stored: np.ndarray, kind: gguf.GGMLQuantizationType, shape: tuple[int, int]) -> None:
    out = np.full(shape, np.nan, np.float32)
    dequantize_into(stored.view(np.uint8).reshape(-1), tensor_type(kind.value), out)
    np.testing.assert_array_equal(out.view(np.uint32), gguf.quants.dequantize(stored, kind).view(np.uint32))


@pytest.mark.parametrize("name", [name for name in READABLE_NAMES if name not in K_TYPES])
@pytest.mark.parametrize("rows", [1, 3, 1100])
def test_equal_to_the_gguf_package_bit_for_bit(name: str, rows: int) -> None:
    kind = Kind[name]
    rng = np.random.default_rng(rows)
    values = (rng.standard_normal((rows, 96)) * rng.lognormal(0, 2, (rows, 1))).astype(np.float32)
    values[0, :32] = 0.0
    _check(np.ascontiguousarray(gguf.quants.quantize(values, kind)), kind, (rows, 96))


@pytest.mark.parametrize("name", K_TYPES)
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_k_types_are_equal_to_the_gguf_package_bit_for_bit(name: str, rows: int) -> None:
    """The package cannot write these, so the blocks are random bytes, with scales that are finite numbers."""
    _check(random_k_blocks(name, rows, 512, seed=rows), Kind[name], (rows, 512))


def test_the_table_of_types_is_that_of_ggml() -> None:
    for kind in Kind:
        ours = tensor_type(kind.value)
        assert ours.name == kind.name
        if kind.name in READABLE_NAMES:
            assert (ours.block_size, ours.block_bytes) == gguf.GGML_QUANT_SIZES[kind]


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="Q3_K cannot be read; supported are F32"):
        dequantize_into(np.zeros(4, np.uint8), TensorType("Q3_K"), np.zeros(4, np.float32))
    assert tensor_type(999).name == "type 999"
