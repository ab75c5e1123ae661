"""What a plugin hands over, field by field: each wrong value is named with what it must be, words of tomorrow pass."""

from __future__ import annotations

import dataclasses

import pytest

from pagedkv.api import Capabilities, DeviceInfo, Option, PoolCost
from pagedkv.plugins import checks

GOOD = Capabilities(
    dtypes=("fp32", "a_dtype_of_tomorrow"),
    kv_dtypes=("fp32", "int8/token_head"),
    block_sizes=(frozenset({8}), (16, 16, 128)),
    head_dims=((1, 1, 256),),
    preferred_block_size=32,
    features=frozenset({"window", "a_feature_of_tomorrow"}),
    graph="a_level_of_tomorrow",
    execution="model",
    extensions={"graph": (1, 0)},
    exclusions=(({"dtype": "fp32", "block_size": (8, 8, 16)}, "no such kernel"),),
)


def test_words_that_this_core_does_not_know_are_no_mistake():
    assert checks.capability_problems(GOOD) == []


@pytest.mark.parametrize(
    ("field", "value", "must"),
    [
        ("dtypes", "fp32", "a tuple of words"),
        ("dtypes", ["fp32"], "a tuple of words"),
        ("kv_dtypes", ("fp32", ""), "a tuple of words"),
        ("kv_dtypes", None, "a tuple of words"),
        ("native_dtypes", (16,), "a tuple of words"),
        ("block_sizes", (16, 32, 48), "a tuple of frozensets of sizes or of (multiple_of, min, max)"),
        ("block_sizes", (frozenset({0}),), "a tuple of frozensets"),
        ("block_sizes", (frozenset({16.0}),), "a tuple of frozensets"),
        ("block_sizes", ((16, 128),), "a tuple of frozensets"),
        ("head_dims", frozenset({64}), "a tuple of frozensets"),
        ("head_dims", ((8, 256, 64),), "a tuple of frozensets"),
        ("head_dims", ((0, 1, 64),), "a tuple of frozensets"),
        ("preferred_block_size", "16", "a whole number of tokens from 1 on"),
        ("preferred_block_size", 0, "a whole number of tokens from 1 on"),
        ("preferred_block_size", True, "a whole number of tokens from 1 on"),
        ("preferred_block_size", 24, "one of its block_sizes"),
        ("max_group", 0, "a whole number from 1 on, or None"),
        ("max_group", 1.5, "a whole number from 1 on, or None"),
        ("kinds", {"mha": 1}, "a frozenset of words"),
        ("features", ("window",), "a frozenset of words"),
        ("features", "window", "a frozenset of words"),
        ("placements", frozenset({1}), "a frozenset of words"),
        ("execution", None, "a word"),
        ("graph", False, "a word"),
        ("extensions", ("graph",), "a mapping of names to (major, minor)"),
        ("extensions", {"graph": "1.0"}, "a mapping of names to (major, minor)"),
        ("max_graphs", -1, "a whole number from 0 on, or None"),
        ("async_copy", 1, "True or False"),
        ("collectives", None, "a frozenset of words"),
        ("weight_formats", ["gguf"], "a frozenset of words"),
        ("exclusions", ("none",), "a tuple of (pattern, reason)"),
        ("exclusions", (({"dtype": "fp32"}, ""),), "a tuple of (pattern, reason)"),
    ],
)
def test_each_wrong_capability_is_named_with_what_it_must_be(field, value, must):
    (clause,) = checks.capability_problems(dataclasses.replace(GOOD, **{field: value}))
    assert clause.startswith(f"{field} is {value!r}, must be {must}")


def test_every_wrong_field_is_told_at_once():
    wrong = dataclasses.replace(GOOD, dtypes=1, features=2, graph=3)
    assert [clause.split()[0] for clause in checks.capability_problems(wrong)] == ["dtypes", "features", "graph"]


@pytest.mark.parametrize(
    ("record", "rules"),
    [(Capabilities, checks._CAPABILITIES), (DeviceInfo, checks._DEVICE), (PoolCost, checks._COST)],
)
def test_no_field_is_left_out(record, rules):
    assert set(rules) == {field.name for field in dataclasses.fields(record)}


@pytest.mark.parametrize(
    ("names", "clause"),
    [
        ({"name": ""}, "option '': name is '', must be a word"),
        ({"type": "int"}, "option 'a': type is 'int', must be a type"),
        ({"aliases": "b"}, "option 'a': aliases is 'b', must be a tuple of words"),
        ({"default": True}, "option 'a': default is True, must be int or None"),
        ({"aliases": ("a",)}, "two options answer to 'a'"),
    ],
)
def test_an_option_is_checked_too(names, clause):
    option = Option(**{"name": "a", "type": int, "default": 1, "help": "h"} | names)
    assert checks.option_problems((option,)) == [clause]


def test_an_option_may_be_unset_by_default():
    assert checks.option_problems((Option(name="a", type=int, default=None, help="h", aliases=("b",)),)) == []
    assert checks.option_problems(["a"]) == ["options is ['a'], must be a tuple of Option"]


def test_a_text_that_cannot_be_made_or_never_ends_is_cut_short():
    class Odd:
        def __repr__(self):
            raise ValueError

    assert checks.short(Odd()) == "a Odd whose text raises ValueError"
    assert len(checks.short("x" * 10_000)) < 500 and "(10002 characters)" in checks.short("x" * 10_000)
