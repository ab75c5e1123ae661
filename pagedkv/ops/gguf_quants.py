"""The tensor types of GGUF files, and those of them that can be turned into float32.

A quantized row is a chain of blocks of 32 weights: a scale d (fp16), for some an offset m (fp16), then the codes q.

    Q8_0  d | 32 x int8              w = d q
    Q4_0  d | 16 bytes, two codes    w = d (q - 8)
    Q4_1  d | m | 16 bytes           w = d q + m          low nibbles are weights 0..15, high nibbles 16..31
    Q5_0  d | 32 bits | 16 bytes     w = d (q - 16)       bit i is the fifth one of weight i
    Q5_1  d | m | 32 bits | 16 bytes w = d q + m

The K types have blocks of 256 weights in groups, each with a scale s and for some an offset o of its own.

    Q4_K  d | m | s, o 8 x 6 bits | 128 bytes               w = d s q - m o       8 groups of 32
    Q5_K  d | m | s, o 8 x 6 bits | 32 bytes | 128 bytes    w = d s q - m o       bit g of byte i: fifth of i in group g
    Q6_K  128 bytes | 64 bytes | s 16 x int8 | d            w = d s (q - 32)      16 groups of 16

Source: `ggml-quants.c` of https://github.com/ggml-org/ggml
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagedkv.api.errors import ConfigError, ModelError

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

CHUNK_WEIGHTS = 1 << 15
"""Weights converted at a time: 128 KiB of float32, so that every pass after the first one hits the cache, and few
enough that torch copies them without waking its thread pool, which costs more than it gives here."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """One type: `block_bytes` bytes hold `block_size` weights; both are 0 where nothing here reads it."""

    name: str
    block_size: int = 0
    block_bytes: int = 0

    @property
    def quantized(self) -> bool:
        """Whether weights share a scale (or the type is one that cannot be read)."""
        return self.block_size != 1

    def nbytes(self, numbers: int) -> int:
        """Bytes of whole blocks that hold so many weights."""
        return numbers // self.block_size * self.block_bytes if self.block_size else 0


_READABLE: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 2 + 16),
    3: TensorType("Q4_1", 32, 2 + 2 + 16),
    6: TensorType("Q5_0", 32, 2 + 4 + 16),
    7: TensorType("Q5_1", 32, 2 + 2 + 4 + 16),
    8: TensorType("Q8_0", 32, 2 + 32),
    12: TensorType("Q4_K", 256, 2 + 2 + 12 + 128),
    13: TensorType("Q5_K", 256, 2 + 2 + 12 + 32 + 128),
    14: TensorType("Q6_K", 256, 128 + 64 + 16 + 2),
    30: TensorType("BF16", 1, 2),
}
_OTHERS: Mapping[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

_NAMED: Mapping[str, TensorType] = {kind.name: kind for kind in _READABLE.values()}
READABLE_NAMES = tuple(_NAMED)


def tensor_type(number: int) -> TensorType:
    """The type with this number in the file, also where it cannot be read."""
    return _READABLE.get(number) or TensorType(_OTHERS.get(number, f"type {number}"))


def named_type(name: str) -> TensorType:
    """The type of this name. Raises `ConfigError` for one that cannot be read."""
    found = _NAMED.get(name)
    if found is None:
        raise ConfigError(f"weight format {name!r} is not known; those of GGUF files are {', '.join(READABLE_NAMES)}")
    return found


def dequantized(raw: Bytes, kind: TensorType, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor in `dtype`, converted piece by piece so that no float32 copy of it exists beside the result."""
    import torch

    result = torch.empty(shape, dtype=dtype)
    if dtype == torch.float32:
        dequantize_into(raw, kind, result.numpy())
        return result
    flat, piece = result.view(-1), torch.empty(CHUNK_WEIGHTS, dtype=torch.float32)
    for start in range(0, flat.numel(), CHUNK_WEIGHTS):
        size = min(CHUNK_WEIGHTS, flat.numel() - start)
        at, end = (number // kind.block_size * kind.block_bytes for number in (start, start + size))
        dequantize_into(raw[at:end], kind, piece[:size].numpy())
        flat[start : start + size] = piece[:size]
    return result


def dequantize_into(raw: Bytes, kind: TensorType, out: Floats) -> None:
    """Convert the bytes of whole blocks to float32.

    raw [n * block_bytes] uint8, out [n * block_size] float32, both contiguous. Raises `ModelError` for a type that
    cannot be read.
    """
    convert = _CONVERTERS.get(kind.name)
    if convert is None:
        raise ModelError(f"tensor type {kind.name} cannot be read; supported are {', '.join(READABLE_NAMES)}.")
    blocks = raw.reshape(-1, kind.block_bytes)
    weights = out.reshape(-1, kind.block_size)
    step = CHUNK_WEIGHTS // kind.block_size
    for start in range(0, len(blocks), step):
        convert(blocks[start : start + step], weights[start : start + step])


def _f32(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view("<u2"), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    _unpack_nibbles(blocks[:, 2:], out)
    out -= np.float32(8)
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    _unpack_nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    _unpack_fives(blocks[:, 6:], blocks[:, 2:6], out)
    out -= np.float32(16)
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    _unpack_fives(blocks[:, 8:], blocks[:, 4:8], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q4_k(blocks: Bytes, out: Floats) -> None:
    groups = out.reshape(-1, 8, 32)
    groups[...] = _nibble_groups(blocks[:, 16:], 32)
    _scale_groups(blocks, groups)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    groups = out.reshape(-1, 8, 32)
    fifth = blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8) & np.uint8(1)
    groups[...] = _nibble_groups(blocks[:, 48:], 32) | fifth.swapaxes(1, 2) << np.uint8(4)
    _scale_groups(blocks, groups)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    low = _nibble_groups(blocks[:, :128], 64).reshape(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & np.uint8(3)
    groups = out.reshape(-1, 16, 16)
    groups[...] = (low | pairs << np.uint8(4)).reshape(-1, 16, 16)
    groups -= np.float32(32)
    groups *= (_half(blocks, 208) * blocks[:, 192:208].view(np.int8))[:, :, None]


def _nibble_groups(codes: Bytes, size: int) -> Bytes:
    """codes [n, 128] -> [n, 256 / size, size]: of each `size` bytes the low nibbles, then the high ones."""
    parts = codes.reshape(len(codes), -1, 1, size)
    return (parts >> np.array([[0], [4]], np.uint8) & np.uint8(15)).reshape(len(codes), -1, size)


def _scale_groups(blocks: Bytes, groups: Floats) -> None:
    """d s q - m o for codes q [n, 8, 32] of Q4_K and Q5_K."""
    scales, offsets = _six_bits(blocks[:, 4:16])
    groups *= (_half(blocks, 0) * scales)[:, :, None]
    groups -= (_half(blocks, 2) * offsets)[:, :, None]


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight offsets of six bits [n, 8] out of [n, 12].

    Bytes 0-3 hold scales 0-3, bytes 4-7 offsets 0-3; their upper two bits are those of scales and offsets 4-7, whose
    lower four are the low and the high nibbles of bytes 8-11.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    high = np.uint8(0x30)
    scales = np.concatenate([first & np.uint8(63), third & np.uint8(15) | first >> np.uint8(2) & high], axis=1)
    offsets = np.concatenate([second & np.uint8(63), third >> np.uint8(4) | second >> np.uint8(2) & high], axis=1)
    return scales, offsets


def _unpack_fives(codes: Bytes, fifth: Bytes, out: Floats) -> None:
    """codes [n, 16], fifth bits [n, 4] -> out [n, 32]."""
    _unpack_nibbles(codes, out)
    out += np.unpackbits(fifth, axis=1, bitorder="little") * np.float32(16)


def _half(blocks: Bytes, at: int) -> Floats:
    """The fp16 number at byte `at` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _unpack_nibbles(codes: Bytes, out: Floats) -> None:
    """codes [n, 16] -> out [n, 32], low nibbles first."""
    out[:, :16] = codes & np.uint8(15)
    out[:, 16:] = codes >> np.uint8(4)


_CONVERTERS: Mapping[str, Callable[[Bytes, Floats], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
