"""Tensors as far as the laws look at them: whatever has shape, dtype, device, stride(), data_ptr() and arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np

NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Dtype of the contract -> the name it ends with in a tensor's own."""

SENTINEL = -241 / 32768
"""Fills out before attention. Exact in every dtype, and no value that a whole head would have by chance."""

_MEMBERS = ("shape", "dtype", "device", "stride", "data_ptr", "element_size", "clone")


def form(tensor: Any) -> str:
    """Dtype and shape as text, or what it is instead of a tensor."""
    if not is_tensor(tensor):
        return type(tensor).__name__
    return f"{dtype_name(tensor)} {list(tensor.shape)}"


def is_tensor(value: Any) -> bool:
    """Whether it has what the laws look at."""
    return all(hasattr(value, name) for name in _MEMBERS)


def dtype_name(tensor: Any) -> str:
    """ "float32" of whatever library."""
    return str(tensor.dtype).rsplit(".", 1)[-1]


def on_device(tensor: Any, device: str) -> bool:
    """Whether the tensor is where the backend wants it; an index counts only where both name one."""
    (mine, _, my_index), (wanted, _, index) = str(tensor.device).partition(":"), device.partition(":")
    return bool(mine == wanted and (not index or not my_index or index == my_index))


def heads_dense(tensor: Any) -> bool:
    """Whether each token's [heads, dim] is contiguous."""
    _, heads, dim = tensor.shape
    strides = tensor.stride()
    return bool((dim < 2 or strides[2] == 1) and (heads < 2 or strides[1] == dim))


def contiguous(tensor: Any) -> bool:
    """Whether all of it is."""
    tokens, heads, dim = tensor.shape
    return heads_dense(tensor) and (tokens < 2 or tensor.stride()[0] == heads * dim)


def overlap(out: Any, tensor: Any) -> bool:
    """Whether a contiguous `out` shares a byte with a tensor whose tokens are dense."""
    start, length = out.data_ptr(), _bytes(out.shape, out.element_size())
    tokens = np.arange(tensor.shape[0], dtype=np.int64) * (tensor.stride()[0] * tensor.element_size())
    begins = tokens + tensor.data_ptr()
    ends = begins + _bytes(tensor.shape[1:], tensor.element_size())
    return bool(((begins < start + length) & (ends > start)).any()) and length > 0


def _bytes(shape: Any, item: int) -> int:
    return int(np.prod([int(size) for size in shape], dtype=np.int64)) * item


def same(tensor: Any, before: Any) -> bool:
    """Whether two tensors hold equal values, NaN being equal to NaN."""
    return bool(((tensor == before) | ((tensor != tensor) & (before != before))).all())


def finite(tensor: Any) -> bool:
    """Whether every value is a number."""
    return bool((tensor - tensor == 0).all())


def unwritten(out: Any) -> list[int]:
    """[row, head] of the first head of out [T, Hq, Dv] that still holds the sentinel; empty when none does."""
    found = (out == SENTINEL).all(-1).nonzero()
    return [int(at) for at in found[0]] if len(found) else []
