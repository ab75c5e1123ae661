"""Who computes which tokens in the next step: one token budget, no phases.

    schedule()   order the running, share the budget among rows, preempt if blocks run out, admit from the queue
       |
     Step        numpy arrays of one batch; the engine computes it
       |
    commit()     counts what is written, publishes full blocks
    append()     takes in the sampled ids, finishes requests

Decoding rows come first, then prompts in chunks. Order is (priority, arrival). A request that does not fit yet may
be overtaken by `max_overtakes` later ones, then everybody waits for it. When a row must grow and no block is left, the
last in order is preempted: it gives everything back and is computed again later, its tokens kept. The first in order is
never preempted, so somebody always makes progress; `capacity` refuses at submission what could not finish even alone.

Logits of prompt positions are wanted by few and are large, so a step gives at most `max_scored` of them, and prompts
that want them come in smaller chunks. They hit the cache only up to where their logits were given.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from pagedkv.api.errors import InternalError, RequestInvalid, RequestTooLong
from pagedkv.api.records import Int32, Int64
from pagedkv.core.block_pool import BlockPool
from pagedkv.core.prefix_index import PrefixIndex
from pagedkv.core.request import Reason, Request, State
from pagedkv.core.rows import Rows
from pagedkv.core.step import Changes, Step, compose

Mask = npt.NDArray[np.bool_]

_ORDER = attrgetter("order")
_SCAN = 32  # waiting requests looked at in one step
MAX_SCORED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and policy. `num_blocks` counts the null block; `watermark` blocks stay free of admissions.

    `max_scored` logits are given in one step beside those of sampled tokens.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    chunked_prefill: bool = True
    prefix_caching: bool = True
    max_overtakes: int = 16
    watermark: float = 0.01
    max_scored: int = MAX_SCORED


class Scheduler:
    """The core's state and its transitions: `add`, `schedule`, `commit`, `append`, `abort`, `fork`."""

    def __init__(self, config: SchedulerConfig, fingerprint: bytes = b"", index: PrefixIndex | None = None) -> None:
        self.config = config
        self.index = PrefixIndex(fingerprint) if index is None else index
        self.pool = BlockPool(config.num_blocks, self.index)
        self.rows = Rows(config.max_num_seqs, config.max_model_len, config.block_size)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._by_row: list[Request | None] = [None] * (config.max_num_seqs + 1)
        self._forked: set[int] = set()
        self._scoring: set[int] = set()  # rows whose logits are wanted, or that are not sampled at all
        self._order: Int64 | None = None
        self._next_id = 0

    # -- what comes in and goes out ------------------------------------------------------------------------------------

    def capacity(self) -> int:
        """The longest request, prompt and output, that finishes when alone: its last token is never stored."""
        return min(self.config.max_model_len, self.pool.usable * self.config.block_size + 1)

    def limit(self, prompt_len: int, max_tokens: int | None) -> int:
        """The total length at which a request ends; raises what makes it impossible, with the numbers."""
        config, capacity = self.config, self.capacity()
        if max_tokens == 0:  # then the last token is stored, too
            capacity = min(capacity, self.pool.usable * config.block_size)
        if prompt_len == 0:
            raise RequestInvalid("the prompt is empty: give at least one token", field="prompt")
        total = prompt_len + (1 if max_tokens is None else max_tokens)
        if total > capacity:
            raise RequestTooLong(_too_long(prompt_len, max_tokens, config, self.pool), needed=total, available=capacity)
        if not config.chunked_prefill and prompt_len > config.max_num_batched_tokens:
            raise RequestTooLong(
                f"a prompt of {prompt_len} tokens does not fit a step of max_num_batched_tokens="
                f"{config.max_num_batched_tokens} while chunked prefill is off: raise it, or turn chunked prefill on",
                needed=prompt_len,
                available=config.max_num_batched_tokens,
            )
        return capacity if max_tokens is None else total

    def add(
        self,
        tokens: Int32,
        *,
        label: str = "",
        max_tokens: int | None = None,
        end_ids: Sequence[int] = (),
        priority: int = 0,
        salt: bytes = b"",
        scored: bool = False,
    ) -> Request:
        """Queue a prompt. Raises `RequestInvalid` or `RequestTooLong`, and then nothing has changed.

        `scored`: the steps give the logits of every prompt position but the last, each once. `max_tokens` 0 ends the
        request when its prompt has been computed.
        """
        limit = self.limit(len(tokens), max_tokens)
        request = Request(
            id=self._next_id,
            label=label or str(self._next_id),
            tokens=tokens,
            prompt_len=len(tokens),
            limit=limit,
            end_ids=tuple(end_ids),
            priority=priority,
            salt=salt,
            arrival=self._next_id,
            score_to=len(tokens) - 1 if scored else 0,
            root=self.index.root(salt),
        )
        self._next_id += 1
        insort(self.waiting, request, key=_ORDER)
        return request

    def abort(self, request: Request, reason: Reason = Reason.ABORT) -> bool:
        """End a request in whatever state it is; False if it had finished already."""
        if request.state is State.FINISHED:
            return False
        self._finish(request, reason)
        return True

    def fork(self, parent: Request, label: str = "") -> Request:
        """A second sequence with the same tokens. It shares every block; the first to write a shared one copies it.

        Between `commit` and `append` both then get a token of their own. When the parent has more than one token to
        compute, or no row is free, the fork waits and finds its prefix in the cache.
        """
        if parent.state is State.FINISHED:
            raise InternalError(f"request {parent.label!r} has finished and cannot be forked")
        child = Request(
            id=self._next_id,
            label=label or f"{parent.label}/{self._next_id}",
            tokens=self.tokens_of(parent).copy(),
            prompt_len=parent.prompt_len,
            limit=parent.limit,
            end_ids=parent.end_ids,
            priority=parent.priority,
            salt=parent.salt,
            arrival=parent.arrival,
            root=parent.root,
            hashes=list(parent.hashes),
            num_cached_tokens=parent.num_cached_tokens,
        )
        self._next_id += 1
        if self.rows.num_free and self._decoding(parent):
            blocks = self.rows.held(parent.row)
            self.pool.acquire(blocks, child.label)
            self._run(child, blocks, int(self.rows.computed[parent.row]))
            self._forked |= {parent.row, child.row}
        else:
            insort(self.waiting, child, key=_ORDER)
        return child

    def _decoding(self, request: Request) -> bool:
        row = request.row
        return row != 0 and bool(self.rows.length[row] - self.rows.computed[row] <= 1)

    def tokens_of(self, request: Request) -> Int32:
        """Prompt and output ids known so far; a view while the request runs."""
        if request.row == 0:
            return request.tokens
        return self.rows.tokens[request.row, : self.rows.length[request.row]]

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self.waiting and not self.running

    # -- schedule ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Choose the next step's work, or None when there is none."""
        changes = Changes(copies=[], admitted=[], preempted=[])
        self._grow(changes)
        rows = self._running_rows()
        need = self.rows.length.take(rows) - self.rows.computed.take(rows)
        if len(rows) and not self._scoring and (need == 1).all() and not (self.waiting and self.rows.num_free):
            return compose(self.rows, rows, None, changes)
        scoring = _Scoring(left=self.config.max_scored)
        if self._scoring:
            need = scoring.fit(need, *(values.take(rows) for values in self._wanted))
        queries, left = budget(need, self.config)
        if not changes.preempted:
            rows, queries = self._admit(left, scoring, rows, queries, changes)
        active = queries > 0
        if not active.any():
            self._check_nothing_left(changes.preempted)
            return None
        return compose(self.rows, rows[active], queries[active], changes)

    def _check_nothing_left(self, preempted: list[Request]) -> None:
        if self.running or (self.waiting and not preempted):
            names = [request.label for request in (self.running or self.waiting)[:4]]
            raise InternalError(f"nothing can be scheduled, but {names} wait; please report this")

    @property
    def _wanted(self) -> tuple[Int32, Int32, Int32]:
        return self.rows.computed, self.rows.scored, self.rows.score_to

    def _running_rows(self) -> Int64:
        if self._order is None:
            self._order = np.array([request.row for request in self.running], np.int64)
        return self._order

    def _grow(self, changes: Changes) -> None:
        """Give every row the block its next token goes to, preempting the last in order while there are too few."""
        while True:
            rows = self._running_rows()
            growing = rows[self.rows.length.take(rows) > self.rows.room.take(rows)]
            shared = [row for row in self._forked if self._writes_shared(row)] if self._forked else []
            if len(growing) + len(shared) <= self.pool.available:
                break
            changes.preempted.append(self._preempt(victim(self.running)))
        if len(growing):
            owners = [self._holder(row).label for row in growing.tolist()]
            self.rows.append_blocks(growing, self.pool.allocate_each(owners))
        changes.copies.extend(self._unshare(row) for row in shared if self._writes_shared(row))
        self._forked.clear()  # each now owns the block it writes next

    def _writes_shared(self, row: int) -> bool:
        at = int(self.rows.computed[row]) // self.config.block_size
        return at < self.rows.blocks[row] and self.pool.refs(int(self.rows.table[row, at])) > 1

    def _unshare(self, row: int) -> tuple[int, int]:
        at = int(self.rows.computed[row]) // self.config.block_size
        old = int(self.rows.table[row, at])
        (new,) = self.pool.allocate(1, self._holder(row).label)
        self.rows.table[row, at] = new
        self.pool.release([old])
        return old, new

    def _holder(self, row: int) -> Request:
        request = self._by_row[row]
        if request is None:
            raise InternalError(f"row {row} has no request; please report this")
        return request

    def _preempt(self, request: Request) -> Request:
        self._release(request)
        request.state = State.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=_ORDER)
        return request

    def restart(self) -> None:
        """Preempt all that runs, for a step that was scheduled and will never be updated."""
        for request in reversed(self.running.copy()):
            self._preempt(request)

    def _admit(
        self, left: int, scoring: _Scoring, rows: Int64, queries: Int32, changes: Changes
    ) -> tuple[Int64, Int32]:
        """Start waiting requests while rows, blocks and budget last; returns all rows and their shares."""
        chunks: list[int] = []
        passed: list[Request] = []
        for request in list(islice(self.waiting, _SCAN)):
            if not self.rows.num_free or left == 0:
                break
            if request.scored < request.score_to and not scoring.left:
                continue  # it waits for another's last logits, which nobody else needs to wait for
            chunk = self._start(request, left, scoring)
            if chunk:
                left -= chunk
                chunks.append(chunk)
                changes.admitted.append(request)
                for other in passed:
                    other.overtaken += 1
            else:
                passed.append(request)
            if any(other.overtaken >= self.config.max_overtakes for other in passed):
                break
        started = np.array([request.row for request in changes.admitted], np.int64)
        return np.concatenate([rows, started]), np.concatenate([queries, np.array(chunks, np.int32)])

    def _start(self, request: Request, left: int, scoring: _Scoring) -> int:
        """Give `request` a row and blocks for all it knows, and return its first chunk's length; 0: it does not fit."""
        config, length = self.config, len(request.tokens)
        hits = self._hits(request)
        computed = len(hits) * config.block_size
        chunk = scoring.chunk(min(length - computed, left), computed, request.scored, request.score_to)
        if not (config.chunked_prefill or chunk == length - computed or self._may_split(request, computed)):
            return 0
        need = -(-length // config.block_size) - len(hits)
        spare = int(config.watermark * self.pool.usable) + len(self.running) if self.running else 0
        if need + spare > self.pool.available - self.pool.count_cached(hits):
            return 0
        scoring.take(chunk, computed, request.scored, request.score_to)
        self.pool.acquire(hits, request.label)
        self.waiting.remove(request)
        self._run(request, hits + self.pool.allocate(need, request.label), computed)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = computed
        return chunk

    def _may_split(self, request: Request, computed: int) -> bool:
        """Without chunked prefill, chunks are for what is scored or grew past a whole step since its submission."""
        return request.scored < request.score_to or len(request.tokens) - computed > self.config.max_num_batched_tokens

    def _hits(self, request: Request) -> list[int]:
        """Cached blocks of its prefix, up to the first token whose logits are needed: at the latest the last one."""
        if not self.config.prefix_caching:
            return []
        size = self.config.block_size
        self._hash(request, request.tokens, len(request.tokens) // size)
        first = request.scored if request.scored < request.score_to else len(request.tokens) - 1
        return self.index.find(request.hashes, first // size)

    def _hash(self, request: Request, tokens: Int32, blocks: int) -> None:
        size, done = self.config.block_size, len(request.hashes)
        if blocks > done:
            self.index.extend(request.hashes, request.root, tokens[done * size : blocks * size].tobytes(), size * 4)

    def _run(self, request: Request, blocks: list[int], computed: int) -> None:
        self.rows.open(request, blocks, computed)
        request.state = State.RUNNING
        self._by_row[request.row] = request
        if request.scored < request.score_to or len(request.tokens) >= request.limit:
            self._scoring.add(request.row)
        insort(self.running, request, key=_ORDER)
        self._order = None

    def holders(self, step: Step) -> list[Request | None]:
        """Whose logits `step.sample` gives; None where the row has changed hands since."""
        current = self._current(step)[step.sample]
        return [
            self._by_row[row] if mine else None
            for row, mine in zip(step.sample_rows.tolist(), current.tolist(), strict=True)
        ]

    def owners(self, rows: Int64) -> list[Request]:
        """Who holds each of the table rows now."""
        return [self._holder(row) for row in rows.tolist()]

    def _current(self, step: Step) -> Mask:
        """Which of the step's rows still belong to whom they belonged to when it was scheduled."""
        current: Mask = self.rows.serial.take(step.index) == step.serials
        return current

    # -- update --------------------------------------------------------------------------------------------------------

    def update(self, step: Step, sampled: Int32) -> list[Request]:
        """`commit` and `append` in one."""
        self.commit(step)
        return self.append(step, sampled)

    def commit(self, step: Step) -> None:
        """Count what a computed step wrote. Rows that changed hands since `schedule` are left alone."""
        rows, ctx_len = step.index, step.batch.ctx_len
        current = self._current(step)
        if not current.all():
            rows, ctx_len = rows[current], ctx_len[current]
        self.rows.computed[rows] = ctx_len
        if self._scoring:
            scored = np.maximum(self.rows.scored.take(rows), ctx_len)
            self.rows.scored[rows] = np.minimum(scored, self.rows.score_to.take(rows))
        if self.config.prefix_caching:
            self._publish(rows, ctx_len)

    def append(
        self, step: Step, sampled: Int32, *, stopped: Mask | None = None, forks: Sequence[Request] = ()
    ) -> list[Request]:
        """Take in the ids [n + f] of `step.sample` and of `forks` made since `commit` (-1: no usable logits).

        `stopped` [n + f] marks ids that end their request for a reason of the caller's. Returns who finished.
        """
        rows, ids = step.sample_rows, np.asarray(sampled, np.int32)
        alive = self._current(step)[step.sample]
        if forks:
            rows = np.concatenate([rows, np.array([fork.row for fork in forks], np.int64)])
            alive = np.concatenate([alive, np.ones(len(forks), np.bool_)])
        stop = np.zeros(len(ids), np.bool_) if stopped is None else stopped
        finished = self._finish_scored() if self._scoring else []
        if not alive.all():
            rows, ids, stop = rows[alive], ids[alive], stop[alive]
        failed = ids < 0
        if failed.any():
            finished += [self.fail(self._holder(row)) for row in rows[failed].tolist()]
            rows, ids, stop = rows[~failed], ids[~failed], stop[~failed]
        return finished + self._append(rows, ids, stop)

    def _finish_scored(self) -> list[Request]:
        """End requests that wanted no token, once computed; forget the rows that have given all their logits."""
        rows, finished = self.rows, []
        for row in list(self._scoring):
            whole = rows.length[row] >= rows.limit[row]
            if whole and rows.computed[row] == rows.length[row]:
                request = self._holder(row)
                self._finish(request, Reason.LENGTH)
                finished.append(request)
            elif not whole and rows.scored[row] >= rows.score_to[row]:
                self._scoring.discard(row)
        return finished

    def _publish(self, rows: Int64, ctx_len: Int32) -> None:
        """Make the blocks that became full and written findable."""
        full = ctx_len // self.config.block_size
        grown = (full > self.rows.published.take(rows)).nonzero()[0]
        if not len(grown):
            return
        rows, full = rows[grown], full[grown]
        first = self.rows.published.take(rows)
        last = self.rows.blocks_at(rows, full - 1).tolist()
        for row, start, stop, block in zip(rows.tolist(), first.tolist(), full.tolist(), last, strict=True):
            request = self._holder(row)
            self._hash(request, self.rows.tokens[row], stop)
            if stop - start > 1:
                for at, earlier in enumerate(self.rows.table[row, start : stop - 1].tolist(), start):
                    self.index.insert(request.hashes[at], earlier)
            self.index.insert(request.hashes[stop - 1], block)
        self.rows.published[rows] = full

    def _append(self, rows: Int64, ids: Int32, stopped: Mask) -> list[Request]:
        length = self.rows.append_tokens(rows, ids)
        stopped = stopped | self.rows.ends(rows, ids)
        full = length >= self.rows.limit.take(rows)
        finished = []
        for at in (stopped | full).nonzero()[0].tolist():
            request = self._holder(int(rows[at]))
            self._finish(request, Reason.STOP if stopped[at] else Reason.LENGTH)
            finished.append(request)
        return finished

    def fail(self, request: Request) -> Request:
        """End a running request whose logits are unusable, and let nobody find what it wrote."""
        self._unpublish(request)
        self._finish(request, Reason.ERROR)
        return request

    def _unpublish(self, request: Request) -> None:
        """What gave no usable logits may be stored as such: nobody else is to find it."""
        for block in self.rows.held(request.row):
            if self.pool.refs(block) == 1 and self.index.holds(block):
                self.index.forget(block)

    def _finish(self, request: Request, reason: Reason) -> None:
        if request.state is State.WAITING:
            self.waiting.remove(request)
        else:
            self._release(request)
        request.state, request.reason = State.FINISHED, reason

    def _release(self, request: Request) -> None:
        """The one way out of a row. Blocks go back last one first, so that leaves are evicted before their parents."""
        row = request.row
        self.running.remove(request)
        self._forked.discard(row)
        self._scoring.discard(row)
        self._by_row[row] = None
        self._order = None
        self.pool.release(reversed(self.rows.close(request)))

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Raise `InternalError` naming the request that left blocks behind; only when `idle`."""
        if self.pool.num_used:
            raise InternalError(f"idle, but blocks are still held: {self.pool.leaks()}; please report this")

    def check(self) -> None:
        """Compare every reference with the tables; slow, for tests and for hunting a leak."""
        held: dict[int, int] = {}
        for request in self.running:
            for block in self.rows.held(request.row):
                held[block] = held.get(block, 0) + 1
        self.pool.check(held)

    def reset_prefix_cache(self) -> int:
        """Forget what nobody references; returns how many blocks that were. Needed after a change of weights."""
        return self.pool.forget_cached()


@dataclass(slots=True)
class _Scoring:
    """How many more logits of prompt positions fit one step, and what that leaves of a chunk.

    positions   |-- computed --|........|-- still wanted --|....
                               | first  |<= scored         |<= score_to
    """

    left: int

    def chunk(self, chunk: int, computed: int, scored: int, score_to: int) -> int:
        """The longest part of a chunk from position `computed` on that wants at most `left` logits."""
        first = max(computed, scored)
        return first + self.left - computed if min(computed + chunk, score_to) - first > self.left else chunk

    def take(self, chunk: int, computed: int, scored: int, score_to: int) -> None:
        """Count the logits that a chunk wants."""
        self.left -= max(0, min(computed + chunk, score_to) - max(computed, scored))

    def fit(self, need: Int32, computed: Int32, scored: Int32, score_to: Int32) -> Int32:
        """`need` [n] of running rows, shortened where more logits are wanted than are left."""
        fitted = need.copy()
        for at in (scored < score_to).nonzero()[0].tolist():
            row = int(computed[at]), int(scored[at]), int(score_to[at])
            fitted[at] = self.chunk(int(need[at]), *row)
            self.take(int(fitted[at]), *row)
        return fitted


def budget(need: Int32, config: SchedulerConfig) -> tuple[Int32, int]:
    """Share one step's tokens among rows that still `need` some, in order: single tokens first, then chunks.

    Returns the tokens of each row and what is left over.
    """
    queries = np.where(need == 1, 1, 0).astype(np.int32)
    left = config.max_num_batched_tokens - int(queries.sum())
    for at in np.flatnonzero(need > 1).tolist():
        queries[at] = min(int(need[at]), left)
        left -= int(queries[at])
    return queries, left


def victim(running: Sequence[Request]) -> Request:
    """Whom to preempt: the last in order, never the only one."""
    if len(running) < 2:
        raise InternalError("the only running request does not fit, although capacity was checked; please report this")
    return running[-1]


def _too_long(prompt_len: int, max_tokens: int | None, config: SchedulerConfig, pool: BlockPool) -> str:
    asked = f"prompt of {prompt_len} tokens" + ("" if max_tokens is None else f" + max_tokens={max_tokens}")
    room = pool.usable * config.block_size + 1
    if room < config.max_model_len:
        limit = f"the cache holds {room} ({pool.usable} blocks of {config.block_size})"
        advice = "raise num_blocks or kv_cache_memory"
    else:
        limit = f"max_model_len is {config.max_model_len}"
        advice = "raise max_model_len if the model allows it"
    lower = "shorten the prompt" if max_tokens is None else "lower max_tokens or shorten the prompt"
    return f"{asked} can never fit: {limit}; {lower}, or {advice}"
