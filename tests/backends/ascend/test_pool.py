"""The Ascend backend over the processor, operators emulated: how a band counts, and caches cut into tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import Batch, PoolSpec, UnsupportedError
from pagedkv_ascend import limits
from pagedkv_ascend.backend import AscendBackend
from pagedkv_ascend.operators import Operators
from pagedkv_ascend.runtime import HostRuntime
from tests.backends.ascend.double import double
from tests.backends.ascend.emulation import operators
from tests.backends.ascend.pools import layer, spec


def instance() -> AscendBackend:
    return double(runtime=HostRuntime())


def batch(rows: Sequence[tuple[int, int]], *, size: int) -> Batch:
    """Rows of (context, query tokens), appended at their ends; row r has blocks 1 + 2 r and the one after it."""
    counts = [count for _, count in rows]
    table, slots = np.array([[1 + 2 * row, 2 + 2 * row] for row in range(len(rows))], np.int32), []
    for row, (context, count) in enumerate(rows):
        slots += [int(table[row, at // size]) * size + at % size for at in range(context - count, context)]
    return Batch(
        num_seqs=len(rows),
        num_tokens=sum(counts),
        cu_q=np.cumsum([0, *counts], dtype=np.int32),
        ctx_len=np.array([context for context, _ in rows], np.int32),
        block_table=table,
        rows=np.arange(len(rows), dtype=np.int32),
        slots=np.array(slots, np.int64),
        max_q=max(counts),
        max_ctx=max(context for context, _ in rows),
    )


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


class Sequences:
    """Rows of one layer that are appended and attended, and the same in float64."""

    def __init__(self, backend: AscendBackend, wanted: PoolSpec, rows: Sequence[int]) -> None:
        self.backend, self.pool = backend, backend.alloc_pool(wanted)
        self.layer, self.size = wanted.groups[0].layers[0], wanted.groups[0].block_size
        one = self.layer
        self.k = [numbers(n, one.kv_heads, one.k_dim, seed=n) for n in rows]
        self.v = [numbers(n, one.kv_heads, one.v_dim, seed=n + 1) for n in rows]
        self.q = [numbers(n, one.q_heads, one.k_dim, seed=n + 2) for n in rows]

    def step(self, done: Sequence[int], counts: Sequence[int]) -> list[torch.Tensor]:
        """The next `counts` tokens of the first rows, of which `done` are there; results by row."""
        rows = [(before + count, count) for before, count in zip(done, counts, strict=True)]
        plan = self.backend.plan(self.pool, 0, batch(rows, size=self.size))
        q, k, v = (
            torch.cat([one[before : before + count] for one, before, count in zip(many, done, counts, strict=False)])
            for many in (self.q, self.k, self.v)
        )
        out = torch.full((len(q), self.layer.q_heads, self.layer.v_dim), torch.nan).half()
        self.backend.attend(plan, self.layer.index, q, k, v, out)
        return list(out.split(list(counts)))

    def expected(self, row: int, place: int) -> torch.Tensor:
        """float64 [heads, dim] of the query at this place: softmax over the keys that its window leaves."""
        window, ratio = self.layer.window, self.layer.q_heads // self.layer.kv_heads
        first = 0 if window is None else max(0, place + 1 - window)
        q, k, v = (many[row].double() for many in (self.q, self.k, self.v))
        k, v = (one[first : place + 1].repeat_interleave(ratio, dim=1) for one in (k, v))
        weights = torch.softmax(torch.einsum("hd,khd->hk", q[place], k) * self.layer.scale, -1)
        return torch.einsum("hk,khd->hd", weights, v)

    def check(self, made: Sequence[torch.Tensor], done: Sequence[int]) -> None:
        for row, (results, before) in enumerate(zip(made, done, strict=True)):
            for at, result in enumerate(results):
                assert torch.allclose(result.double(), self.expected(row, before + at), atol=4e-3)


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
