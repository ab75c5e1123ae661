"""How one step's limits are shared: its tokens, and the logits of prompt positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.api.records import Int32


@dataclass(slots=True)
class Scoring:
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


def budget(need: Int32, most: int) -> tuple[Int32, int]:
    """Share `most` tokens of a step among rows that still `need` some, in order: single tokens first, then chunks.

    Returns the tokens of each row and what is left over.
    """
    queries = np.where(need == 1, 1, 0).astype(np.int32)
    left = most - int(queries.sum())
    for at in np.flatnonzero(need > 1).tolist():
        queries[at] = min(int(need[at]), left)
        left -= int(queries[at])
    return queries, left


def too_long(prompt_len: int, max_tokens: int | None, max_model_len: int, usable: int, block_size: int) -> str:
    """Why a request can never finish, with the numbers and what to change."""
    asked = f"prompt of {prompt_len} tokens" + (f" + max_tokens={max_tokens}" if max_tokens else "")
    room = usable * block_size + 1
    if room < max_model_len:
        limit = f"the cache holds {room} ({usable} blocks of {block_size})"
        advice = "raise num_blocks or kv_cache_memory"
    else:
        limit = f"max_model_len is {max_model_len}"
        advice = "raise max_model_len if the model allows it"
    lower = "lower max_tokens or shorten the prompt" if max_tokens else "shorten the prompt"
    return f"{asked} can never fit: {limit}; {lower}, or {advice}"
