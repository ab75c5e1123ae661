"""The kernel that copies blocks, alone in its module: Triton's interpreter leaves its own names beside a kernel."""

import triton
import triton.language as tl


@triton.jit
def copy_rows(source, target, pairs, words, BLOCK: tl.constexpr):
    """Copy rows of `words` int64 each: pairs [N, 2] int64 of source and target row; one program for each part of a row.

    Either side may be host memory that the device can reach.
    """
    program = tl.program_id(0)
    parts = tl.cdiv(words, BLOCK)
    pair = program // parts
    offsets = (program % parts) * BLOCK + tl.arange(0, BLOCK)
    kept = offsets < words
    first = tl.load(pairs + 2 * pair) * words
    second = tl.load(pairs + 2 * pair + 1) * words
    tl.store(target + second + offsets, tl.load(source + first + offsets, mask=kept), mask=kept)
