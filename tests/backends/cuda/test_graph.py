"""Graphs beyond what the kit looks at: what is refused, that nothing moves, and a capture that fails."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.api import Batch, UnsupportedError
from pagedkv.api.extensions import GraphShape
from tests.backends.cuda.double import DelayingRuntime, double
from tests.backends.cuda.test_pool import spec

SHAPE = GraphShape(rows=4, tokens=4, max_ctx=128)


def batch(*contexts):
    """Decode rows padded to the shape: row i owns block i + 1 and writes its last position."""
    count, table = len(contexts), np.zeros((5, 8), np.int32)
    table[1:5, 0] = [1, 2, 3, 4]
    slots = np.full(4, -1, np.int64)
    slots[:count] = [(i + 1) * 16 + context - 1 for i, context in enumerate(contexts)]
    lengths = np.array([*contexts, *[0] * (4 - count)], np.int32)
    return Batch(
        num_seqs=count,
        num_tokens=count,
        cu_q=np.minimum(np.arange(5), count).astype(np.int32),
        ctx_len=lengths,
        block_table=table,
        rows=np.arange(1, 5, dtype=np.int32),
        slots=slots,
        max_q=1,
        max_ctx=int(lengths.max()),
        num_decode=count,
    )


class Step:
    """One layer over a static plan, on fixed tensors."""

    def __init__(self, backend):
        self.backend, self.graphs = backend, backend.extension("graph")
        self.pool = backend.alloc_pool(spec())
        self.plan = self.graphs.static_plan(self.pool, 0, SHAPE)
        generator = torch.Generator().manual_seed(1)
        self.q, self.k, self.v = (torch.randn(4, heads, 64, generator=generator) for heads in (4, 2, 2))
        self.out = torch.empty(4, 4, 64)

    def __call__(self):
        self.backend.attend(self.plan, 0, self.q, self.k, self.v, self.out)

    def first_key_alone(self):
        """With a context of one, attention gives the value back, rounded as stored."""
        return self.v.half().float().repeat_interleave(2, dim=1)


def test_addresses_stay_through_every_refresh():
    step = Step(double())
    seen = set()
    for contexts in ((1,), (1, 1, 1), (), (5, 9)):
        step.graphs.refresh(step.plan, batch(*contexts))
        seen.add(tuple(one.data_ptr() for one in step.plan.arrays.values()))
    assert len(seen) == 1


def test_a_replay_follows_the_last_refresh_and_zeroes_padding():
    step = Step(double())
    graph = step.graphs.capture(step, [step.plan])
    step.graphs.refresh(step.plan, batch(1, 1))
    step.out.fill_(float("nan"))
    graph.replay()
    assert torch.allclose(step.out[:2], step.first_key_alone()[:2], atol=1e-6)
    assert bool((step.out[2:] == 0).all())
    assert graph.nbytes > 0


def test_a_plan_made_in_inference_mode_is_refreshed_outside_of_it():
    with torch.inference_mode():
        step = Step(double())
    step.graphs.refresh(step.plan, batch(1))
    step.out = torch.zeros(4, 4, 64)
    step.backend.attend(step.plan, 0, step.q, step.k, step.v, step.out)
    assert torch.allclose(step.out[:1], step.first_key_alone()[:1], atol=1e-6)


class Refusing(DelayingRuntime):
    def capture(self, work):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_a_capture_that_fails_is_a_warning_and_runs_eagerly(caplog):
    step = Step(double(runtime=Refusing()))
    graph = step.graphs.capture(step, [step.plan])
    assert "could not be captured" in caplog.text and "enforce_eager" in caplog.text
    step.graphs.refresh(step.plan, batch(1, 1, 1, 1))
    graph.replay()
    assert torch.allclose(step.out, step.first_key_alone(), atol=1e-6)


def test_steps_of_several_tokens_a_row_are_refused():
    backend = double()
    pool, graphs = backend.alloc_pool(spec()), backend.extension("graph")
    assert graphs.static_plan(pool, 0, GraphShape(rows=4, tokens=4, max_ctx=64)) is not None
    with pytest.raises(UnsupportedError, match="one token a row"):
        graphs.static_plan(pool, 0, GraphShape(rows=2, tokens=4, max_ctx=64, decode_q=2))
