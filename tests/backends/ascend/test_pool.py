"""The Ascend backend over the processor, operators emulated: how a band counts, and caches cut into tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import UnsupportedError
from pagedkv_ascend import limits
from pagedkv_ascend.backend import AscendBackend
from pagedkv_ascend.operators import Operators
from pagedkv_ascend.runtime import HostRuntime
from tests.backends.ascend.double import double
from tests.backends.ascend.emulation import operators
from tests.backends.ascend.pools import layer, spec
from tests.backends.ascend.sequences import Sequences


def instance() -> AscendBackend:
    return double(runtime=HostRuntime())


# -- how a band counts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("size", [32, 128])
def test_a_window_holds_as_many_keys_under_both_readings_of_the_documents(inclusive: bool, size: int) -> None:
    with operators.emulated(inclusive=inclusive):
        rows = Sequences(instance(), spec(layer(window=5), block_size=size), [40, 3])
        rows.check(rows.step([0, 0], [20, 2]), [0, 0])
        rows.check(rows.step([20, 2], [18, 1]), [20, 2])


def test_the_question_is_asked_once_for_a_dtype_and_only_where_there_is_a_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, attention = [], Operators.attention

    def counted(self: Operators, call: Any) -> Any:
        asked.append((call.query.dtype, call.sparse_mode, call.pre_tokens))
        return attention(self, call)

    monkeypatch.setattr(Operators, "attention", counted)
    backend = instance()
    backend.alloc_pool(spec())
    assert asked == []
    for dtype in ("fp16", "fp16", "bf16"):
        backend.alloc_pool(spec(layer(window=9), dtype=dtype))
    assert asked == [(torch.float16, 4, 1), (torch.bfloat16, 4, 1)]


@pytest.mark.parametrize("seen", [[0, 1, 1, 1], [0, 0, 1, 0], [1, 0, 0, 1]])
def test_a_third_reading_is_refused_in_one_line_and_models_without_a_window_run(
    seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = Operators.attention

    def other(self: Operators, call: Any) -> Any:
        result, logs = attention(self, call)
        if call.sparse_mode == 4:
            weights = torch.tensor(seen, dtype=result.dtype)
            result[0, 3, 0, :4] = weights / weights.sum()
        return result, logs

    monkeypatch.setattr(Operators, "attention", other)
    backend = instance()
    with pytest.raises(UnsupportedError, match=r"'window'.*other keys than either reading.*send this line in") as no:
        backend.alloc_pool(spec(layer(window=9)))
    assert "\n" not in str(no.value)
    rows = Sequences(backend, spec(), [12])
    rows.check(rows.step([0], [12]), [0])


# -- caches that are cut -----------------------------------------------------------------------------------------------

WIDE = layer(q_heads=8, kv_heads=4)
ONE_HEAD = 9 * 32 * 32
"""Elements of one KV head in a cache of 8 blocks and one for discards: blocks x tokens x dim."""


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many elements the operators take in one tensor."""
    table = limits.table()["attention"]
    return lambda elements: monkeypatch.setitem(table, "elements", elements)


@pytest.mark.parametrize(
    ("elements", "parts"), [(4 * ONE_HEAD, 1), (4 * ONE_HEAD - 1, 2), (2 * ONE_HEAD, 2), (2 * ONE_HEAD - 1, 4)]
)
def test_a_cache_too_large_for_one_tensor_is_cut_by_kv_heads_with_the_same_results(
    most: Any, elements: int, parts: int
) -> None:
    most(elements)
    backend = instance()
    rows = Sequences(backend, spec(WIDE), [50, 33])
    (cut,) = rows.pool.layers.values()
    assert [(part.first, part.heads) for part in cut.parts] == [(n * 4 // parts, 4 // parts) for n in range(parts)]
    assert all(part.keys.numel() == part.values.numel() <= elements for part in cut.parts)
    rows.check(rows.step([0, 0], [20, 32]), [0, 0])
    rows.check(rows.step([20, 32], [29, 1]), [20, 32])
    rows.check(rows.step([49], [1]), [49])


def test_what_one_head_alone_makes_too_large_is_refused_with_the_number_that_fits(most: Any) -> None:
    most(ONE_HEAD - 1)
    backend = instance()
    with pytest.raises(UnsupportedError, match="give at most 7 blocks") as no:
        backend.alloc_pool(spec(WIDE))
    assert f"{ONE_HEAD - 1} elements" in str(no.value)
    assert backend.alloc_pool(spec(WIDE, num_blocks=7)).num_blocks == 7


@pytest.mark.parametrize("elements", [4 * ONE_HEAD, 2 * ONE_HEAD, ONE_HEAD])
def test_a_cut_cache_goes_to_the_host_and_back(most: Any, elements: int) -> None:
    """The first row is read from other blocks than it was written to."""
    most(elements)
    backend = instance()
    rows = Sequences(backend, spec(WIDE), [50])
    host = backend.alloc_pool(spec(WIDE, placement="host", num_blocks=40))
    rows.step([0], [49])
    away = backend.copy_blocks(rows.pool, host, np.array([[1, 30], [2, 9]]))
    for plane in (plane for planes in rows.pool.planes.values() for plane in planes):
        plane.fill_(0xFF)
    back = backend.copy_blocks(host, rows.pool, np.array([[30, 1], [9, 2]]), after=away)
    backend.wait(back)
    rows.check(rows.step([49], [1]), [49])


def test_caches_that_are_cut_differently_exchange_no_blocks_and_say_why(most: Any) -> None:
    most(2 * ONE_HEAD)
    backend = instance()
    small, large = backend.alloc_pool(spec(WIDE, num_blocks=3)), backend.alloc_pool(spec(WIDE))
    with pytest.raises(UnsupportedError, match=r"cut their layers into different tensors.*pools of like sizes"):
        backend.copy_blocks(small, large, np.array([[1, 2]]))
    same = backend.alloc_pool(dataclasses.replace(spec(WIDE), num_blocks=7))
    backend.wait(backend.copy_blocks(same, large, np.array([[1, 2]])))
    for mine, other in same.planes_to(large):  # type: ignore[attr-defined]
        assert torch.equal(mine[1], other[2])
