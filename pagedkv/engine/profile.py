"""The memory that a step takes beside weights and cache, measured with the largest one there can be, before the cache
is sized: by what this process itself allocates, so that others may take and give memory meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from pagedkv.api import AttentionBackend, Pool, PoolSpec
from pagedkv.api.records import Batch
from pagedkv.engine.graphs import DecodeGraphs, GraphPlan
from pagedkv.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes: `workspace` of the largest step, None where the backend does not count; `graphs` of all recordings.

    `graphs` is 0 where there will be none, as not even the largest could be recorded.
    """

    workspace: int | None
    graphs: int


def measured(
    backend: AttentionBackend,
    model: Decoder,
    spec: PoolSpec,
    graphs: GraphPlan | None,
    vocab_size: int,
    most_given: int,
) -> Measured | None:
    """Run the largest step, and record two sizes where steps are recorded, on a pool of no use. None: nothing to learn.

    Of `most_given` tokens logits, or hidden states, are given. Afterwards all that the model keeps from step to step
    has its final size and place.
    """
    counts = backend.memory().peak is not None
    if not counts and graphs is None:
        return None
    with _smallest_pool(backend, model, spec) as pool:
        peak = _peak(backend, partial(_largest_step, backend, pool, model, spec, most_given))
        taken = 0 if graphs is None else _graph_bytes(backend, pool, model, graphs, vocab_size)
    return Measured(workspace=peak if counts else None, graphs=taken)


@contextmanager
def _smallest_pool(backend: AttentionBackend, model: Decoder, spec: PoolSpec) -> Iterator[Pool]:
    pool = backend.alloc_pool(dataclasses.replace(spec, num_blocks=2))
    try:
        bind_sinks(backend, pool, model)
        yield pool
    finally:
        pool.close()


def bind_sinks(backend: AttentionBackend, pool: Pool, model: Decoder) -> None:
    """Give the pool's layers the sinks that the model has learned."""
    for layer, values in model.sinks.items():
        backend.bind(pool, layer, {"sinks": values.numpy()})


def _peak(backend: AttentionBackend, step: Callable[[], None]) -> int:
    """Bytes that `step` allocates at most, beside what was there."""
    backend.synchronize()
    backend.reset_peak()
    before = backend.memory().allocated or 0
    step()
    backend.synchronize()
    return max(0, (backend.memory().peak or 0) - before)


def _largest_step(backend: AttentionBackend, pool: Pool, model: Decoder, spec: PoolSpec, most_given: int) -> None:
    """As many tokens as a step may have, of sequences that are nowhere stored, and as many logits."""
    tokens, rows = spec.limits.tokens, spec.limits.rows
    batch = nowhere(tokens, rows, spec.limits.context)
    wanted = min(batch.num_tokens, most_given)
    ids = torch.zeros(batch.num_tokens, dtype=torch.int64, device=backend.torch_device)
    attend = partial(backend.attend, backend.plan(pool, 0, batch))
    model.forward(ids, torch.zeros_like(ids), attend, torch.arange(wanted, device=backend.torch_device))


def nowhere(tokens: int, rows: int, context: int) -> Batch:
    """A batch of up to `tokens` tokens in as few rows as hold them, no more than `rows`: no slot, null blocks only."""
    counts = [min(context, tokens - start) for start in range(0, tokens, context)][:rows]
    count, total = len(counts), sum(counts)
    return Batch(
        num_seqs=count,
        num_tokens=total,
        cu_q=np.cumsum([0, *counts], dtype=np.int32),
        ctx_len=np.array(counts, np.int32),
        block_table=np.zeros((1, context), np.int32),
        rows=np.zeros(count, np.int32),
        slots=np.full(total, -1, np.int64),
        max_q=max(counts),
        max_ctx=max(counts),
    )


def _graph_bytes(backend: AttentionBackend, pool: Pool, model: Decoder, plan: GraphPlan, vocab_size: int) -> int:
    """What all sizes will take: the largest one as it is, every other one like the second largest; 0: none can be."""
    graphs = DecodeGraphs(backend, pool, model, plan, vocab_size)
    try:
        graphs.record(plan.rows[-1:])
        if not graphs.rows:
            return 0
        first = graphs.nbytes
        graphs.record(plan.rows[-2:-1])
        return first + (graphs.nbytes - first) * (len(plan.rows) - 1)
    finally:
        graphs.close()
