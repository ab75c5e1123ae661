"""One step's work as arrays: which tokens of which rows are computed, where they go, and whose logits are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagedkv.api.records import Batch, Int32, Int64
from pagedkv.core.request import Request
from pagedkv.core.rows import Rows

_NONE: Int64 = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What the engine computes next. `copies` [N, 2] are (source, destination) blocks to copy before anything else.

    `batch` rows stand decoding ones first; `index` are the same table rows as int64. `sample` [n] are the batch rows
    whose last token ends what is known, so that their logits yield the next id; `output_index` [n] counts the output
    tokens each already has. `scored` [m] are the batch's tokens whose logits say how probable the prompt's next token
    was. `serials` tell the owners of the rows.
    """

    batch: Batch
    input_ids: Int32
    positions: Int32
    queries: Int32
    index: Int64
    sample: Int64
    output_index: Int64
    scored: Int64
    copies: Int32
    serials: Int32
    admitted: tuple[Request, ...]
    preempted: tuple[Request, ...]

    @property
    def sample_rows(self) -> Int64:
        """The table rows of `sample`."""
        rows: Int64 = self.index.take(self.sample)
        return rows

    @property
    def logits_at(self) -> Int64:
        """Which of the batch's tokens logits are needed of: [n] for `sample`, then [m] `scored`."""
        at: Int64 = self.batch.cu_q.take(self.sample + 1).astype(np.int64) - 1
        return np.concatenate([at, self.scored]) if len(self.scored) else at

    @property
    def scored_rows(self) -> Int64:
        """The table rows [m] of `scored`."""
        rows: Int64 = self.index.take(np.searchsorted(self.batch.cu_q, self.scored, side="right") - 1)
        return rows


@dataclass(slots=True, kw_only=True)
class Changes:
    """What happened while a step was chosen: copies to make, requests that started, and some that had to stop."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


def compose(state: Rows, rows: Int64, queries: Int32 | None, changes: Changes) -> Step:
    """The step that computes `queries` tokens of each of `rows`; None: exactly one of each, all of them known then."""
    if queries is None:
        queries, ctx_len = state.ones[: len(rows)], state.length.take(rows)
        cu_q, sample = state.counting[: len(rows) + 1], state.counting64[: len(rows)]
        of_token, positions = rows, ctx_len - 1
        max_q, num_decode, scored = 1, len(rows), _NONE
    else:
        decode_first = np.argsort(queries != 1, kind="stable")
        rows, queries = rows[decode_first], queries[decode_first]
        ctx_len = state.computed.take(rows) + queries
        cu_q = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(queries, out=cu_q[1:])
        of_token, positions = spread(rows, queries, cu_q, ctx_len)
        length = state.length.take(rows)
        sample = ((ctx_len == length) & (length < state.limit.take(rows))).nonzero()[0]
        scored = _scored(state, of_token, positions)
        max_q, num_decode = int(queries.max()), int(np.count_nonzero(queries == 1))
    sampled = rows.take(sample)
    return Step(
        batch=Batch(
            num_seqs=len(rows),
            num_tokens=len(positions),
            cu_q=cu_q,
            ctx_len=ctx_len,
            block_table=state.table,
            rows=rows.astype(np.int32),
            slots=state.slots(of_token, positions),
            max_q=max_q,
            max_ctx=int(ctx_len.max()),
            num_decode=num_decode,
        ),
        input_ids=state.tokens_at(of_token, positions),
        positions=positions,
        queries=queries,
        index=rows,
        sample=sample,
        scored=scored,
        output_index=(state.length.take(sampled) - state.prompt_len.take(sampled)).astype(np.int64),
        copies=np.array(changes.copies, np.int32).reshape(-1, 2),
        serials=state.serial.take(rows),
        admitted=tuple(request for request in dict.fromkeys(changes.admitted) if request.row),
        preempted=tuple(changes.preempted),
    )


def padded(batch: Batch, rows: int) -> Batch:
    """A batch of one token a row as one of `rows` rows: those added have no query, context 0, no slot, and row 0."""
    more = rows - batch.num_seqs
    if not more:
        return batch
    slots = batch.slots
    return Batch(
        num_seqs=batch.num_seqs,
        num_tokens=batch.num_tokens,
        cu_q=np.concatenate([batch.cu_q, np.full(more, batch.num_tokens, np.int32)]),
        ctx_len=np.concatenate([batch.ctx_len, np.zeros(more, np.int32)]),
        block_table=batch.block_table,
        rows=np.concatenate([batch.rows, np.zeros(more, np.int32)]),
        slots=None if slots is None else np.concatenate([slots, np.full(more, -1, np.int64)]),
        max_q=batch.max_q,
        max_ctx=batch.max_ctx,
        num_decode=batch.num_decode,
    )


def _scored(state: Rows, of_token: Int64, positions: Int32) -> Int64:
    """Which of the tokens have logits that are still wanted."""
    wanted = (positions >= state.scored.take(of_token)) & (positions < state.score_to.take(of_token))
    return wanted.nonzero()[0]


def spread(rows: Int64, queries: Int32, cu_q: Int32, ctx_len: Int32) -> tuple[Int64, Int32]:
    """For each token of the batch: its table row, and its position in the sequence."""
    first = ctx_len - queries - cu_q[:-1]
    positions = np.arange(cu_q[-1], dtype=np.int32) + np.repeat(first, queries)
    return np.repeat(rows, queries), positions.astype(np.int32)
