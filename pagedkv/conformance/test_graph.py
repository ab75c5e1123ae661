"""Recorded steps: what a replay must follow (the last refresh, what is bound, the tensors' contents) and what not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import Capabilities, ContractViolation, Limits
from pagedkv.api.extensions import GraphShape
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.oracle import Floats
from pagedkv.conformance.refusals import refuses
from pagedkv.conformance.rig import TORCH, Rig, Row, Seq

pytestmark = [pytest.mark.level("graph"), pytest.mark.extension("graph")]

ROWS = 4


def _level(*levels: str) -> pytest.MarkDecorator:
    """The mark of a case that applies at these graph levels."""
    return pytest.mark.applies.with_args(lambda can: can.graph in levels)


def _two_graphs(can: Capabilities) -> bool:
    return can.max_graphs is None or can.max_graphs >= 2


def _extension(rig: Rig) -> Any:
    return rig.backend.extension("graph")


class Recorded:
    """The attends of one step over `layers`, on tensors of fixed size, with a static plan of their own."""

    def __init__(self, rig: Rig, *, tokens: int = ROWS, decode_q: int = 1, layers: Sequence[int] = (0,)) -> None:
        self.rig, self.layers = rig, layers
        self.shape = GraphShape(rows=ROWS, tokens=tokens, max_ctx=rig.spec.limits.context, decode_q=decode_q)
        self.extension = _extension(rig)
        self.plan = self.extension.static_plan(rig.pool, rig.group_index, self.shape)
        self.tensors = {index: self._empty(index) for index in layers}
        self.graph: Any = None

    def _empty(self, index: int) -> list[torch.Tensor]:
        """q, k, v, out [tokens, heads, dim] full of NaN, which padding rows keep."""
        layer, dtype = self.rig.layer(index), TORCH[self.rig.spec.dtype]
        shapes = [(layer.q_heads, layer.k_dim), (layer.kv_heads, layer.k_dim), (layer.kv_heads, layer.v_dim)]
        shapes.append((layer.q_heads, layer.v_dim))
        return [self.rig.to_device(torch.full((self.shape.tokens, *s), float("nan"), dtype=dtype)) for s in shapes]

    def refresh(self, *rows: Row, **batch: Any) -> None:
        """Give the plan these rows, padded to the shape, and the tensors their content."""
        count = sum(n for _, _, n in rows)
        self.rig.backend.synchronize()  # the tensors may still be in use
        for index in self.layers:
            for target, values in zip(self.tensors[index][:3], self.rig.qkv(rows, self.rig.layer(index)), strict=True):
                target[:count].copy_(values)
        self.extension.refresh(self.plan, self.batch(rows, **batch))

    def batch(self, rows: Sequence[Row], **batch: Any) -> Any:
        count = sum(n for _, _, n in rows)
        return self.rig.batch(rows, pad_rows=ROWS - len(rows), pad_slots=self.shape.tokens - count, **batch)

    def capture(self) -> Recorded:
        """Record; the plan must have been refreshed."""
        self.graph = self.extension.capture(self._run, [self.plan])
        return self

    def _run(self) -> None:
        for index in self.layers:
            q, k, v, out = self.tensors[index]
            self.rig.backend.attend(self.plan, index, q, k, v, out)

    def replay(self) -> None:
        """Replay without reading anything."""
        for index in self.layers:
            self.tensors[index][3].fill_(float("nan"))
        self.graph.replay()

    def out(self, index: int = 0) -> Floats:
        """Out of a layer after the last replay, padding rows included."""
        return self.rig.to_array(self.tensors[index][3])


def _rows(rig: Rig, count: int, queries: int = 1) -> list[Row]:
    """Rows of different lengths, written up to their queries."""
    seqs = [rig.sequence(rig.block_size * (i % 2) + i + queries + 1) for i in range(count)]
    for seq in seqs:
        rig.write(seq, 0, seq.length - queries)
    return [(seq, seq.length, queries) for seq in seqs]


def _recorded(rig: Rig, rows: Sequence[Row], **shape: Any) -> Recorded:
    """A graph that was captured after a refresh with `rows`."""
    made = Recorded(rig, **shape)
    made.refresh(*rows)
    return made.capture()


def _same(kit: Kit, made: Recorded, *rows: Row, mistake: str = "") -> None:
    """The graph's out is the oracle's, and finite past the tokens."""
    for index in made.layers:
        out, wanted = made.out(index), made.rig.expected(*rows, layer=index)
        kit.check(made.rig, out[: len(wanted)], wanted, mistake=mistake)
        assert np.isfinite(out[len(wanted) :]).all(), "rows of out past the batch's tokens must be finite"


# -- what a replay computes --------------------------------------------------------------------------------------------


@pytest.mark.law("graph: a replay equals the eager step, for every batch that fits the shape")
@pytest.mark.parametrize("count", [1, ROWS - 1, ROWS])
def test_replay_of_decode(kit: Kit, count: int) -> None:
    rig = kit.rig()
    made = _recorded(rig, _rows(rig, 2))
    rows = _rows(rig, count)
    made.refresh(*rows)
    made.replay()
    _same(kit, made, *rows)
    kit.check(rig, rig.step(*rows, write=False), rig.expected(*rows), mistake="the replay did not append its keys")


@pytest.mark.law("graph: a replay uses the last refresh, not the one it was recorded with")
def test_refresh_between_replays(kit: Kit) -> None:
    rig = kit.rig()
    batches = [_rows(rig, count) for count in (2, 4, 1, 3)]
    made = _recorded(rig, batches[0])
    for rows in batches[1:]:
        made.refresh(*rows)
        made.replay()
        _same(kit, made, *rows, mistake="the plan of the recording is in use: refresh must reach what was recorded")
    made.refresh(*batches[1])
    made.refresh(*batches[2])
    made.replay()
    _same(kit, made, *batches[2], mistake="of two refreshes the last one counts")


@pytest.mark.law("graph: the host arrays may be overwritten once refresh returns")
def test_host_arrays_after_refresh(kit: Kit) -> None:
    rig = kit.rig()
    rows = _rows(rig, 3)
    made = _recorded(rig, rows)
    batch = made.batch(rows)
    made.extension.refresh(made.plan, batch)
    for array in (batch.cu_q, batch.ctx_len, batch.block_table, batch.rows, batch.slots):
        array[...] = 1
    made.replay()
    _same(kit, made, *rows, mistake="the replay reads the batch's own arrays: refresh must copy them")


@pytest.mark.law("graph: a refresh is ordered after the replay enqueued before it")
def test_refresh_after_a_pending_replay(kit: Kit) -> None:
    rig = kit.rig()
    first, second = _rows(rig, 3), _rows(rig, 2)
    made = _recorded(rig, first)
    made.refresh(*first)
    made.replay()
    made.extension.refresh(made.plan, made.batch(second))  # nothing waits for the replay
    _same(kit, made, *first, mistake="the refresh reached a replay that was enqueued before it")


@pytest.mark.law("graph: replaying twice without a refresh computes the same again")
def test_replay_twice(kit: Kit) -> None:
    rig = kit.rig()
    rows = _rows(rig, 3)
    made = _recorded(rig, rows)
    for _ in range(2):
        made.replay()
        _same(kit, made, *rows)


@pytest.mark.law("graph: every layer of a recorded step is replayed, each on its own cache")
def test_several_layers(kit: Kit) -> None:
    rig = kit.rig(kit.layer(0), kit.layer(1), kit.layer(2))
    rows = _rows(rig, 3)
    made = _recorded(rig, rows, layers=(0, 1, 2))
    rows = _rows(rig, 4)
    made.refresh(*rows)
    made.replay()
    _same(kit, made, *rows)


@pytest.mark.law("graph: an empty batch replays and writes nothing")
def test_empty_batch(kit: Kit) -> None:
    rig = kit.rig()
    rows = _rows(rig, 2)
    made = _recorded(rig, rows)
    made.replay()
    made.refresh()
    made.replay()
    _same(kit, made)
    kit.check(rig, rig.step(*rows, write=False), rig.expected(*rows), mistake="an empty replay wrote to the cache")


@pytest.mark.law("graph: rows of several query tokens replay like the eager step")
@pytest.mark.needs("multi_token_decode")
@_level("uniform", "any")
def test_uniform_batch(kit: Kit) -> None:
    rig = kit.rig()
    made = Recorded(rig, tokens=2 * ROWS, decode_q=2)
    for count in (2, ROWS):
        rows = _rows(rig, count, queries=2)
        made.refresh(*rows, num_decode=count, decode_q=2)
        if made.graph is None:
            made.capture()
        made.replay()
        _same(kit, made, *rows)


@pytest.mark.law("graph: prefill and decode in one batch replay like the eager step")
@_level("any")
def test_mixed_batch(kit: Kit) -> None:
    rig = kit.rig()
    made = Recorded(rig, tokens=4 * rig.block_size)
    for count in (1, 2):
        prompt = rig.sequence(rig.block_size + count)
        rows = [*_rows(rig, count), (prompt, prompt.length, prompt.length)]
        made.refresh(*rows)
        if made.graph is None:
            made.capture()
        made.replay()
        _same(kit, made, *rows)


# -- beside it ---------------------------------------------------------------------------------------------------------


@pytest.mark.law("graph: values bound after the recording take effect in the next replay")
@pytest.mark.needs("sinks")
def test_bind_under_a_graph(kit: Kit) -> None:
    rig = kit.rig(kit.layer(sinks=True))
    rows = _rows(rig, 3)
    made = _recorded(rig, rows)
    made.replay()
    _same(kit, made, *rows)
    before = rig.expected(*rows)
    rig.bind(rig.layer(), seed=99)
    made.replay()
    assert np.abs(rig.expected(*rows) - before).max() > 10 * rig.tolerance, "the case itself changes nothing"
    _same(kit, made, *rows, mistake="the values of the recording are in use: bind must write to the same addresses")


@pytest.mark.law("graph: two graphs, and two static plans, do not disturb each other")
@pytest.mark.applies.with_args(_two_graphs)
def test_two_graphs(kit: Kit) -> None:
    rig = kit.rig()
    one, two = (_recorded(rig, _rows(rig, 2)) for _ in range(2))
    first, second = _rows(rig, 3), _rows(rig, 4)
    one.refresh(*first)
    two.refresh(*second)
    one.replay()
    two.replay()
    _same(kit, one, *first, mistake="the other plan's refresh is in use: each static plan has buffers of its own")
    _same(kit, two, *second)
    one.graph.close()
    two.replay()
    _same(kit, two, *second, mistake="closing one graph took the other's memory")


@pytest.mark.law("graph: eager plans and a static plan live side by side")
def test_eager_beside_a_graph(kit: Kit) -> None:
    rig = kit.rig(limits=Limits(rows=16, tokens=256, context=2048, plans=1))
    rows, eager = _rows(rig, 3), _rows(rig, 2)
    plan = rig.plan(*eager)
    made = _recorded(rig, rows)
    made.replay()
    got = rig.attend(plan, eager, rig.layer())
    kit.check(rig, got, rig.expected(*eager), mistake="a static plan does not count among limits.plans")
    _same(kit, made, *rows)


@pytest.mark.law("graph: a replay sees what was written, and what a copy brought, since the recording")
def test_replay_reads_the_cache_of_now(kit: Kit) -> None:
    rig = kit.rig()
    made = _recorded(rig, _rows(rig, 1))
    source, target = rig.sequence(rig.block_size), rig.sequence(2 * rig.block_size)
    rig.write(source, 0, source.length)
    moved = _continued(rig, source, target)
    rig.backend.wait(rig.copy([(source.blocks[0], target.blocks[0])]))
    made.refresh((moved, rig.block_size + 1, 1))
    made.replay()
    _same(kit, made, (moved, rig.block_size + 1, 1))


def _continued(rig: Rig, first: Seq, rest: Seq) -> Seq:
    """`rest` with the content of `first` in its first block."""
    for layer in rig.group.layers:
        n = first.length
        rest.give(layer, *(torch.cat([a, b[n:]]) for a, b in zip(first.qkv(layer), rest.qkv(layer), strict=True)))
    return rest


# -- its end -----------------------------------------------------------------------------------------------------------


@pytest.mark.law("graph: nbytes is a whole number of bytes; close is idempotent, and a closed graph is not replayed")
def test_close(kit: Kit) -> None:
    rig = kit.rig()
    rows = _rows(rig, 2)
    made = _recorded(rig, rows)
    assert type(made.graph.nbytes) is int and made.graph.nbytes >= 0, f"nbytes is {made.graph.nbytes!r}"
    made.graph.close()
    made.graph.close()
    with refuses(ContractViolation, "replay of a graph that was closed"):
        made.graph.replay()
    kit.check(rig, rig.step(*rows), rig.expected(*rows))


@pytest.mark.law("graph: a graph ends with its pool")
def test_replay_after_pool_close(kit: Kit) -> None:
    rig = kit.rig()
    made = _recorded(rig, _rows(rig, 2))
    made.replay()
    rig.pool.close()
    with refuses(ContractViolation, "replay of a graph whose pool was closed"):
        made.graph.replay()
    made.graph.close()


@pytest.mark.law("graph: a batch that does not fit the shape is a ContractViolation")
@pytest.mark.parametrize("what", ["rows", "context"])
def test_larger_than_the_shape(kit: Kit, what: str) -> None:
    rig = kit.rig(limits=Limits(rows=16, tokens=64, context=4 * kit.block_size))
    made = Recorded(rig)
    rows = _rows(rig, ROWS + 1) if what == "rows" else [(rig.sequence(5 * rig.block_size), 5 * rig.block_size, 1)]
    with refuses(ContractViolation, f"a refresh with more {what} than the shape"):
        made.extension.refresh(made.plan, rig.batch(rows))
