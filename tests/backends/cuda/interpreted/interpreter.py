"""Triton's interpreter made fit for tests: bfloat16 as a GPU computes it, and no access outside a tensor.

As it comes, the interpreter multiplies the bit patterns of bfloat16 as whole numbers, truncates where it narrows, and
reads whatever lies at a wrong address. Both repairs hold for triton 3.6 to 3.9.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.errors import TritonError
from triton.runtime import interpreter as own

from tests.backends.cuda.interpreted.probes import bf16_work

Builder = own.InterpreterBuilder
COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}


class OutOfBounds(Exception):
    """A kernel touched memory outside every tensor that it was given."""


def install() -> None:
    """Replace what is wrong, once in a process; kernels over bfloat16 skip their test where it cannot be repaired."""
    own.GridExecutor._init_args_hst = _noting(own.GridExecutor._init_args_hst)
    Builder.create_masked_load = _checked(Builder.create_masked_load, "load")
    Builder.create_masked_store = _checked(Builder.create_masked_store, "store")
    own._patch_lang_tensor = _repaired_index(own._patch_lang_tensor)
    own._patch_lang = _once_a_launch(own._patch_lang)
    reason = _repair_bfloat16()
    if reason is not None:
        own.InterpretedFunction.run = _refusing_bfloat16(own.InterpretedFunction.run, reason)


# -- bfloat16 ----------------------------------------------------------------------------------------------------------


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(numbers):
    """float32 to the bits of bfloat16, to nearest even."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), nearest)


def _repair_bfloat16():
    """Put the repairs in place -> None, or why they are not: a hook is missing, or bfloat16 is still wrong."""
    repairs = {
        "create_dot": _repaired_dot,
        "cast_impl": _repaired_cast,
        "binary_op": _repaired_binary,
        "create_fp_to_fp": _repaired_narrow,
    }
    before = {name: getattr(Builder, name, None) for name in repairs}
    missing = [name for name, hook in before.items() if hook is None]
    if missing:
        return f"this interpreter has no {', '.join(missing)} to repair"
    for name, repaired in repairs.items():
        setattr(Builder, name, repaired(before[name]))
    wrong = _wrong_bfloat16()
    if wrong is not None:
        for name, hook in before.items():
            setattr(Builder, name, hook)
    return wrong


def _wrong_bfloat16():
    """What a product, a sum and a rounding of bfloat16 give that torch does not; None where all are right."""
    a, b = torch.randn((2, 16, 16), generator=torch.Generator().manual_seed(1)).bfloat16()
    product, total, narrow = torch.empty(16, 16), torch.empty_like(a), torch.empty_like(a)
    try:
        bf16_work[(1,)](a, b, product, total, narrow, N=16)
    except TritonError as error:
        return f"the interpreter does not take its repair: {error}"
    exact = a.double() @ b.double()
    if (product - exact).abs().max() < 1e-4 and torch.equal(total, a + b) and torch.equal(narrow, product.bfloat16()):
        return None
    return "the interpreter computes bfloat16 wrongly in spite of its repair"


def _refusing_bfloat16(run, reason):
    def refusing(self, *args, **kwargs):
        tensors = [getattr(x, "base", x) for x in (*args, *kwargs.values())]
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 for x in tensors):
            pytest.skip(f"bfloat16 under the interpreter: {reason}")
        return run(self, *args, **kwargs)

    return refusing


def _is_bf16(handle):
    return handle.dtype.scalar == tl.bfloat16


def _wide(handle):
    return own.TensorHandle(widened(handle.data), tl.float32) if _is_bf16(handle) else handle


def _repaired_dot(dot):
    return lambda self, a, b, *rest: dot(self, _wide(a), _wide(b), *rest)


def _repaired_cast(cast):
    def repaired(self, source, target):
        wanted = target.scalar
        if _is_bf16(source) and wanted != tl.bfloat16:
            return _wide(source) if wanted == tl.float32 else cast(self, _wide(source), target)
        if wanted == tl.bfloat16 and not _is_bf16(source):
            return own.TensorHandle(narrowed(source.data.astype(np.float32)), tl.bfloat16)
        return cast(self, source, target)

    return repaired


def _repaired_narrow(narrow):
    def repaired(self, source, target, rounding):
        kinds = (source.dtype.scalar, target.scalar)
        if tl.bfloat16 in kinds and min(kind.primitive_bitwidth for kind in kinds) >= 16:
            return self.cast_impl(source, target)
        return narrow(self, source, target, rounding)

    return repaired


def _repaired_binary(binary):
    def repaired(self, left, right, operation):
        if not (_is_bf16(left) and _is_bf16(right)):
            return binary(self, left, right, operation)
        result = operation(widened(left.data), widened(right.data))
        return own.TensorHandle(result if operation in COMPARISONS else narrowed(result), tl.bfloat16)

    return repaired


# -- numbers -----------------------------------------------------------------------------------------------------------


def _repaired_index(patch):
    """A number of a kernel as an index: Triton 3.6 leaves to numpy what numpy 2.4 no longer does with arrays of one."""

    def repaired(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return repaired


# -- time --------------------------------------------------------------------------------------------------------------


def _once_a_launch(patch):
    """The language is patched anew for every call of one kernel's function by another: a third of a test's time."""
    patched = set()

    def once(fn):
        if fn.__module__ in patched:
            return None  # only the launch itself restores what it patched
        scope = patch(fn)
        patched.add(fn.__module__)
        restore = scope.restore

        def restored():
            patched.clear()
            restore()

        scope.restore = restored
        return scope

    return once


# -- bounds ------------------------------------------------------------------------------------------------------------

_spans: list[tuple[int, int]] = []


def _noting(init):
    def noting(self, args, kwargs):
        result = init(self, args, kwargs)
        given = [*result[0], *result[1].values()]
        tensors = [x if isinstance(x, torch.Tensor) else getattr(x, "base", None) for x in given]
        _spans[:] = sorted(_span(x) for x in tensors if isinstance(x, torch.Tensor) and x.numel())
        return result

    return noting


def _span(tensor):
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _checked(access, what):
    def checked(self, pointers, *rest, **more):
        mask = rest[1] if what == "store" else rest[0]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        _check(pointers.data, mask.data, size, what)
        return access(self, pointers, *rest, **more)

    return checked


def _check(pointers, mask, size, what):
    pointers = np.asarray(pointers)
    wanted = pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]
    if not wanted.size:
        return
    starts = np.array([span[0] for span in _spans], np.uint64)
    ends = np.array([span[1] for span in _spans], np.uint64)
    at = np.searchsorted(starts, wanted, side="right").astype(np.int64) - 1
    bad = (at < 0) | (wanted + np.uint64(size) > ends[np.maximum(at, 0)])
    if bad.any():
        raise OutOfBounds(f"{what} of {int(bad.sum())} addresses outside every tensor argument")
