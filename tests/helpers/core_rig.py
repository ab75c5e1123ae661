"""A scheduler with a pretend device: memory is a dict of slots, the model a hash of the tokens so far.

Each slot remembers which token prefix its keys and values belong to. A step checks, for every row and every visible
position, that the slot it would read holds exactly the prefix the row believes in; so stale, shared, half-written or
wrongly copied blocks show at once. The next token is a function of the prefix alone, so `solo` is an oracle.
"""

from __future__ import annotations

import hashlib

import numpy as np

from pagedkv.core.price import Price
from pagedkv.core.request import Request, State, pack
from pagedkv.core.scheduler import Scheduler, SchedulerConfig
from pagedkv.core.step import Step
from pagedkv.core.tiers import HostMemory, Transfer

VOCAB = 5
Prefix = tuple[bytes, tuple[int, ...]]


def next_token(salt: bytes, tokens: tuple[int, ...]) -> int:
    return hashlib.sha256(salt + bytes(tokens)).digest()[0] % VOCAB


def solo(
    prompt: list[int], max_tokens: int, end_ids: tuple[int, ...] = (), salt: bytes = b"", sample: int = 0
) -> list[int]:
    """`sample` 1, 2, ... begin with another token than 0."""
    tokens = list(prompt)
    for at in range(max_tokens):
        tokens.append((next_token(salt, tuple(tokens)) + (sample if at == 0 else 0)) % VOCAB)
        if tokens[-1] in end_ids:
            break
    return tokens[len(prompt) :]


class Rig:
    def __init__(
        self,
        host_blocks: int | None = None,
        host_caching: bool = True,
        host_pool: int = 3,
        mode: str = "swap",
        **settings: object,
    ) -> None:
        """`host_blocks`: how much host memory there is, made `host_pool` blocks at a time; None for none at all."""
        defaults: dict[str, object] = {
            "num_blocks": 9,
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
        }
        self.config = SchedulerConfig(**(defaults | settings))  # type: ignore[arg-type]
        self._host_left, self._host_pool = host_blocks or 0, host_pool
        memory = None if host_blocks is None else HostMemory(more=self._more_host, caching=host_caching)
        self.scheduler = Scheduler(self.config, memory=memory, price=Price(block_bytes=1, mode=mode))
        self.memory: dict[int, Prefix] = {}
        self.host: dict[int, Prefix] = {}
        """The same slots of host blocks."""
        self.moving: dict[Transfer, list[tuple[int, Prefix | None]] | None] = {}
        """Transfers under way: what was read already, for those that read early."""
        self.finished: list[Request] = []
        self.steps: list[Step] = []
        self.samples: dict[int, int] = {}
        """How many samples a request is to become, by id; its forks' own numbers when they are made."""
        self.forks: dict[int, list[Request]] = {}
        self.numbers: dict[int, int] = {}
        self.scored: dict[int, list[int]] = {}

    def add(self, prompt: list[int], max_tokens: int | None = 3, **names: object) -> Request:
        return self.scheduler.add(pack(prompt), max_tokens=max_tokens, **names)  # type: ignore[arg-type]

    def _more_host(self) -> int:
        made = min(self._host_pool, self._host_left)
        self._host_left -= made
        return made

    def step(self, land: bool = True) -> Step | None:
        """`land`: whatever was on its way before this step arrives."""
        step = self.schedule(land)
        if step is not None:
            self.compute(step)
        return step

    def schedule(self, land: bool = True) -> Step | None:
        if land:
            self.land(*self.moving)
        step = self.scheduler.schedule()
        self._begin_all()
        if step is None and not land and self.moving:
            self.land(next(iter(self.moving)))
        return step

    def _begin_all(self) -> None:
        while self.scheduler.tiers.outbox:
            self._begin(self.scheduler.tiers.outbox.popleft())

    def _begin(self, transfer: Transfer) -> None:
        """Every second transfer reads now, the others when they land; what they write is garbage until then."""
        if not transfer.to_host:
            for block in transfer.device_blocks:
                self._poison(self.memory, block)
        else:
            for block in transfer.host_blocks:
                self._poison(self.host, block)
        self.moving[transfer] = self._read_blocks(transfer) if len(self.moving) % 2 else None

    def _poison(self, memory: dict[int, Prefix], block: int) -> None:
        for slot in range(block * self.config.block_size, (block + 1) * self.config.block_size):
            memory[slot] = (b"poison", ())

    def _read_blocks(self, transfer: Transfer) -> list[tuple[int, Prefix | None]]:
        source, size = self.memory if transfer.to_host else self.host, self.config.block_size
        return [
            (to * size + offset, source.get(at * size + offset))
            for at, to in transfer.pairs.tolist()
            for offset in range(size)
        ]

    def land(self, *transfers: Transfer) -> None:
        for transfer in transfers:
            read = self.moving.pop(transfer)
            target = self.host if transfer.to_host else self.memory
            for slot, held in self._read_blocks(transfer) if read is None else read:
                if held is not None:
                    target[slot] = held
            self.scheduler.landed(transfer)

    def compute(self, step: Step, between: object = None) -> None:
        batch = step.batch
        assert batch.num_tokens <= self.config.max_num_batched_tokens
        assert batch.num_seqs <= self.config.max_num_seqs
        self._copy(step.copies)
        holders = [self.scheduler._by_row[row] for row in batch.rows.tolist()]
        known = [tuple(self.scheduler.tokens_of(request).tolist()) for request in holders]
        written = []
        for at, request in enumerate(holders):
            for j in range(batch.cu_q[at], batch.cu_q[at + 1]):
                p, slot = int(step.positions[j]), int(batch.slots[j])
                assert step.input_ids[j] == known[at][p]
                assert slot >= self.config.block_size, "the null block is never written"
                self.memory[slot] = (request.salt, known[at][: p + 1])
                written.append(slot)
        assert len(set(written)) == len(written), "two tokens of one step share a slot"
        for at, request in enumerate(holders):
            self._read(batch.block_table[batch.rows[at]], int(batch.ctx_len[at]), request.salt, known[at])
        for at in step.scored.tolist():
            owner = holders[int(np.searchsorted(batch.cu_q, at, side="right")) - 1]
            self.scored.setdefault(owner.id, []).append(int(step.positions[at]))
        assert len(step.scored) <= self.config.max_scored
        assert len(step.logits_at) == len(step.sample) + len(step.scored)
        assert [self.scheduler._by_row[row] for row in step.scored_rows] == [
            holders[int(np.searchsorted(batch.cu_q, at, side="right")) - 1] for at in step.scored
        ]
        if callable(between):
            between()
        self.scheduler.commit(step)
        producers = self.scheduler.holders(step)
        forks = [child for parent in producers if parent is not None for child in self._fork(parent)]
        sampled = [-1 if request is None else self._next(request) for request in [*producers, *forks]]
        self.finished += self.scheduler.append(step, np.array(sampled, np.int32), forks=forks)
        self._begin_all()
        self.steps.append(step)

    def _fork(self, parent: Request) -> list[Request]:
        """Make the samples that were asked for; those that found a row."""
        count = self.samples.pop(parent.id, 1)
        children = [self.scheduler.fork(parent) for _ in range(1, count)]
        for number, child in enumerate(children, start=1):
            self.numbers[child.id] = number
            self.forks.setdefault(parent.id, []).append(child)
        return [child for child in children if child.row]

    def _next(self, request: Request) -> int:
        tokens = tuple(self.scheduler.tokens_of(request).tolist())
        first = len(tokens) == request.prompt_len
        return (next_token(request.salt, tokens) + (self.numbers.get(request.id, 0) if first else 0)) % VOCAB

    def _copy(self, copies: np.ndarray) -> None:
        size = self.config.block_size
        for source, destination in copies.tolist():
            for offset in range(size):
                held = self.memory.get(source * size + offset)
                if held is not None:
                    self.memory[destination * size + offset] = held

    def _read(self, blocks: np.ndarray, context: int, salt: bytes, tokens: tuple[int, ...]) -> None:
        size = self.config.block_size
        for p in range(context):
            assert self.memory[int(blocks[p // size]) * size + p % size] == (salt, tokens[: p + 1])

    def drain(self, most: int = 10_000) -> None:
        for _ in range(most):
            if self.scheduler.idle:
                break
            self.step()
            self.scheduler.check()
        while self.moving:  # what is cached may still be on its way to the host
            self.land(*self.moving)
            self.scheduler.check()
        assert self.scheduler.idle, f"still {self.scheduler.running} running"
        self.scheduler.check_idle()
        pool = self.scheduler.pool
        assert pool.num_used == 0
        assert pool.available == self.config.num_blocks - 1
        assert self.scheduler.rows.num_free == self.config.max_num_seqs
        assert self.scheduler.tiers.host.num_used == 0

    def run(self, prompt: list[int], max_tokens: int | None = 3, **names: object) -> Request:
        request = self.add(prompt, max_tokens, **names)
        self.drain()
        assert request.state is State.FINISHED
        return request
