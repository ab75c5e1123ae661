"""The log of each softmax denominator, which lets parts of a context be attended apart and merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import ContractViolation
from pagedkv.conformance.kit import Kit, assert_same_bits
from pagedkv.conformance.oracle import Floats
from pagedkv.conformance.refusals import refuses
from pagedkv.conformance.rig import Rig, Row

pytestmark = [pytest.mark.level("lse"), pytest.mark.needs("lse")]

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "non_causal": {"causal": False},
}


def attend(rig: Rig, rows: list[Row], *, q: Any = None, write: bool = True, pad: int = 0, **batch: Any) -> Any:
    """(out [T + pad, Hq, Dv], lse [T + pad, Hq]) of one step; `pad` rows of NaN follow in q."""
    layer = rig.layer()
    queries, k, v = rig.qkv(rows, layer)
    queries = queries if q is None else q
    queries = torch.cat([queries, torch.full_like(queries[:1], float("nan")).expand(pad, -1, -1)])
    out = rig.empty_out(len(queries), layer)
    lse = rig.to_device(torch.full((len(queries), layer.q_heads), float("nan"), dtype=torch.float32))
    lse[len(queries) - pad :] = 7.0
    plan = rig.plan(*rows, write=write, **batch)
    rig.backend.attend(plan, layer.index, queries, k if write else None, v if write else None, out, extra={"lse": lse})
    return rig.to_array(out), rig.to_array(lse)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "plain" else pytest.mark.needs(name)) for name in LAYERS],
)
@pytest.mark.law("lse: it is the natural log of the softmax denominator, sinks, window and softcap included")
def test_against_the_oracle(kit: Kit, name: str) -> None:
    rig = kit.rig(kit.layer(**LAYERS[name]))
    size = rig.block_size
    a, b, c = (rig.sequence(n) for n in (3 * size + 1, size, 2 * size + 1))
    rows = [(a, a.length, 1), (b, b.length, b.length), (c, c.length, size)]
    rig.write(a, 0, a.length - 1)
    rig.write(c, 0, c.length - size)
    out, lse = attend(rig, rows)
    kit.check(rig, out, rig.expected(*rows))
    kit.check(rig, lse, rig.expected_lse(*rows), mistake="a base-2 log, or the largest score or the sink left out?")


# Only where no layer is causal may a context leave this step's tokens out, so that a query sees nothing.
@pytest.mark.law("lse: minus infinity where a query sees nothing")
@pytest.mark.needs("non_causal")
def test_nothing_visible(kit: Kit) -> None:
    rig = kit.rig(kit.layer(causal=False))
    seq = rig.sequence(4)
    rig.write(seq, 0, 4)
    rows = [(seq, 4, 1), (seq, 4, 1)]
    out, lse = attend(rig, rows, write=False, ctx_len=np.array([0, 4], np.int32))
    assert (out[0] == 0).all(), "a query without a visible key gives zeros"
    assert (lse[0] == -np.inf).all(), f"the denominator is 0, its log minus infinity; got {lse[0]}"
    kit.check(rig, lse[1:], rig.expected_lse((seq, 4, 1)))


@pytest.mark.law("lse: where only a sink is visible it is the sink")
@pytest.mark.needs("sinks", "non_causal")
def test_only_a_sink(kit: Kit) -> None:
    rig = kit.rig(kit.layer(sinks=True, causal=False))
    seq = rig.sequence(4)
    rig.write(seq, 0, 4)
    out, lse = attend(rig, [(seq, 4, 1)], write=False, ctx_len=np.zeros(1, np.int32))
    assert (out == 0).all(), "a query without a visible key gives zeros, sink or not"
    kit.check(rig, lse[0], rig.bound[0]["sinks"])


@pytest.mark.law("lse: rows past the batch's tokens are left alone or finite")
def test_padding_rows(kit: Kit) -> None:
    rig = kit.rig()
    seq = rig.sequence(3)
    out, lse = attend(rig, [(seq, 3, 3)], pad=2)
    assert np.isfinite(out[3:]).all(), "padding rows of out must be finite"
    assert np.isfinite(lse[3:]).all(), "padding rows of lse must be left alone or finite; these became NaN or infinite"


@pytest.mark.law("lse: asking for it changes no bit of out")
def test_out_stays_as_it_is(kit: Kit) -> None:
    rig = kit.rig()
    seq = rig.sequence(2 * rig.block_size + 1)
    rig.write(seq, 0, seq.length)
    out, _ = attend(rig, [(seq, seq.length, 3)], write=False)
    assert_same_bits(out, rig.step((seq, seq.length, 3), write=False), "with lse another kernel or order is in use")


@pytest.mark.law("lse: an append takes none")
def test_append_takes_none(kit: Kit) -> None:
    rig = kit.rig()
    layer, row = rig.layer(), (rig.sequence(3), 3, 3)
    _, k, v = rig.qkv([row], layer)
    lse = rig.to_device(torch.zeros((3, layer.q_heads), dtype=torch.float32))
    with refuses(ContractViolation, "extra={'lse': tensor} without q and out"):
        rig.backend.attend(rig.plan(row), layer.index, None, k, v, None, extra={"lse": lse})


@pytest.mark.law("lse: two parts of a context merge into the whole")
def test_two_parts_make_the_whole(kit: Kit) -> None:
    rig = kit.rig()
    size, layer = rig.block_size, rig.layer()
    whole = rig.sequence(5 * size + 2)
    rig.write(whole, 0, whole.length)
    parts = [whole.moved(whole.blocks[:2]), whole.moved(whole.blocks[2:])]
    lengths = [2 * size, whole.length - 2 * size]
    query = whole.qkv(layer)[0][-1:]
    rows = [(parts[0], lengths[0], 1), (parts[1], lengths[1], 1)]
    out, lse = attend(rig, rows, q=rig.to_device(query.repeat(2, 1, 1)), write=False)
    merged, total = merge(out, lse)
    expected = (whole, whole.length, 1)
    kit.check(rig, merged, rig.expected(expected)[0])
    kit.check(rig, total, rig.expected_lse(expected)[0])


def merge(out: Floats, lse: Floats) -> tuple[Floats, Floats]:
    """Parts [P, Hq, Dv] with logs [P, Hq] -> the whole: softmax weights of the logs (Dao et al., 2022)."""
    total = np.logaddexp.reduce(lse, axis=0)
    return (np.exp(lse - total)[..., None] * out).sum(0), total
