"""What counts as more than was offered."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pagedkv.api import Capabilities
from pagedkv.checking import exceeds

OFFERED = Capabilities(
    dtypes=("fp32", "bf16"),
    kv_dtypes=("fp32",),
    block_sizes=(frozenset({16, 32}), (64, 64, 256)),
    head_dims=((8, 8, 256),),
    preferred_block_size=16,
    max_group=8,
    features=frozenset({"window", "sinks"}),
    extensions={"graph": (1, 1)},
    graph="decode",
    max_graphs=4,
    exclusions=(({"dtype": "bf16"}, "slow"),),
)


def changed(**fields: Any) -> Capabilities:
    return dataclasses.replace(OFFERED, **fields)


@pytest.mark.parametrize(
    "less",
    [
        {},
        {"dtypes": ("bf16",)},
        {"block_sizes": (frozenset({16, 64, 128}),)},
        {"block_sizes": ((64, 128, 192),)},
        {"block_sizes": ((16, 16, 32),)},
        {"head_dims": ((16, 16, 128),)},
        {"head_dims": ((16, 300, 200),)},  # accepts nothing
        {"features": frozenset()},
        {"max_group": 4},
        {"extensions": {"graph": (1, 0)}},
        {"extensions": {}, "graph": "none"},
        {"max_graphs": 1},
        {"native_dtypes": ("fp32",), "preferred_block_size": 32},
        {"exclusions": (*OFFERED.exclusions, ({"group": 7}, "odd"))},
    ],
)
def test_as_much_or_less_is_fine(less):
    assert exceeds(changed(**less), OFFERED) == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"dtypes": ("fp32", "fp16")}, "dtypes fp16"),
        ({"kv_dtypes": ("fp32", "bf16")}, "kv_dtypes bf16"),
        ({"kinds": frozenset({"mha", "mla"})}, "kinds mla"),
        ({"features": frozenset({"alibi", "window"})}, "features alibi"),
        ({"placements": frozenset({"device", "host"})}, "placements host"),
        ({"collectives": frozenset({"all_reduce"})}, "collectives all_reduce"),
        ({"weight_formats": frozenset({"gguf"})}, "weight_formats gguf"),
        ({"block_sizes": (frozenset({16, 48}),)}, "block_sizes 16, 48"),
        ({"block_sizes": ((16, 16, 128),)}, "block_sizes 16..128 by 16"),
        ({"head_dims": ((8, 8, 1 << 40),)}, "head_dims 8.."),
        ({"max_group": None}, "max_group None, offered 8"),
        ({"max_group": 9}, "max_group 9"),
        ({"extensions": {"graph": (1, 2)}}, r"extension graph (1, 2)"),
        ({"extensions": {"graph": (2, 0)}}, r"extension graph (2, 0)"),
        ({"extensions": {"canonical_kv": (1, 0)}}, "offered None"),
        ({"graph": "any"}, "graph 'any', offered 'decode'"),
        ({"graph": "unheard of"}, "graph 'unheard of'"),
        ({"max_graphs": None}, "max_graphs None"),
        ({"execution": "model"}, "execution 'model'"),
        ({"async_copy": True}, "async_copy"),
        ({"exclusions": ()}, "excluded (slow)"),
    ],
)
def test_more_is_named(more, words):
    (found,) = exceeds(changed(**more), OFFERED)
    assert words in found


def test_everything_is_named_at_once():
    assert len(exceeds(changed(dtypes=("fp8",), async_copy=True, max_group=None), OFFERED)) == 3
