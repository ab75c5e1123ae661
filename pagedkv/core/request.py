"""One request on its way through the scheduler."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from pagedkv.api.records import Int32


class State(enum.Enum):
    """Where a request is. Preempted ones wait again or lie in host memory; loading ones have blocks on their way."""

    WAITING = "waiting"
    SWAPPED = "swapped"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class Reason(enum.Enum):
    """Why a request finished."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A prompt and what became of it. `id` is unique in the engine; `label` is only what the caller calls it.

    `tokens` are prompt and output ids while the request holds no row; a running request's are in its row.
    `limit` is the total length, prompt included, at which it ends. Lower `priority` runs first. Logits of positions
    `scored` .. `score_to` - 1 are still wanted. `saved` are the host blocks that hold the first `saved_len` tokens of a
    swapped one; `lost` counts tokens to be computed once more. `num_cached_tokens` were found in a cache when it
    started first, `num_host_cached_tokens` of them in host memory.
    """

    id: int
    label: str
    tokens: Int32
    prompt_len: int
    limit: int
    end_ids: tuple[int, ...] = ()
    priority: int = 0
    salt: bytes = b""
    arrival: int = 0
    score_to: int = 0
    scored: int = 0
    state: State = State.WAITING
    reason: Reason | None = None
    row: int = 0
    hashes: list[bytes] = field(default_factory=list)
    root: bytes = b""
    saved: list[int] = field(default_factory=list)
    saved_len: int = 0
    lost: int = 0
    num_cached_tokens: int | None = None
    num_host_cached_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    overtaken: int = 0

    @property
    def order(self) -> tuple[int, int, int]:
        """First come, first served within a priority; a fork comes when its parent came."""
        return (self.priority, self.arrival, self.id)

    @property
    def output_ids(self) -> list[int]:
        """The generated ids of a request that holds no row."""
        ids: list[int] = self.tokens[self.prompt_len :].tolist()
        return ids


def pack(ids: list[int]) -> Int32:
    """Token ids as the core keeps them."""
    return np.asarray(ids, dtype=np.int32)
