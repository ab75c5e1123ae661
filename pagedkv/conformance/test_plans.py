"""Plans: how many live together, and that none of them changes another."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv.api import GroupSpec
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.rig import Rig, Row

pytestmark = pytest.mark.level("core")


def some_rows(rig: Rig, *shapes: tuple[int, int]) -> list[Row]:
    """Rows of (context, query tokens); what came before is in the cache."""
    rows = [(rig.sequence(length), length, count) for length, count in shapes]
    for seq, length, count in rows:
        rig.write(seq, 0, length - count)
    return rows


def three_batches(rig: Rig) -> list[list[Row]]:
    """Small, large, small."""
    size = rig.block_size
    large = [(2 * size, 1), (size + 1, 1), (2 * size + 1, size), (3, 3), (1, 1)]
    return [some_rows(rig, (size + 1, 1)), some_rows(rig, *large), some_rows(rig, (3, 2), (size, size))]


def agree(kit: Kit, rig: Rig, plan: Any, rows: list[Row], index: int, mistake: str) -> None:
    out = rig.attend(plan, rows, rig.layer(index))
    kit.check(rig, out, rig.expected(*rows, layer=index), mistake=mistake)


@pytest.mark.law("plans: two of one group are alive together and interleave over the layers")
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 2)])
def test_two_plans_of_one_group(kit: Kit, order: tuple[int, int]) -> None:
    rig = kit.rig(kit.layer(0), kit.layer(1))
    batches = three_batches(rig)
    pair = [batches[i] for i in order]
    plans = [rig.plan(*rows) for rows in pair]
    for index in (0, 1):
        for plan, rows in zip(plans, pair, strict=True):
            agree(kit, rig, plan, rows, index, "a later plan overwrote buffers of an earlier one")


@pytest.mark.law("plans: a plan made between two layers of another changes neither")
def test_plan_made_in_between(kit: Kit) -> None:
    rig = kit.rig(kit.layer(0), kit.layer(1))
    first, second, _ = three_batches(rig)
    plan = rig.plan(*first)
    agree(kit, rig, plan, first, 0, "the first layer of a plan")
    later = rig.plan(*second)
    agree(kit, rig, plan, first, 1, "a later plan overwrote buffers of an earlier one")
    agree(kit, rig, later, second, 1, "an earlier plan's attend changed a later plan")
    agree(kit, rig, later, second, 0, "layers of one plan may come in any order")


@pytest.mark.law("plans: one after another, larger and smaller, far more than are alive at once")
def test_many_plans(kit: Kit) -> None:
    rig = kit.rig(kit.layer(0))
    batches = three_batches(rig)
    for i in range(9):
        agree(kit, rig, rig.plan(*batches[i % 3]), batches[i % 3], 0, "a plan kept something of a plan before it")


@pytest.mark.law("plans: those of two groups of one pool are alive together")
def test_plans_of_two_groups(kit: Kit) -> None:
    groups = [
        GroupSpec(layers=(kit.layer(0), kit.layer(1)), block_size=kit.block_size, kv_dtype=kit.kv_dtype),
        GroupSpec(layers=(kit.layer(2, kv_heads=1),), block_size=kit.block_size, kv_dtype=kit.kv_dtype),
    ]
    rig = kit.rig(groups=groups)
    views = [rig, rig.of_group(1)]
    rig.clear(range(1, rig.spec.num_blocks))
    work = [some_rows(views[0], (9, 1), (3, 3)), some_rows(views[1], (5, 2))]
    plans = [view.plan(*rows) for view, rows in zip(views, work, strict=True)]
    for index in (0, 2, 1):
        group = int(index == 2)
        agree(kit, views[group], plans[group], work[group], index, "a plan of one group changed a plan of another")


@pytest.mark.law("plans: a plan may be dropped once its last attend is enqueued")
def test_plan_dropped_at_once(kit: Kit) -> None:
    rig = kit.rig()
    layer = rig.layer()
    outs, batches = [], three_batches(rig)
    for rows in batches:
        out, plan = rig.empty_out(sum(count for *_, count in rows), layer), rig.plan(*rows)
        rig.backend.attend(plan, layer.index, *rig.qkv(rows, layer), out)
        del plan
        outs.append(out)
    for out, rows in zip(outs, batches, strict=True):
        kit.check(
            rig, rig.to_array(out), rig.expected(*rows), mistake="a dropped plan's memory was used by the next one"
        )
