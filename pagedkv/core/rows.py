"""The persistent arrays of running sequences: one row each, written in place, never rebuilt."""

from __future__ import annotations

import numpy as np

from pagedkv.api.records import Int32
from pagedkv.core.request import Request


class Rows:
    """Block table, tokens and counters by row. Row 0 belongs to nobody and stays zero.

        tokens[row]   |-- computed --|-- to compute --|          length counts both
        table[row]    |b0|b1|b2|b3|b4|                           blocks counts entries, block_size tokens each

    `published` counts the leading blocks that the prefix index was told of; `serial` changes with every new owner.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        rows, width = max_num_seqs + 1, -(-max_model_len // block_size)
        self.block_size = block_size
        self.table: Int32 = np.zeros((rows, width), np.int32)
        self.tokens: Int32 = np.zeros((rows, max_model_len), np.int32)
        self.length: Int32 = np.zeros(rows, np.int32)
        self.computed: Int32 = np.zeros(rows, np.int32)
        self.blocks: Int32 = np.zeros(rows, np.int32)
        self.published: Int32 = np.zeros(rows, np.int32)
        self.prompt_len: Int32 = np.zeros(rows, np.int32)
        self.limit: Int32 = np.zeros(rows, np.int32)
        self.serial: Int32 = np.zeros(rows, np.int32)
        self.end_ids: Int32 = np.full((rows, 4), -1, np.int32)
        self._free = list(range(max_num_seqs, 0, -1))

    @property
    def num_free(self) -> int:
        """Rows that nobody holds."""
        return len(self._free)

    def open(self, request: Request, blocks: list[int], computed: int) -> None:
        """Give `request` a row with these blocks, the first `computed` tokens of which are already written."""
        row = request.row = self._free.pop()
        length = len(request.tokens)
        self.tokens[row, :length] = request.tokens
        self.table[row, : len(blocks)] = blocks
        self.length[row] = length
        self.computed[row] = computed
        self.blocks[row] = len(blocks)
        self.published[row] = computed // self.block_size
        self.prompt_len[row] = request.prompt_len
        self.limit[row] = request.limit
        self.serial[row] += 1
        self._set_end_ids(row, request.end_ids)

    def _set_end_ids(self, row: int, ids: tuple[int, ...]) -> None:
        missing = len(ids) - self.end_ids.shape[1]
        if missing > 0:
            self.end_ids = np.pad(self.end_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.end_ids[row] = -1
        self.end_ids[row, : len(ids)] = ids

    def close(self, request: Request) -> list[int]:
        """Take the row back, leave its tokens with `request`, and return the blocks it held, first one first."""
        row = request.row
        blocks = self.held(row)
        request.tokens = self.tokens[row, : self.length[row]].copy()
        self.table[row, : len(blocks)] = 0
        self.length[row] = self.computed[row] = self.blocks[row] = 0
        self.serial[row] += 1
        request.row = 0
        self._free.append(row)
        return blocks

    def held(self, row: int) -> list[int]:
        """The blocks of a row, first one first."""
        blocks: list[int] = self.table[row, : self.blocks[row]].tolist()
        return blocks

    def append_block(self, row: int, block: int) -> None:
        """Add one block at the end of a row."""
        self.table[row, self.blocks[row]] = block
        self.blocks[row] += 1
