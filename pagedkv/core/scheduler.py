"""Who computes which tokens in the next step: one token budget, no phases.

    schedule()   order the running, share the budget among rows, preempt if blocks run out, admit from the queue
       |
     Step        numpy arrays of one batch; the engine computes it
       |
    commit()     counts what is written, publishes full blocks
    append()     takes in the sampled ids, finishes requests

Decoding rows come first, then prompts in chunks. Order is (priority, arrival). A request that does not fit yet may
be overtaken by `max_overtakes` later ones, then everybody waits for it. When a row must grow and no block is left, the
last in order is preempted: its blocks are copied to host memory, or given back and computed again later, whichever is
cheaper; its tokens are kept. The first in order is never preempted, so somebody always makes progress; `capacity`
refuses at submission what could not finish even alone.

Copies run beside compute. A row that needs a block which is still being copied out sits out a step, the others go on;
a sequence whose blocks are on their way in joins when they are there. Swapped ones come back before new ones start.
Who was preempted `max_preemptions` times starts only where all that runs fits to its end: it is never preempted again.

Logits of prompt positions are wanted by few and are large, so a step gives at most `max_scored` of them, and prompts
that want them come in smaller chunks. They hit the cache only up to the first whose logits are still to be given.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from pagedkv.api.errors import InternalError, RequestInvalid, RequestTooLong
from pagedkv.api.records import Int32, Int64
from pagedkv.core.block_pool import BlockPool
from pagedkv.core.budget import Scoring, budget, too_long
from pagedkv.core.prefix_index import PrefixIndex
from pagedkv.core.price import Price
from pagedkv.core.request import Reason, Request, State
from pagedkv.core.rows import Rows
from pagedkv.core.step import Changes, Step, compose
from pagedkv.core.tiers import HostMemory, Tiers, Transfer

Mask = npt.NDArray[np.bool_]

_ORDER = attrgetter("order")
_SCAN = 32  # waiting requests looked at in one step
MAX_SCORED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and policy. `num_blocks` counts the null block; `watermark` blocks stay free of admissions.

    `max_scored` logits are given in one step beside those of sampled tokens. `max_preemptions` are the most that a
    request can suffer.
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
    max_preemptions: int = 4


class Scheduler:
    """The core's state and its transitions: `add`, `schedule`, `commit`, `append`, `abort`, `fork`, `landed`.

    With `memory`, blocks go to the host and come back: whoever runs the steps begins the transfers of `tiers.outbox`
    after each `schedule`, before the step's work, and after `append`, and tells of each that has arrived by `landed`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        fingerprint: bytes = b"",
        index: PrefixIndex | None = None,
        memory: HostMemory | None = None,
        price: Price | None = None,
    ) -> None:
        self.config = config
        self.index = PrefixIndex(fingerprint) if index is None else index
        self.tiers = Tiers(config.num_blocks, self.index, memory)
        self.pool: BlockPool = self.tiers.device
        self.price = price or Price(block_bytes=1)
        self.rows = Rows(config.max_num_seqs, config.max_model_len, config.block_size)
        self.waiting: list[Request] = []
        self.swapped: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = self.num_swaps = self.num_recomputed_tokens = 0
        self._arriving: dict[Transfer, Request] = {}
        self._departing: dict[Transfer, Request] = {}
        self._changes = Changes()  # since the last step
        self._ahead = 2 * -(-config.max_num_batched_tokens // config.block_size)
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
            raise RequestTooLong(
                too_long(prompt_len, max_tokens, config.max_model_len, self.pool.usable, config.block_size),
                needed=total,
                available=capacity,
            )
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
        wanted: range = range(0),
    ) -> Request:
        """Queue a prompt. Raises `RequestInvalid` or `RequestTooLong`, and then nothing has changed.

        `wanted`: the steps give the logits of these prompt positions (or whatever the computation ends in), each once
        and in order. `max_tokens` 0 ends the request when its prompt has been computed.
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
            scored=wanted.start,
            score_to=wanted.stop,
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
        if self.rows.num_free and self._decoding(parent) and self._roomy(child):
            blocks = self.rows.held(parent.row)
            self.pool.acquire(blocks, child.label)
            self._run(child, blocks, int(self.rows.computed[parent.row]))
            self._forked |= {parent.row, child.row}
        else:
            insort(self.waiting, child, key=_ORDER)
        return child

    def _decoding(self, request: Request) -> bool:
        row = request.row
        return request.state is State.RUNNING and bool(self.rows.length[row] - self.rows.computed[row] <= 1)

    def tokens_of(self, request: Request) -> Int32:
        """Prompt and output ids known so far; a view while the request runs."""
        if request.row == 0:
            return request.tokens
        return self.rows.tokens[request.row, : self.rows.length[request.row]]

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not (self.waiting or self.swapped or self.loading or self.running)

    # -- schedule ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Choose the next step's work, or None when there is none."""
        changes = self._changes
        before = self.num_preemptions
        rows = self._grow(changes)
        need = self.rows.length.take(rows) - self.rows.computed.take(rows)
        coming = self.swapped or self.waiting
        if len(rows) and not self._scoring and (need == 1).all() and not (coming and self.rows.num_free):
            step: Step | None = compose(self.rows, rows, None, changes)
        else:
            step = self._share(rows, need, changes, self.num_preemptions > before)
        if step is not None:
            self._changes = Changes()
        self.tiers.save_oldest(self._ahead)
        return step

    def _share(self, rows: Int64, need: Int32, changes: Changes, preempted: bool) -> Step | None:
        """The step where rows need different numbers of tokens, or some may start."""
        scoring = Scoring(left=self.config.max_scored)
        if self._scoring:
            need = scoring.fit(need, *(values.take(rows) for values in self._wanted))
        queries, left = budget(need, self.config.max_num_batched_tokens)
        if not preempted:
            rows, queries = self._admit(left, scoring, rows, queries, changes)
        active = queries > 0
        if not active.any():
            self._check_nothing_left(preempted)
            return None
        return compose(self.rows, rows[active], queries[active], changes)

    def _check_nothing_left(self, preempted: bool) -> None:
        left = self.running or self.loading or self.swapped or self.waiting
        if self.running or (left and not preempted):
            if self.tiers.moving:
                return  # what is on its way will let them go on
            names = [request.label for request in left[:4]]
            raise InternalError(f"nothing can be scheduled, but {names} wait; please report this")

    @property
    def _wanted(self) -> tuple[Int32, Int32, Int32]:
        return self.rows.computed, self.rows.scored, self.rows.score_to

    def _running_rows(self) -> Int64:
        if self._order is None:
            self._order = np.array([request.row for request in self.running], np.int64)
        return self._order

    def _grow(self, changes: Changes) -> Int64:
        """Give every row the block its next token goes to, preempting the last in order while there are too few.

        Returns the rows that have it: all, unless some wait for blocks that are being copied out.
        """
        while True:
            rows = self._running_rows()
            grows = self.rows.length.take(rows) > self.rows.room.take(rows)
            growing = rows[grows]
            shared = [row for row in self._forked if self._writes_shared(row)] if self._forked else []
            short = len(growing) + len(shared) - self.pool.available
            if short <= 0:
                break
            if self.tiers.moving and (len(self.running) < 2 or short <= self._coming(shared)):
                return self._grow_some(rows, grows, shared, changes)
            changes.preempted.append(self._preempt(victim(self.running)))
        self._give(growing)
        changes.copies.extend(self._unshare(row) for row in shared if self._writes_shared(row))
        self._forked.clear()  # each now owns the block it writes next
        return rows

    def _coming(self, shared: list[int]) -> int:
        """Blocks that landings give back, and `shared` ones that then belong to one row alone."""
        moving, refs = self.tiers.moving_refs(), self.pool.refs
        own = sum(moving[block] > 0 and refs(block) - moving[block] == 1 for block in map(self._written_next, shared))
        return self.tiers.in_transit()[0] + own

    def _grow_some(self, rows: Int64, grows: Mask, shared: list[int], changes: Changes) -> Int64:
        """The first in order get what is available, the others sit this step out."""
        served = np.ones(len(rows), np.bool_)
        for at, row in enumerate(rows.tolist()):
            copies = row in shared and self._writes_shared(row)
            served[at] = not (grows[at] or copies) or self.pool.available > 0
            if not served[at]:
                continue
            if grows[at]:
                self._give(rows[at : at + 1])
            elif copies:
                changes.copies.append(self._unshare(row))
            self._forked.discard(row)
        return rows[served]

    def _give(self, rows: Int64) -> None:
        """One more block to each of `rows`."""
        if len(rows):
            owners = [self._holder(row).label for row in rows.tolist()]
            self.rows.append_blocks(rows, self.pool.allocate_each(owners))

    def _writes_shared(self, row: int) -> bool:
        at = int(self.rows.computed[row]) // self.config.block_size
        return at < self.rows.blocks[row] and self.pool.refs(self._written_next(row)) > 1

    def _written_next(self, row: int) -> int:
        return int(self.rows.table[row, int(self.rows.computed[row]) // self.config.block_size])

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
        """Take its row and blocks from a running request; what it computed is saved, or lost."""
        request.num_preemptions += 1
        self.num_preemptions += 1
        transfer = self._save(request)
        if not request.saved:
            self._start_over(request)
            return request
        request.num_swaps += 1
        self.num_swaps += 1
        if transfer is not None:
            self._departing[transfer] = request
        self._release(request)
        request.state = State.SWAPPED
        insort(self.swapped, request, key=_ORDER)
        return request

    def _start_over(self, request: Request) -> None:
        """Let a request wait that holds a row or saved blocks: it is computed again."""
        if request.state is State.SWAPPED:
            request.lost = request.saved_len
            self.swapped.remove(request)
        else:
            request.lost = int(self.rows.computed[request.row])
            self._release(request)
        self._drop_saved(request)
        request.state = State.WAITING
        insort(self.waiting, request, key=_ORDER)

    def _save(self, request: Request) -> Transfer | None:
        """Copy what `request` has computed to the host, if that is cheaper than to compute it again, and if it fits."""
        size, computed = self.config.block_size, int(self.rows.computed[request.row])
        count = -(-computed // size)
        if not self.tiers.swapping or not count or not self.price.swaps(count, computed):
            return None
        blocks = self.rows.held(request.row)[:count]
        sent = len(self.tiers.outbox)
        saved = self.tiers.save(blocks, self._digests(request, computed), request.label)
        request.saved, request.saved_len = saved or [], computed if saved else 0
        return self.tiers.outbox[-1] if len(self.tiers.outbox) > sent else None

    def _digests(self, request: Request, computed: int) -> list[bytes | None]:
        """What the blocks of the first `computed` tokens are found by: full ones only, and with prefix caching."""
        full, count = computed // self.config.block_size, -(-computed // self.config.block_size)
        if not self.config.prefix_caching:
            return [None] * count
        self._hash(request, self.tokens_of(request), full)
        return [*request.hashes[:full], *[None] * (count - full)]

    def _drop_saved(self, request: Request) -> None:
        self.tiers.drop(request.saved)
        request.saved, request.saved_len = [], 0

    def landed(self, transfer: Transfer) -> None:
        """A transfer's bytes are where they should be, for all work enqueued from now on."""
        self.tiers.land(transfer)
        self._departing.pop(transfer, None)
        request = self._arriving.pop(transfer, None)
        if request is not None and request.state is State.LOADING:
            self.loading.remove(request)
            self._drop_saved(request)
            self._join(request)

    def restart(self) -> None:
        """Let all that runs start over, for a step that was scheduled and will never be updated."""
        for request in reversed(self.running.copy()):
            self._start_over(request)
        self._changes = Changes(admitted=self.loading.copy())

    def flush(self) -> None:
        """Compute everything anew, as after a change of weights: nothing stored counts any more, on either level."""
        for request in (*self.running, *self.loading, *self.swapped):
            self._start_over(request)
        self._changes = Changes()
        self.tiers.forget_all()

    def _admit(self, left: int, scoring: Scoring, rows: Int64, queries: Int32, changes: Changes) -> tuple[Int64, Int32]:
        """Start what is swapped or waits while rows, blocks and budget last; returns all rows and their shares."""
        chunks: list[int] = []
        started: list[int] = []
        passed: list[Request] = []
        for request in [*self._returning(), *islice(self.waiting, _SCAN)]:
            back = request.state is State.SWAPPED
            if not self.rows.num_free or (left == 0 and not back):
                break
            if request.scored < request.score_to and not scoring.left and not back:
                continue  # it waits for another's last logits, which nobody else needs to wait for
            chunk = self._start(request, left, scoring)
            if chunk is None and back:
                break  # nobody starts before it
            if chunk is None:
                passed.append(request)
            else:
                changes.admitted.append(request)
                for other in passed:
                    other.overtaken += 1
            if chunk:
                left -= chunk
                chunks.append(chunk)
                started.append(request.row)
            if any(other.overtaken >= self.config.max_overtakes for other in passed):
                break
        all_rows = np.concatenate([rows, np.array(started, np.int64)])
        return all_rows, np.concatenate([queries, np.array(chunks, np.int32)])

    def _returning(self) -> list[Request]:
        """Swapped requests whose blocks are all in host memory, or on the device still."""
        leaving = set(map(id, self._departing.values()))
        return [request for request in self.swapped if id(request) not in leaving]

    def _start(self, request: Request, left: int, scoring: Scoring) -> int | None:
        """Give `request` a row and blocks for all it knows, and return its first chunk's length.

        0: its blocks are on their way from the host. None: it does not fit.
        """
        config, length = self.config, len(request.tokens)
        blocks, fetched = self._find(request)
        computed = request.saved_len or len(blocks) * config.block_size
        chunk = scoring.chunk(min(length - computed, left), computed, request.scored, request.score_to)
        whole = chunk == length - computed or self._may_split(request, computed)
        if not (config.chunked_prefill or fetched or request.saved or whole) or not self._roomy(request):
            return None
        hits = [block for block in blocks if block]
        need = -(-length // config.block_size) - len(hits)
        others = len(self.running) + len(self.loading)
        spare = int(config.watermark * self.pool.usable) + others if others else 0
        if need + spare > self.pool.available - self.pool.count_cached(hits):
            return None
        self.pool.acquire(hits, request.label)
        new = iter(self.pool.allocate(need, request.label))
        blocks = [block or next(new) for block in blocks] + list(new)
        self._count_hits(request, computed, len(fetched))
        (self.swapped if request.state is State.SWAPPED else self.waiting).remove(request)
        if fetched:
            self._load(request, blocks, fetched, computed)
            return 0
        self._drop_saved(request)  # all of it was found on the device
        scoring.take(chunk, computed, request.scored, request.score_to)
        self._run(request, blocks, computed)
        return chunk

    def _roomy(self, request: Request) -> bool:
        """Whether `request` may run beside those that must not be preempted again: then all must fit to their ends."""
        most, others = self.config.max_preemptions, [*self.running, *self.loading]
        if all(each.num_preemptions < most for each in (request, *others)):
            return True
        return sum(map(self._most_blocks, (request, *others))) <= self.pool.usable

    def _most_blocks(self, request: Request) -> int:
        """Blocks at its longest; the last token is stored only where it is one of the prompt's."""
        return -(-max(request.limit - 1, request.prompt_len) // self.config.block_size)

    def _count_hits(self, request: Request, computed: int, fetched: int) -> None:
        self.num_recomputed_tokens += max(0, request.lost - computed)
        request.lost = 0
        if request.num_cached_tokens is None:
            request.num_cached_tokens = computed
            request.num_host_cached_tokens = fetched * self.config.block_size

    def _load(self, request: Request, blocks: list[int], fetched: list[tuple[int, int]], computed: int) -> None:
        """Open a row whose blocks come from the host; it runs once they are there."""
        self.rows.open(request, blocks, computed)
        self._by_row[request.row] = request
        request.state = State.LOADING
        insort(self.loading, request, key=_ORDER)
        digests = self._digests(request, computed)
        moves = [(host, blocks[at], digests[at]) for at, host in fetched]
        self._arriving[self.tiers.fetch(moves, request.label)] = request

    def _may_split(self, request: Request, computed: int) -> bool:
        """Without chunked prefill, chunks are for what is scored or grew past a whole step since its submission."""
        return request.scored < request.score_to or len(request.tokens) - computed > self.config.max_num_batched_tokens

    def _find(self, request: Request) -> tuple[list[int], list[tuple[int, int]]]:
        """The blocks that hold its first tokens, 0 where one lies in host memory; and those, as (place, host block).

        What was saved, or else cached blocks of what it knows, up to the first token whose logits are needed: at the
        latest the last one.
        """
        size, index = self.config.block_size, self.index
        if request.saved:
            digests = self._digests(request, request.saved_len)
            found = [(index.get(digest) if digest else None) or 0 for digest in digests]
            return found, [(at, host) for at, host in enumerate(request.saved) if not found[at]]
        if not self.config.prefix_caching:
            return [], []
        self._hash(request, request.tokens, len(request.tokens) // size)
        first = request.scored if request.scored < request.score_to else len(request.tokens) - 1
        hits = index.find(request.hashes, first // size)
        return self._find_behind(request, hits, first // size) if self.tiers.caching else (hits, [])

    def _find_behind(self, request: Request, hits: list[int], most: int) -> tuple[list[int], list[tuple[int, int]]]:
        """What host memory adds to the first blocks found on the device, if fetching it is worth while."""
        found, fetched = list(hits), []
        for at in range(len(hits), most):
            block, host = self.index.get(request.hashes[at]), self.tiers.host_index.get(request.hashes[at])
            if block is None and host is None:
                break
            found.append(block or 0)
            if block is None and host is not None:
                fetched.append((at, host))
        if fetched and not self.price.fetches(len(fetched), (len(found) - len(hits)) * self.config.block_size):
            return hits, []
        return found, fetched

    def _hash(self, request: Request, tokens: Int32, blocks: int) -> None:
        size, done = self.config.block_size, len(request.hashes)
        if blocks > done:
            self.index.extend(request.hashes, request.root, tokens[done * size : blocks * size].tobytes(), size * 4)

    def _run(self, request: Request, blocks: list[int], computed: int) -> None:
        self.rows.open(request, blocks, computed)
        self._by_row[request.row] = request
        self._join(request)

    def _join(self, request: Request) -> None:
        """Let a request whose first tokens are all there take part in the next step."""
        request.state = State.RUNNING
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
        finished += self._append(rows, ids, stop)
        if finished:
            self.tiers.save_oldest(self._ahead)  # what they leave in the cache, before the next one needs its blocks
        return finished

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
        held, moving = self.rows.held(request.row), self.tiers.moving_refs()
        own = [at for at, block in enumerate(held) if self.pool.refs(block) - moving[block] == 1]
        for at in own:
            if self.index.holds(held[at]):
                self.index.forget(held[at])
        self.tiers.forget([request.hashes[at] for at in own if at < len(request.hashes)])

    def _finish(self, request: Request, reason: Reason) -> None:
        if request.state in (State.WAITING, State.SWAPPED):
            (self.waiting if request.state is State.WAITING else self.swapped).remove(request)
        else:
            self._release(request)
        self._drop_saved(request)
        request.state, request.reason = State.FINISHED, reason

    def _release(self, request: Request) -> None:
        """The one way out of a row. Blocks go back last one first, so that leaves are evicted before their parents."""
        row = request.row
        if request.state is State.LOADING:
            self.loading.remove(request)
            self._arriving = {transfer: whose for transfer, whose in self._arriving.items() if whose is not request}
        else:
            self.running.remove(request)
        self._forked.discard(row)
        self._scoring.discard(row)
        self._by_row[row] = None
        self._order = None
        self.pool.release(reversed(self.rows.close(request)))

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_idle(self) -> None:
        """Raise `InternalError` naming the request that left blocks behind; only when `idle`."""
        if self.pool.num_used and not self.tiers.moving:
            raise InternalError(f"idle, but blocks are still held: {self.pool.leaks()}; please report this")

    def check(self) -> None:
        """Compare every reference with the tables; slow, for tests and for hunting a leak."""
        held = Counter(block for request in (*self.running, *self.loading) for block in self.rows.held(request.row))
        saved = Counter(block for request in (*self.swapped, *self.loading) for block in request.saved)
        self.tiers.check(held, saved)

    def reset_prefix_cache(self) -> int:
        """Forget what nobody references, on the device and in host memory; returns how many blocks that were."""
        return self.tiers.forget_all()


def victim(running: Sequence[Request]) -> Request:
    """Whom to preempt: the last in order, never the only one."""
    if len(running) < 2:
        raise InternalError("the only running request does not fit, although capacity was checked; please report this")
    return running[-1]
