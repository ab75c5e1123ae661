"""limits.toml and the checks of it, against the rules that the emulation was given from the same documents.

Two readings of one text, made apart: where they disagree, one of them is wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.api import PoolSpec, UnsupportedError
from pagedkv_ascend import limits
from tests.backends.ascend.emulation import rules
from tests.backends.ascend.emulation.rules import Call
from tests.backends.ascend.pools import layer, spec

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "int8"}
GOOD: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "batch": 2,
    "tokens": 1,
    "heads": 8,
    "kv_heads": 2,
    "dim": 64,
    "block_size": 128,
    "context": 300,
    "blocks": 7,
}
"""A call that both allow."""
EDGES: dict[str, tuple[Any, ...]] = {
    "dtype": tuple(NAMES),
    "batch": (1, 65536, 65537),
    "tokens": (1, 2, 17),
    "heads": (1, 2, 6, 7, 64, 65, 128, 130, 256, 257, 512),
    "kv_heads": (1, 2, 3, 4, 8, 128, 256),
    "dim": (8, 16, 24, 32, 96, 256, 264, 512, 528),
    "block_size": (0, 1, 8, 16, 24, 32, 64, 96, 128, 192, 256, 384, 512, 528, 640, 1024),
    "context": (1, 16, 4096, 262144, 262145, 20971520, 20971521),
    "blocks": (1, 16383, 16384, 131071, 131072, 1 << 22),
}
"""Values on both sides of every limit."""


def ours(values: dict[str, Any]) -> bool:
    """Whether the backend lets the call pass."""
    query = (values["batch"], values["tokens"], values["heads"], values["dim"])
    own = {name: values[name] for name in ("kv_heads", "block_size", "context")}
    try:
        limits.check_attention(query, cache(values), NAMES[values["dtype"]], **own)
    except UnsupportedError:
        return False
    return True


def theirs(values: dict[str, Any]) -> bool:
    """Whether the emulation's rules let it pass."""
    try:
        rules.check(call(values))
    except RuntimeError as error:
        assert "emulated operator" in str(error)
        return False
    return True


def cache(values: dict[str, Any]) -> tuple[int, int, int]:
    wide = values["kv_heads"] * values["dim"]
    if values["block_size"]:
        return values["blocks"], values["block_size"], wide
    return values["batch"], values["context"], wide


def call(values: dict[str, Any]) -> Call:
    """The call in BSH, of tensors without memory."""
    batch, size, context = values["batch"], values["block_size"], values["context"]
    query, key = (
        torch.empty(*shape, dtype=values["dtype"], device="meta")
        for shape in ((batch, values["tokens"], values["heads"] * values["dim"]), cache(values))
    )
    table = torch.empty(batch, -(-context // size), dtype=torch.int32, device="meta") if size else None
    return Call(
        version=1,
        query=query,
        key=key,
        value=key,
        heads=values["heads"],
        kv_heads=values["kv_heads"],
        scale=1.0,
        layout="BSH",
        q_lengths=None,
        kv_lengths=[context],
        table=table,
        block_size=size,
        mask=None,
        sparse_mode=0,
        pre_tokens=rules.INT_MAX,
        next_tokens=rules.INT_MAX,
        inner_precise=0,
        lse=False,
    )


SINGLE = [(name, value) for name, values in EDGES.items() for value in values]


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("name", "value"), SINGLE, ids=lambda one: str(one))
def test_each_limit_is_enforced_on_the_side_where_the_documents_have_it(name: str, value: Any, tokens: int) -> None:
    values = GOOD | {"tokens": tokens, name: value}
    assert ours(values) == theirs(values), values


def test_both_allow_and_refuse_some_of_each() -> None:
    """The comparison would say nothing if one side were constant."""
    for name, edges in EDGES.items():
        verdicts = {ours(GOOD | {"tokens": tokens, name: value}) for value in edges for tokens in (1, 5)}
        assert verdicts == ({True} if name == "tokens" else {True, False}), name


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.fixed_dictionaries({name: st.sampled_from((*values, GOOD[name])) for name, values in EDGES.items()}))
def test_limits_together(values: dict[str, Any]) -> None:
    assert ours(values) == theirs(values), values


# -- what a pool needs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "kv_heads", "dim", "cuts"),
    [
        (16383, 8, 128, 1),  # 16,383 x 128 x 8 x 128 is 2^31 - 131,072
        (16384, 8, 128, 2),
        (16384 * 8, 8, 128, None),  # one head alone makes 2^31 elements
        (16384 * 8 - 1, 8, 128, 8),
        (10, 256, 256, 2),  # 65,536 numbers of a token
        (10, 255, 256, 1),
    ],
)
def test_layers_are_cut_into_tensors_that_the_operator_takes(
    blocks: int, kv_heads: int, dim: int, cuts: int | None
) -> None:
    """Each part is one that the rules allow, and fewer parts are not; a block in each is for discards."""
    one = layer(q_heads=kv_heads, kv_heads=kv_heads, k_dim=dim, v_dim=dim)
    wanted = spec(one, block_size=128, num_blocks=blocks - 1)
    assert limits.parts(one, wanted.groups[0], blocks) == cuts
    assert len(limits.reasons_against_size(wanted, more=1)) == (cuts is None)
    for count in range(1, cuts or 1):
        assert kv_heads % count or not theirs(GOOD | part(blocks, kv_heads // count, dim))
    if cuts:
        assert theirs(GOOD | part(blocks, kv_heads // cuts, dim))


def test_the_number_of_blocks_that_is_named_is_the_last_that_fits() -> None:
    reason = limits.reasons_against_size(large(131071), more=1)[0]
    assert "give at most 131070 blocks (num_blocks)" in reason
    assert limits.reasons_against_size(large(131070), more=1) == []


def large(blocks: int) -> PoolSpec:
    return spec(layer(q_heads=8, kv_heads=8, k_dim=128, v_dim=128), block_size=128, num_blocks=blocks)


def part(blocks: int, heads: int, dim: int) -> dict[str, Any]:
    return {"blocks": blocks, "heads": heads, "kv_heads": heads, "dim": dim}


@pytest.mark.parametrize(("q_heads", "kv_heads", "said"), [(257, 257, "at most 256"), (6, 4, "evenly"), (256, 2, None)])
def test_heads_that_no_call_could_have_are_refused_with_the_pool(q_heads: int, kv_heads: int, said: str | None) -> None:
    reasons = limits.reasons_against_pool(spec(layer(q_heads=q_heads, kv_heads=kv_heads)))
    assert len(reasons) == (said is not None)
    assert said is None or said in reasons[0]
