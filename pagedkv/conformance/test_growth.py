"""A later core knows more fields and features than this backend: what it must accept, and what it must refuse."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from pagedkv.api import Batch, Capabilities, GroupSpec, LayerSpec, Limits, PoolSpec, UnsupportedError
from pagedkv.api.records import gated
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.refusals import refuses

pytestmark = [pytest.mark.level("core"), pytest.mark.unchecked]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterLayer(LayerSpec):
    """A layer as a later minor of the contract may know it."""

    tomorrow: int | None = gated("tomorrow", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterGroup(GroupSpec):
    """A group of a later minor."""

    tomorrow: int | None = gated("tomorrow", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterPool(PoolSpec):
    """A pool of a later minor."""

    tomorrow: int | None = gated("tomorrow", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterLimits(Limits):
    """Limits of a later minor."""

    tomorrow: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaterBatch(Batch):
    """A batch of a later minor."""

    tomorrow: int | None = gated("tomorrow", None)


def _later(cls: Any, record: Any, **fields: Any) -> Any:
    same = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return cls(**same | fields)


def _pool(kit: Kit, **layer: Any) -> PoolSpec:
    """The kit's plain pool in records of a later minor."""
    spec = kit.spec()
    layers = tuple(_later(LaterLayer, one, **layer) for one in spec.groups[0].layers)
    groups = (_later(LaterGroup, spec.groups[0], layers=layers),)
    made: PoolSpec = _later(LaterPool, spec, groups=groups, limits=_later(LaterLimits, spec.limits))
    return made


@pytest.mark.law("growth: records with one more field, at its default, change nothing (G1)")
def test_one_more_field(kit: Kit) -> None:
    spec = _pool(kit)
    rig = kit.rig(groups=spec.groups, limits=spec.limits)
    seq = rig.sequence(rig.block_size + 2)
    row = (seq, seq.length, seq.length)
    plan = rig.backend.plan(rig.pool, 0, _later(LaterBatch, rig.batch([row])))
    kit.check(rig, rig.attend(plan, [row], rig.layer()), rig.expected(row))


@pytest.mark.law("growth: a pool of a later minor, all new fields at their defaults, is allocated (G1)")
def test_later_pool(kit: Kit) -> None:
    spec = _pool(kit)
    pool = kit.backend.alloc_pool(spec)
    assert pool.spec == spec, "Pool.spec is the record that was given, not a copy of the fields this backend knows"
    assert kit.backend.pool_cost(spec) == kit.backend.pool_cost(kit.spec()), "a field at its default costs nothing"
    pool.close()


@pytest.mark.law("growth: a feature that is required and unknown is refused by name (G6)")
def test_unknown_feature(kit: Kit) -> None:
    with refuses(UnsupportedError, "a pool whose features hold an unknown name", "feature_of_tomorrow"):
        kit.backend.alloc_pool(kit.spec(features=frozenset({"feature_of_tomorrow"}))).close()


@pytest.mark.law("growth: a layer that uses a field of tomorrow is refused by its feature (G1, G6)")
def test_unknown_field_in_use(kit: Kit) -> None:
    spec = dataclasses.replace(_pool(kit, tomorrow=1), features=frozenset({"tomorrow"}))
    with refuses(UnsupportedError, "a layer with a gated field that this contract does not know", "tomorrow"):
        kit.backend.alloc_pool(spec).close()


@pytest.mark.law("growth: a record that a backend builds drops fields this core does not know (G3)")
def test_backend_records_from_later(kit: Kit) -> None:
    fields = {f.name: getattr(kit.can, f.name) for f in dataclasses.fields(kit.can)}
    assert Capabilities.of(**fields, field_of_tomorrow=1) == kit.can, "Record.of changed a field it knows"
