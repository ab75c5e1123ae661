"""The pairwise cover: every pair of declared values that some accepted combination holds occurs in a point."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.api import Capabilities
from pagedkv.conformance.lattice import Point, allowed, axes, points, sizes

BASE = {
    "dtypes": ("fp32", "bf16"),
    "kv_dtypes": ("fp32", "bf16", "int8/token_head"),
    "block_sizes": (frozenset({8, 16}),),
    "head_dims": (frozenset({64, 80}),),
    "preferred_block_size": 16,
}
VALUES = {
    "dtype": ["fp32", "bf16"],
    "kv_dtype": ["fp32", "bf16"],
    "block_size": [8, 16],
    "head_dim": [64, 80],
    "feature": ["window", "sinks", "alibi"],
}
FEATURES = {"window": "window", "sinks": "sinks", "alibi": "alibi", "softcap": "softcap", "causal": "non_causal"}


def excluded(can: Capabilities, point: Point) -> bool:
    """By hand: whether a pattern's every key holds for the point."""
    own = {"dtype": {point.dtype}, "kv_dtype": {point.kv_dtype}, "block_size": {point.block_size}}
    own |= {"head_dim": {point.head_dim}, "group": {point.group}}
    flags = {"sinks": point.sinks, "alibi": point.alibi, "softcap": point.softcap, "window": point.window}
    own["feature"] = {name for name, on in {**flags, "non_causal": not point.causal}.items() if on}
    return any(all(own[key] & wanted for key, wanted in pattern.items()) for pattern, _ in can.exclusions)


def pairs_of(point: Point) -> set[tuple[tuple[str, object], ...]]:
    values = [(name, getattr(point, name)) for name in axes(Capabilities(**BASE))]
    return set(itertools.combinations(values, 2))


def combinations(own: dict[str, list[object]], fixed: dict[str, object]) -> Iterator[Point]:
    """All with these values; an axis that no exclusion here looks at keeps its first value."""
    looked_at = {*VALUES, *VALUES["feature"]}
    free = [[fixed[n]] if n in fixed else values if n in looked_at else values[:1] for n, values in own.items()]
    return (Point(**dict(zip(own, values, strict=True))) for values in itertools.product(*free))


def patterns() -> st.SearchStrategy[tuple[tuple[dict[str, frozenset[object]], str], ...]]:
    one = st.sets(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3).flatmap(
        lambda keys: st.fixed_dictionaries(
            {key: st.sets(st.sampled_from(VALUES[key]), min_size=1, max_size=2).map(frozenset) for key in sorted(keys)}
        )
    )
    return st.lists(one, max_size=2).map(lambda found: tuple((pattern, "made up") for pattern in found))


@settings(max_examples=15, deadline=None)
@given(
    exclusions=patterns(), features=st.sets(st.sampled_from(["window", "sinks", "alibi"])), most=st.sampled_from([1, 4])
)
def test_every_pair_that_is_not_excluded_occurs_and_no_excluded_one(exclusions, features, most):
    can = Capabilities(**BASE, exclusions=exclusions, features=frozenset(features), max_group=most)
    found = points(can)
    covered = set().union(*map(pairs_of, found))
    assert not any(excluded(can, point) for point in found)
    own = axes(can)
    for a, b in itertools.combinations(own, 2):
        for pair in itertools.product(*([(name, value) for value in own[name]] for name in (a, b))):
            if pair not in covered:
                assert all(excluded(can, point) for point in combinations(own, dict(pair))), f"{pair} is in no point"


def test_the_points_are_few_and_the_same_at_every_call():
    can = Capabilities(**{**BASE, "features": frozenset(FEATURES.values())})
    found = points(can)
    everything = 1
    for values in axes(can).values():
        everything *= len(values)
    assert found == points(can)
    assert len(set(map(str, found))) == len(found) < everything / 50
    assert points(can, seed=1) != found


def test_what_is_not_declared_does_not_occur():
    found = points(Capabilities(**BASE, max_group=4))
    assert {point.kv_dtype for point in found} == {"fp32", "bf16"}  # quantized ones have a section of their own
    assert {(p.window, p.softcap, p.sinks, p.alibi, p.causal) for p in found} == {(None, None, False, False, True)}
    assert {point.group for point in found} == {1, 4}


@pytest.mark.parametrize(
    ("declared", "preferred", "expected"),
    [
        ((frozenset({16, 32}),), [32], [32, 16]),
        (((16, 16, 256),), [16], [16, 128, 32, 64, 256]),
        (((1, 1, 4096),), [16], [16, 1, 3, 128, 32]),  # the least, too
        (((32, 20, 100),), [], [32, 64]),
    ],
)
def test_sizes_are_the_preferred_the_bounds_and_usual_ones(declared, preferred, expected):
    found = sizes(declared, (3, 128, 32, 16, 64, 256, 1), preferred)
    assert found[: len(expected)] == expected and len(found) <= 5


def test_lengths_are_relative_to_the_block():
    plain = {"dtype": "fp32", "kv_dtype": "fp32", "head_dim": 8, "group": 4, "softcap": None, "sinks": False}
    point = Point(**plain, block_size=16, context=(1, -1), window=(9, 0), alibi=False, causal=True, form="decode")
    assert (point.tokens(point.context), point.layer().window, point.tokens((0, 0))) == (15, 144, 1)
    assert (point.layer().q_heads, point.layer().kv_heads) == (8, 2)
    assert str(point) == "fp32-fp32-b16-d8-g4-c15-window144-decode"
    assert allowed(Capabilities(**{**BASE, "head_dims": ((8, 8, 64),), "features": frozenset({"window"})}), point)
    assert not allowed(Capabilities(**BASE), point)
