"""Decode steps recorded once for a few sizes and replayed: which ones, their padding, and the tensors they share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from pagedkv.api import AttentionBackend, Capabilities, Plan, Pool
from pagedkv.api.errors import OutOfDeviceMemory, UnsupportedError
from pagedkv.api.extensions import Graph, GraphShape
from pagedkv.api.records import Batch
from pagedkv.config import EngineConfig, show_bytes
from pagedkv.core.negotiation import BATCH_INVARIANT
from pagedkv.core.step import Step, padded
from pagedkv.models.decoder import Decoder

_log = logging.getLogger("pagedkv.engine")

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Sizes that are recorded, up to max_num_seqs: a step takes the next larger one. Decode waits for weights and cache,
not for arithmetic, so that rows without a sequence cost little."""
CONTEXT = 8192
"""The longest context of a recorded step where neither user nor backend says."""
WHAT = "Recording decode steps"

Progress = Callable[..., None]
"""Called with what is done and how much there is in all, and with a name for it as `what`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """What will be recorded: `rows` ascending, each for contexts up to `max_ctx`."""

    rows: tuple[int, ...]
    max_ctx: int


def graph_plan(
    config: EngineConfig, can: Capabilities, features: frozenset[str], model: Decoder, max_model_len: int
) -> GraphPlan | None:
    """What to record, or None; a wish that cannot be met is told, with the reason."""
    why_not = _why_no_graphs(config, can, features, model)
    if why_not is not None:
        asked = config.enforce_eager is False or config.max_seq_len_to_capture is not None
        if why_not and asked:
            _log.warning("decode steps are not recorded: %s", why_not)
        elif why_not:
            _log.info("decode steps are not recorded: %s", why_not)
        return None
    most = min(config.max_num_seqs, ROWS[-1])
    rows = spread((*(rows for rows in ROWS if rows < most), most), can.max_graphs)
    wanted = config.max_seq_len_to_capture or can.graph_context or CONTEXT
    return GraphPlan(rows=rows, max_ctx=min(wanted, max_model_len)) if rows else None


def spread(sizes: Sequence[int], most: int | None) -> tuple[int, ...]:
    """At most `most` of the ascending sizes, None for all: the smallest, the largest, and even steps between them.

    A single one is the largest, as it serves small steps too.
    """
    if most is None or most >= len(sizes):
        return tuple(sizes)
    if most < 2:
        return tuple(sizes[-1:]) if most else ()
    return tuple(sizes[round(place * (len(sizes) - 1) / (most - 1))] for place in range(most))


def _why_no_graphs(config: EngineConfig, can: Capabilities, features: frozenset[str], model: Decoder) -> str | None:
    """One line; "" where nobody would expect any; None where they are recorded."""
    if config.enforce_eager:
        return ""
    if can.graph == "none" or "graph" not in can.extensions:
        return "the backend has no graphs" if config.enforce_eager is False or config.max_seq_len_to_capture else ""
    if config.enforce_eager is None and config.max_seq_len_to_capture is None and not can.graph_default:
        return "steps run eagerly on this backend unless enforce_eager=False asks for graphs"
    if model.why_no_graph is not None:
        return model.why_no_graph
    if BATCH_INVARIANT in features:
        return (
            "batch-invariant results need eager steps, as a replay equals them within tolerance only; "
            "batch_invariant=False allows graphs"
        )
    return None


class DecodeGraphs:
    """Recorded steps of one token a row, over one pool. Close before the pool."""

    def __init__(self, backend: AttentionBackend, pool: Pool, model: Decoder, plan: GraphPlan, vocab_size: int) -> None:
        self.plan = plan
        self._backend, self._pool, self._model = backend, pool, model
        self._extension: Any = backend.extension("graph")
        device, most = backend.torch_device, plan.rows[-1]
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._logits = torch.zeros(most, vocab_size, dtype=torch.float32, device=device)
        self._recorded: dict[int, tuple[Plan, Graph]] = {}
        self._sizes: tuple[int, ...] = ()
        self.replays = 0

    @property
    def nbytes(self) -> int:
        """Bytes of device memory: the recordings and what they share."""
        shared = self._ids.nbytes + self._positions.nbytes + self._logits.nbytes
        return shared + sum(graph.nbytes for _, graph in self._recorded.values())

    @property
    def rows(self) -> tuple[int, ...]:
        """The sizes that are recorded, ascending."""
        return self._sizes

    def record(self, rows: tuple[int, ...], progress: Progress | None = None) -> None:
        """Record these sizes, the largest first, as the smaller ones can live in its memory.

        One that the backend has no room or no support for ends it with a warning: those steps run eagerly.
        """
        for done, count in enumerate(sorted(rows, reverse=True)):
            try:
                self._recorded[count] = self._record(count)
            except (OutOfDeviceMemory, UnsupportedError) as error:
                _log.warning(
                    "decode steps of %d rows and fewer could not be recorded and run eagerly: %s (enforce_eager=True "
                    "leaves the attempt out)",
                    count,
                    error,
                )
                return
            self._sizes = (count, *self._sizes)
            if progress is not None:
                progress(done + 1, len(rows), what=WHAT)

    def _record(self, rows: int) -> tuple[Plan, Graph]:
        shape = GraphShape(rows=rows, tokens=rows, max_ctx=self.plan.max_ctx)
        plan = self._extension.static_plan(self._pool, 0, shape)
        self._extension.refresh(plan, padded(_nothing(), rows))
        return plan, self._extension.capture(partial(self._step, plan, rows), [plan])

    def _step(self, plan: Plan, rows: int) -> None:
        """What is recorded: all rows, whether a sequence has them or not."""
        attend = partial(self._backend.attend, plan)
        self._logits[:rows].copy_(self._model.forward(self._ids[:rows], self._positions[:rows], attend))

    def run(self, step: Step) -> torch.Tensor | None:
        """The step's logits, valid until the next one; None for a step that no recording holds."""
        batch = step.batch
        rows = next((rows for rows in self._sizes if rows >= batch.num_seqs), None)
        if rows is None or batch.max_q != 1 or batch.num_decode != batch.num_seqs or batch.max_ctx > self.plan.max_ctx:
            return None
        count = batch.num_tokens
        plan, graph = self._recorded[rows]
        self._ids[:count].copy_(torch.from_numpy(step.input_ids.astype(np.int64)), non_blocking=True)
        self._positions[:count].copy_(torch.from_numpy(step.positions.astype(np.int64)), non_blocking=True)
        self._extension.refresh(plan, padded(batch, rows))
        graph.replay()
        self.replays += 1
        at = step.logits_at
        if len(at) == count and not len(step.scored):
            return self._logits[:count]
        return self._logits.index_select(0, torch.from_numpy(at).to(self._logits.device))

    def close(self) -> None:
        """Give the recordings back."""
        for _, graph in self._recorded.values():
            graph.close()
        self._recorded, self._sizes = {}, ()


def _nothing() -> Batch:
    """A batch without a row."""
    none = np.zeros(0, np.int32)
    return Batch(
        num_seqs=0,
        num_tokens=0,
        cu_q=np.zeros(1, np.int32),
        ctx_len=none,
        block_table=np.zeros((1, 1), np.int32),
        rows=none,
        slots=np.zeros(0, np.int64),
        max_q=0,
        max_ctx=0,
    )


def recorded(
    backend: AttentionBackend,
    pool: Pool,
    model: Decoder,
    plan: GraphPlan,
    vocab_size: int,
    progress: Progress | None = None,
) -> DecodeGraphs:
    """All of the plan's sizes, and a line about them."""
    began = time.perf_counter()
    graphs = DecodeGraphs(backend, pool, model, plan, vocab_size)
    graphs.record(plan.rows, progress)
    _log.info(
        "decode steps recorded for %s rows and contexts up to %d in %.1f s, %s (max_seq_len_to_capture, enforce_eager)",
        ", ".join(map(str, graphs.rows)) or "no",
        plan.max_ctx,
        time.perf_counter() - began,
        show_bytes(graphs.nbytes),
    )
    return graphs
