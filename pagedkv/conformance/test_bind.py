"""Values known only after loading: what `bind` takes, when it counts, and for which layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv.api import LayerSpec
from pagedkv.api.errors import BackendError
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.refusals import refuses
from pagedkv.conformance.rig import Rig, Row

NAMES = ("sinks", "alibi")
"""What layers bind; each is a feature and a field of the layer of the same name."""


def _declared(name: str) -> pytest.MarkDecorator:
    return pytest.mark.needs(name)


pytestmark = [
    pytest.mark.level("core"),
    pytest.mark.parametrize("name", [pytest.param(name, marks=_declared(name)) for name in NAMES]),
]


def layer_with(kit: Kit, name: str, index: int = 0) -> LayerSpec:
    return kit.layer(index, **{name: True})


def rows_of(rig: Rig) -> list[Row]:
    """A decode row and a prefill."""
    size = rig.block_size
    older, fresh = rig.sequence(size + 1), rig.sequence(3)
    rig.write(older, 0, size)
    return [(older, older.length, 1), (fresh, 3, 3)]


def agree(kit: Kit, rig: Rig, plan: Any, rows: list[Row], index: int, mistake: str) -> None:
    out = rig.attend(plan, rows, rig.layer(index))
    kit.check(rig, out, rig.expected(*rows, layer=index), mistake=mistake)


@pytest.mark.law("bind: each layer has its own values")
def test_values_of_each_layer(kit: Kit, name: str) -> None:
    rig = kit.rig(*(layer_with(kit, name, index) for index in (0, 1, 4)))
    rows = rows_of(rig)
    plan = rig.plan(*rows)
    for layer in rig.group.layers:
        agree(kit, rig, plan, rows, layer.index, f"{name} of another layer were used")


@pytest.mark.law("bind: a layer without such values is not touched by another layer's")
def test_layer_without_values(kit: Kit, name: str) -> None:
    rig = kit.rig(layer_with(kit, name, 0), kit.layer(1))
    rows = rows_of(rig)
    plan = rig.plan(*rows)
    for index in (1, 0):
        agree(kit, rig, plan, rows, index, f"{name} were used in a layer that has none")


@pytest.mark.law("bind: a second bind replaces the first, also between two attends of one plan")
def test_second_bind_replaces_the_first(kit: Kit, name: str) -> None:
    rig = kit.rig(layer_with(kit, name))
    rows = rows_of(rig)
    plan = rig.plan(*rows)
    agree(kit, rig, plan, rows, 0, f"the first {name}")
    rig.bind(rig.layer(0), seed=99)
    agree(kit, rig, plan, rows, 0, f"the second bind was ignored, or the plan kept the first {name}")
    agree(kit, rig, rig.plan(*rows), rows, 0, "the second bind was ignored")


@pytest.mark.law("bind: work enqueued before a second bind keeps the first values")
def test_bind_is_ordered(kit: Kit, name: str) -> None:
    rig = kit.rig(layer_with(kit, name))
    layer, rows = rig.layer(), rows_of(rig)
    wanted, out = rig.expected(*rows), rig.empty_out(sum(count for *_, count in rows), layer)
    rig.backend.attend(rig.plan(*rows), layer.index, *rig.qkv(rows, layer), out)
    rig.bind(layer, seed=99)
    kit.check(rig, rig.to_array(out), wanted, mistake="bind reached work that was enqueued before it")


@pytest.mark.law("bind: the array may be overwritten once bind returns")
def test_array_overwritten(kit: Kit, name: str) -> None:
    rig = kit.rig(layer_with(kit, name))
    given = np.linspace(0.1, 0.9, rig.layer().q_heads, dtype=np.float32)
    rig.bound[0] = {name: given.copy()}
    rig.backend.bind(rig.pool, 0, {name: given})
    given[:] = 50
    rows = rows_of(rig)
    agree(kit, rig, rig.plan(*rows), rows, 0, "the bound array is read later: copy it")


@pytest.mark.law("bind: pools have values of their own")
def test_pools_have_their_own_values(kit: Kit, name: str) -> None:
    rigs = [kit.rig(layer_with(kit, name), seed=seed) for seed in (0, 1)]
    rigs[1].bind(rigs[1].layer(), seed=99)
    for rig in rigs:
        rows = rows_of(rig)
        agree(kit, rig, rig.plan(*rows), rows, 0, f"{name} of another pool were used")


@pytest.mark.law("bind: values of a wrong shape, or that the layer does not have, are refused")
def test_wrong_values_are_refused(kit: Kit, name: str) -> None:
    rig = kit.rig(layer_with(kit, name, 0), kit.layer(1))
    heads = rig.layer().q_heads
    wrong: list[tuple[int, dict[str, Any]]] = [
        (0, {name: np.ones(heads + 1, np.float32)}),
        (0, {name: np.ones((heads, 1), np.float32)}),
        (1, {name: np.ones(heads, np.float32)}),
        (0, {name: np.ones(heads, np.float32), "no_such_value": np.ones(heads, np.float32)}),
    ]
    for index, params in wrong:
        with refuses(BackendError, f"bind of layer {index} with {_shapes(params)}"):
            rig.backend.bind(rig.pool, index, params)
    rows = rows_of(rig)
    plan = rig.plan(*rows)
    for index in (0, 1):
        agree(kit, rig, plan, rows, index, "a refused bind changed something")


@pytest.mark.law("bind: attending before the values are bound is refused")
def test_unbound_is_refused(kit: Kit, name: str) -> None:
    rig = Rig(kit.backend, kit.spec(layer_with(kit, name)))
    try:
        rows = [(rig.sequence(2), 2, 2)]
        plan = rig.plan(*rows)
        with refuses(BackendError, f"attend of a layer whose {name} nobody has bound"):
            rig.attend(plan, rows, rig.layer())
    finally:
        rig.close()


def _shapes(params: dict[str, Any]) -> str:
    return ", ".join(f"{name} {list(np.shape(values))}" for name, values in params.items())
