"""The persistent arrays of running sequences: one row each, written in place, never rebuilt."""

from __future__ import annotations

import numpy as np

from pagedkv.api.records import Int32, Int64
from pagedkv.core.request import Request


class Rows:
    """Block table, tokens and counters by row. Row 0 belongs to nobody and stays zero.

        tokens[row]   |-- computed --|-- to compute --|          length counts both
        table[row]    |b0|b1|b2|b3|b4|                           blocks counts entries, room the tokens they hold

    `published` counts the leading blocks that the prefix index was told of; `serial` changes with every new owner; the
    logits of positions `scored` .. `score_to` - 1 are still wanted;
    `end_ids` has one array [rows] for the first end id of each row, one for the second, and so on, -1 where none is.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        rows, width = max_num_seqs + 1, -(-max_model_len // block_size)
        self.block_size = block_size
        self.table: Int32 = np.zeros((rows, width), np.int32)
        self.tokens: Int32 = np.zeros((rows, max_model_len), np.int32)
        self.length: Int32 = np.zeros(rows, np.int32)
        self.computed: Int32 = np.zeros(rows, np.int32)
        self.blocks: Int32 = np.zeros(rows, np.int32)
        self.room: Int32 = np.zeros(rows, np.int32)
        self.published: Int32 = np.zeros(rows, np.int32)
        self.prompt_len: Int32 = np.zeros(rows, np.int32)
        self.limit: Int32 = np.zeros(rows, np.int32)
        self.scored: Int32 = np.zeros(rows, np.int32)
        self.score_to: Int32 = np.zeros(rows, np.int32)
        self.serial: Int32 = np.zeros(rows, np.int32)
        self.end_ids: list[Int32] = []
        self.counting: Int32 = np.arange(rows + 1, dtype=np.int32)
        self.counting64: Int64 = np.arange(rows + 1, dtype=np.int64)
        self.ones: Int32 = np.ones(rows, np.int32)
        self._table = self.table.reshape(-1)
        self._tokens = self.tokens.reshape(-1)
        self._free = list(range(max_num_seqs, 0, -1))

    @property
    def num_free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    def slots(self, rows: Int64, positions: Int32) -> Int64:
        """Where the key and value of `positions` [n] of `rows` [n] are: block * block_size + offset."""
        at, offset = np.divmod(positions, self.block_size)
        slots: Int64 = self.blocks_at(rows, at).astype(np.int64)
        slots *= self.block_size
        slots += offset
        return slots

    def blocks_at(self, rows: Int64, at: Int32) -> Int32:
        """The `at`-th block [n] of each row."""
        blocks: Int32 = self._table.take(rows * self.table.shape[1] + at)
        return blocks

    def tokens_at(self, rows: Int64, positions: Int32) -> Int32:
        """The token ids at `positions` [n] of `rows` [n]."""
        ids: Int32 = self._tokens.take(rows * self.tokens.shape[1] + positions)
        return ids

    def append_tokens(self, rows: Int64, ids: Int32) -> Int32:
        """Add one id to each row and return the new lengths."""
        length: Int32 = self.length.take(rows)
        self._tokens[rows * self.tokens.shape[1] + length] = ids
        length += 1
        self.length[rows] = length
        return length

    def ends(self, rows: Int64, ids: Int32) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of `ids` [n] is an end id of its row."""
        ended = np.zeros(len(rows), np.bool_)
        for column in self.end_ids:
            ended |= column.take(rows) == ids
        return ended

    def open(self, request: Request, blocks: list[int], computed: int) -> None:
        """Give `request` a row with these blocks, the first `computed` tokens of which are already written."""
        row = request.row = self._free.pop()
        length = len(request.tokens)
        self.tokens[row, :length] = request.tokens
        self.table[row, : len(blocks)] = blocks
        self.length[row] = length
        self.computed[row] = computed
        self.blocks[row] = len(blocks)
        self.room[row] = len(blocks) * self.block_size
        self.published[row] = computed // self.block_size
        self.prompt_len[row] = request.prompt_len
        self.limit[row] = request.limit
        self.scored[row] = request.scored
        self.score_to[row] = request.score_to
        self.serial[row] += 1
        self._set_end_ids(row, request.end_ids)

    def _set_end_ids(self, row: int, ids: tuple[int, ...]) -> None:
        while len(self.end_ids) < len(ids):
            self.end_ids.append(np.full(len(self.length), -1, np.int32))
        for at, column in enumerate(self.end_ids):
            column[row] = ids[at] if at < len(ids) else -1

    def close(self, request: Request) -> list[int]:
        """Take the row back, leave its tokens with `request`, and return the blocks it held, first one first."""
        row = request.row
        blocks = self.held(row)
        request.tokens = self.tokens[row, : self.length[row]].copy()
        request.scored = int(self.scored[row])
        self.table[row, : len(blocks)] = 0
        self.length[row] = self.computed[row] = self.blocks[row] = self.room[row] = 0
        self.serial[row] += 1
        request.row = 0
        self._free.append(row)
        return blocks

    def held(self, row: int) -> list[int]:
        """The blocks of a row, first one first."""
        blocks: list[int] = self.table[row, : self.blocks[row]].tolist()
        return blocks

    def append_blocks(self, rows: Int64, blocks: list[int]) -> None:
        """Add one block at the end of each row."""
        count = self.blocks.take(rows)
        self._table[rows * self.table.shape[1] + count] = blocks
        self.blocks[rows] = count + 1
        self.room[rows] += self.block_size
