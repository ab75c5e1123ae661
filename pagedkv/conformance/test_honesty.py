"""What is not declared is refused, never approximated; what is declared is not refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import Capabilities, LayerSpec, OpSpec, PoolSpec, UnsupportedError
from pagedkv.conformance.certificate import UNDER_DECLARED
from pagedkv.conformance.gated import FEATURES, SAMPLES, gated_fields
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.lattice import BLOCK_SIZES, HEAD_DIMS, sizes
from pagedkv.conformance.quantized import QUANTIZED
from pagedkv.conformance.refusals import refuses
from pagedkv.conformance.rig import Rig, Row
from pagedkv.core.negotiation import Requirements, accepts, negotiate

pytestmark = [pytest.mark.level("core"), pytest.mark.unchecked]

EXTENSIONS = ("graph", "canonical_kv", "mla", "state", "kv_regions", "sleep", "model", "no_such_extension")


def undeclared(feature: str) -> pytest.MarkDecorator:
    """The mark of a case that applies where `feature` is not declared."""
    return pytest.mark.without(feature)


# -- undeclared features -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(field, marks=[undeclared(feature), pytest.mark.law(f"honesty: undeclared {feature} is refused")])
        for field, feature in gated_fields().items()
    ],
)
def test_undeclared_layer_field(kit: Kit, field: str) -> None:
    layers = _layers_with(kit, field)
    spec = kit.spec(*layers, features=kit.can.features & {"mixed_batch", "prefix_hit"})
    try:
        pool = kit.backend.alloc_pool(spec)
    except UnsupportedError as error:
        assert gated_fields()[field] in str(error) or field in str(error), f"the refusal does not name it: {error}"
        return
    pool.close()
    pytest.fail(
        f"alloc_pool accepts {field}={SAMPLES[field]!r} without the feature {gated_fields()[field]!r}: "
        f"{_verdict(kit, gated_fields()[field], lambda: _layer_right(kit, spec))}",
        pytrace=False,
    )


def _layers_with(kit: Kit, field: str) -> tuple[LayerSpec, ...]:
    plain, special = kit.layer(0), kit.layer(1, **{field: SAMPLES[field]})
    return (plain, special) if field == "kv_of" else (special,)


def _verdict(kit: Kit, feature: str, right: Callable[[], bool]) -> str:
    """Why acceptance is wrong: it works and should be declared (the certificate lists it), or it is approximated."""
    try:
        if not right():
            return "approximated: the result is that of another layer"
        kit.report(UNDER_DECLARED, feature)
        return "works: declare it"
    except Exception as error:  # noqa: BLE001 - the case fails anyway, this is its explanation
        return f"accepted, then it raised {type(error).__name__}: {error}"


def _layer_right(kit: Kit, spec: PoolSpec) -> bool:
    layers = spec.groups[0].layers
    rig = kit.rig(*layers, features=spec.features)
    seq = rig.sequence(2 * rig.block_size + 1)
    rig.write(seq, 0, seq.length)
    return _agrees(rig, (seq, seq.length, 2), layer=layers[-1].index, write=False)


def _agrees(rig: Rig, row: Row, **step: Any) -> bool:
    got, wanted = rig.step(row, **step), rig.expected(row, layer=step.get("layer"))
    return bool(np.allclose(got, wanted, rtol=0, atol=rig.tolerance))


@pytest.mark.law("honesty: undeclared multi_token_decode is refused")
@pytest.mark.without("multi_token_decode")
def test_undeclared_batch_field(kit: Kit) -> None:
    rig = kit.rig()
    seq = rig.sequence(rig.block_size + 2)
    row: Row = (seq, seq.length, 2)
    batch: dict[str, Any] = {"num_decode": 1, "decode_q": 2}
    rig.write(seq, 0, seq.length - 2)
    try:
        rig.step(row, **batch)
    except UnsupportedError as error:
        assert "multi_token_decode" in str(error) or "decode_q" in str(error), f"the refusal does not name it: {error}"
        return
    verdict = _verdict(kit, "multi_token_decode", lambda: _agrees(rig, row, **batch))
    pytest.fail(
        f"a batch with decode_q=2 is accepted without the feature 'multi_token_decode': {verdict}", pytrace=False
    )


@pytest.mark.law("honesty: undeclared lse is refused")
@pytest.mark.without("lse")
def test_undeclared_lse(kit: Kit) -> None:
    rig = kit.rig()
    layer, row = rig.layer(), (rig.sequence(3), 3, 3)
    lse = rig.to_device(torch.full((3, layer.q_heads), float("nan")))
    with refuses(UnsupportedError, "extra={'lse': tensor} without the feature 'lse'", "lse"):
        _attend_with(rig, row, {"lse": lse})
    wrote = np.isfinite(rig.to_array(lse)).any()
    assert not wrote, "attend refused extra 'lse' and wrote it all the same"


@pytest.mark.law("honesty: an unknown extra of attend is refused")
def test_unknown_extra(kit: Kit) -> None:
    rig = kit.rig()
    with refuses(UnsupportedError, "extra={'no_such_extra': 1}", "no_such_extra"):
        _attend_with(rig, (rig.sequence(3), 3, 3), {"no_such_extra": 1})


def _attend_with(rig: Rig, row: Row, extra: dict[str, Any]) -> None:
    layer = rig.layer()
    q, k, v = rig.qkv([row], layer)
    out = rig.empty_out(len(q), layer)
    plan = rig.backend.plan(rig.pool, 0, rig.batch([row]))
    rig.backend.attend(plan, layer.index, q, k, v, out, extra=extra)


@pytest.mark.law("honesty: a feature in PoolSpec.features that is not declared is refused")
@pytest.mark.parametrize("feature", [pytest.param(name, marks=undeclared(name)) for name in FEATURES])
def test_undeclared_feature_name(kit: Kit, feature: str) -> None:
    with refuses(UnsupportedError, f"a pool with features={{{feature!r}}}, which is not declared", feature):
        kit.backend.alloc_pool(kit.spec(features=frozenset({feature}))).close()


# -- undeclared values -------------------------------------------------------------------------------------------------


def _first_refused(candidates: Iterable[Any], accepted: Callable[[Any], bool]) -> Any:
    return next(value for value in candidates if not accepted(value))


def _wrong(kit: Kit, name: str) -> tuple[PoolSpec, Any]:
    """(a spec with one value that is not declared, that value)."""
    can, words = kit.can, ["fp16", "bf16", "fp32", "int8/token_head", "no_such_word"]
    if name in ("dtype", "kv_dtype", "placement"):
        there = {"dtype": can.dtypes, "kv_dtype": can.kv_dtypes, "placement": can.placements}[name]
        value = _first_refused(["host", *words] if name == "placement" else words, there.__contains__)
        return kit.spec(**{name: value}), value
    if name == "block_size":
        value = _first_refused([*range(1, 2049), 1 << 20], lambda size: accepts(can.block_sizes, size))
        return kit.spec(block_size=value), value
    if name == "kind":
        return kit.spec(kit.layer(kind="no_such_kind")), "no_such_kind"
    if name == "group":
        heads = (can.max_group or 0) + 1
        return kit.spec(kit.layer(kv_heads=1, q_heads=heads)), heads
    value = _first_refused([*range(1, 1025), 1 << 20], lambda size: accepts(can.head_dims, size))
    return kit.spec(kit.layer(**{name: value})), value


def _has_max_group(can: Capabilities) -> bool:
    return can.max_group is not None


@pytest.mark.law("honesty: a value that is not declared is refused by name")
@pytest.mark.parametrize(
    "name",
    [
        *("dtype", "kv_dtype", "placement", "block_size", "k_dim", "v_dim", "kind"),
        pytest.param("group", marks=pytest.mark.applies.with_args(_has_max_group)),
    ],
)
def test_undeclared_value(kit: Kit, name: str) -> None:
    spec, value = _wrong(kit, name)
    with refuses(UnsupportedError, f"a pool with {name}={value!r}, which is not declared", value):
        kit.backend.alloc_pool(spec).close()


def _unquantized(kv_dtype: str) -> pytest.MarkDecorator:
    """The mark of a case that applies where this KV dtype is not declared."""
    return pytest.mark.applies.with_args(lambda can: kv_dtype not in can.kv_dtypes)


@pytest.mark.law("honesty: a quantized KV dtype that is not declared is refused by name")
@pytest.mark.parametrize("kv_dtype", [pytest.param(name, marks=_unquantized(name)) for name in QUANTIZED])
def test_undeclared_quantized_cache(kit: Kit, kv_dtype: str) -> None:
    with refuses(UnsupportedError, f"a pool with kv_dtype={kv_dtype!r}, which is not declared", kv_dtype):
        kit.backend.alloc_pool(kit.spec(kv_dtype=kv_dtype)).close()
    with refuses(UnsupportedError, f"the cost of a pool with kv_dtype={kv_dtype!r}, which is not declared", kv_dtype):
        kit.backend.pool_cost(kit.spec(kv_dtype=kv_dtype))


@pytest.mark.law("honesty: a refusal gives all reasons at once")
def test_all_reasons(kit: Kit) -> None:
    wrong = {name: _wrong(kit, name)[1] for name in ("dtype", "kv_dtype", "placement", "block_size")}
    spec = kit.spec(kit.layer(kind="no_such_kind"), features=frozenset({"no_such_feature"}), **wrong)
    with refuses(UnsupportedError, "a pool with six mistakes", *wrong.values(), "no_such_kind", "no_such_feature"):
        kit.backend.alloc_pool(spec).close()


@pytest.mark.law("honesty: without collectives communicator() is refused")
@pytest.mark.applies.with_args(lambda can: not can.collectives)
def test_undeclared_collectives(kit: Kit) -> None:
    with refuses(UnsupportedError, "communicator() of a backend that declares no collectives"):
        kit.backend.communicator((0,))


# -- declared values ---------------------------------------------------------------------------------------------------


def _accepted(kit: Kit, refused: list[str], **changes: Any) -> None:
    """Allocate a pool that the declared exclusions do not speak against; note it if it is refused."""
    spec = kit.spec(num_blocks=2, **changes)
    group = spec.groups[0]
    asked = Requirements(
        layers=group.layers,
        dtype=spec.dtype,
        kv_dtype=group.kv_dtype,
        block_size=group.block_size,
        features=spec.features,
        batch_invariant="batch_invariant" in spec.features,
    )
    try:
        negotiate(kit.can, asked, backend=kit.subject.name)
    except UnsupportedError:
        return
    try:
        kit.backend.alloc_pool(spec).close()
    except UnsupportedError as error:
        refused.append(f"{changes}: {error}")


@pytest.mark.law("honesty: every declared dtype, KV dtype, placement and size is accepted")
def test_declared_values(kit: Kit) -> None:
    can = kit.can
    refused: list[str] = []
    for dtype in can.dtypes:
        for kv_dtype in can.kv_dtypes:
            _accepted(kit, refused, dtype=dtype, kv_dtype=kv_dtype)
    for placement in can.placements:
        _accepted(kit, refused, placement=placement)
    for size in sizes(can.block_sizes, BLOCK_SIZES, [can.preferred_block_size]):
        _accepted(kit, refused, block_size=size)
    for dim in sizes(can.head_dims, HEAD_DIMS):
        _accepted(kit, refused, groups=kit.spec(kit.layer(k_dim=dim, v_dim=dim)).groups)
    assert not refused, f"declared, and refused all the same: {'; '.join(refused)}"


@pytest.mark.law("honesty: every declared feature is accepted in PoolSpec.features")
def test_declared_features(kit: Kit) -> None:
    refused: list[str] = []
    for feature in kit.can.features:
        _accepted(kit, refused, features=frozenset({feature}))
    assert not refused, f"declared, and refused all the same: {'; '.join(refused)}"


@pytest.mark.law("honesty: extension() answers exactly for what is declared")
@pytest.mark.parametrize("name", EXTENSIONS)
def test_extensions(kit: Kit, name: str) -> None:
    found = kit.backend.extension(name)
    if name in kit.can.extensions:
        assert found is not None, f"extension {name!r} is declared, extension() gives None"
    else:
        assert found is None, f"extension {name!r} is not declared, extension() gives {found!r}: declare it"


@pytest.mark.law("honesty: an op that does not exist is None")
def test_unknown_op(kit: Kit) -> None:
    assert kit.backend.op("no_such_op", OpSpec(dtype=kit.dtype)) is None, "op() gives something for an unknown name"
