"""Attention against the float64 oracle, over every pair of declared values and the places where kernels go wrong."""

from __future__ import annotations

import pytest

from pagedkv.api import Limits
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.lattice import Point
from pagedkv.conformance.rig import Rig, Row

pytestmark = pytest.mark.level("core")


@pytest.mark.law("numerics: every declared combination agrees with the float64 oracle")
def test_every_declared_combination(kit: Kit, point: Point) -> None:
    context = point.tokens(point.context)
    needed = 8 * (-(-(context + 2 * point.block_size + 3) // point.block_size)) + 4
    rig = kit.rig(
        point.layer(),
        dtype=point.dtype,
        kv_dtype=point.kv_dtype,
        block_size=point.block_size,
        num_blocks=needed,
        limits=Limits(rows=8, tokens=4 * context + 8, context=4 * context + 8),
    )
    rows = rows_of(rig, point.form, context)
    for seq, length, count in rows:
        rig.write(seq, 0, length - count)
    kit.check(rig, rig.step(*rows), rig.expected(*rows))


def rows_of(rig: Rig, form: str, context: int) -> list[Row]:
    """Three rows or one, by form, whose contexts lie around `context`."""
    part = max(1, context // 3)
    if form == "prefill":
        return [(rig.sequence(context), context, context), (rig.sequence(1), 1, 1)]
    if form == "decode":
        return [(rig.sequence(n), n, 1) for n in (context, 1, context + 1)]
    if form == "chunk":
        return [(rig.sequence(context), context, part), (rig.sequence(context + 1), context + 1, min(2, context))]
    return [
        (rig.sequence(context + 1), context + 1, 1),
        (rig.sequence(context), context, context),
        (rig.sequence(context + 1), context + 1, part),
    ]
