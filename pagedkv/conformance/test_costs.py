"""What planning, copying and attention cost here: figures for the certificate, without a verdict."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pagedkv.api import Limits
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.rig import Rig, Row

pytestmark = [pytest.mark.level("core"), pytest.mark.law("costs: reported, not judged")]

CONTEXT = 256
SECONDS, LEAST = 0.15, 3
"""A figure is the median of what fits into this time, of at least this many runs."""


def _median_seconds(work: Callable[[], object]) -> float:
    """The median duration of `work`, after one run that is not counted."""
    work()
    taken: list[float] = []
    while len(taken) < LEAST or (sum(taken) < SECONDS and len(taken) < 200):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _report(kit: Kit, name: str, value: float) -> None:
    assert math.isfinite(value) and value > 0, f"{name} came out as {value}"
    kit.report(name, value)


def _rig(kit: Kit, sequences: int, *, shared: bool) -> tuple[Rig, list[Row]]:
    """A pool and `sequences` decode rows of a full context each; `shared`: all over the same blocks."""
    size = kit.can.preferred_block_size
    needed = -(-CONTEXT // size)
    rig = kit.rig(
        block_size=size,
        num_blocks=1 + needed * (1 if shared else sequences),
        limits=Limits(rows=sequences, tokens=max(sequences, CONTEXT), context=CONTEXT),
    )
    seqs = [rig.sequence(CONTEXT) for _ in range(1 if shared else sequences)]
    for seq in seqs:
        rig.write(seq, 0, CONTEXT)
    return rig, [(seqs[i % len(seqs)], CONTEXT, 1) for i in range(sequences)]


@pytest.mark.parametrize("sequences", [1, 64, 256])
def test_plan(kit: Kit, sequences: int) -> None:
    rig, rows = _rig(kit, sequences, shared=True)
    batch = rig.batch(rows, write=False)
    seconds = _median_seconds(lambda: rig.backend.plan(rig.pool, 0, batch))
    _report(kit, f"plan_ms_{sequences}", 1e3 * seconds)


@pytest.mark.parametrize("sequences", [1, 32])
def test_attention(kit: Kit, sequences: int) -> None:
    rig, rows = _rig(kit, sequences, shared=False)
    plan, layer = rig.plan(*rows, write=False), rig.layer()
    q, _, _ = rig.qkv(rows, layer)
    out = rig.empty_out(sequences, layer)

    def work() -> None:
        rig.backend.attend(plan, layer.index, q, None, None, out)
        rig.backend.synchronize()

    _report(kit, f"attention_tokens_per_s_{sequences}", sequences / _median_seconds(work))


@pytest.mark.parametrize("placement", ["device", pytest.param("host", marks=pytest.mark.placement("host"))])
def test_copy(kit: Kit, placement: str) -> None:
    count = 64
    fields: dict[str, Any] = {"block_size": kit.can.preferred_block_size, "num_blocks": count + 1}
    source, target = kit.rig(**fields), kit.rig(**fields, placement=placement)
    ids = np.arange(1, count + 1, dtype=np.int32)
    pairs = np.stack([ids, ids[::-1]], axis=1)
    moved = count * source.backend.pool_cost(source.spec).per_block
    seconds = _median_seconds(lambda: source.backend.copy_blocks(source.pool, target.pool, pairs).join())
    _report(kit, f"copy_bytes_per_s_{placement}", moved / seconds)
