"""A scheduler with a pretend device: memory is a dict of slots, the model a hash of the tokens so far.

Each slot remembers which token prefix its keys and values belong to. A step checks, for every row and every visible
position, that the slot it would read holds exactly the prefix the row believes in; so stale, shared, half-written or
wrongly copied blocks show at once. The next token is a function of the prefix alone, so `solo` is an oracle.
"""

from __future__ import annotations

import hashlib

import numpy as np

from pagedkv.core.request import Request, State, pack
from pagedkv.core.scheduler import Scheduler, SchedulerConfig
from pagedkv.core.step import Step

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
    def __init__(self, **settings: object) -> None:
        defaults: dict[str, object] = {
            "num_blocks": 9,
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 64,
        }
        self.config = SchedulerConfig(**(defaults | settings))  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config)
        self.memory: dict[int, Prefix] = {}
        self.finished: list[Request] = []
        self.steps: list[Step] = []
        self.samples: dict[int, int] = {}
        """How many samples a request is to become, by id; its forks' own numbers when they are made."""
        self.forks: dict[int, list[Request]] = {}
        self.numbers: dict[int, int] = {}
        self.scored: dict[int, list[int]] = {}

    def add(self, prompt: list[int], max_tokens: int | None = 3, **names: object) -> Request:
        return self.scheduler.add(pack(prompt), max_tokens=max_tokens, **names)  # type: ignore[arg-type]

    def step(self) -> Step | None:
        step = self.scheduler.schedule()
        if step is not None:
            self.compute(step)
        return step

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
        assert self.scheduler.idle, f"still {self.scheduler.running} running"
        self.scheduler.check_idle()
        pool = self.scheduler.pool
        assert pool.num_used == 0
        assert pool.available == self.config.num_blocks - 1
        assert self.scheduler.rows.num_free == self.config.max_num_seqs

    def run(self, prompt: list[int], max_tokens: int | None = 3, **names: object) -> Request:
        request = self.add(prompt, max_tokens, **names)
        self.drain()
        assert request.state is State.FINISHED
        return request
