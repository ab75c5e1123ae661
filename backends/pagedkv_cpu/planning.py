"""What all layers of one shape share in a step: which keys to gather, which query rows form tiles, what is hidden.

A pass is a set of query tiles that see equally many chunks of keys:

    single tokens    one lane per (KV head, sequence), each with its own keys;   several sequences to a pass
    prompts          one lane per KV head, many tiles of one sequence share its keys;   a pass stays inside one chunk

Chunks are counted from position 0 of a sequence, so a chunk holds the same keys in whichever pass it is read.
Slots that no query of a pass may see are gathered from the null block, which reads as zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api import Batch, LayerSpec
from pagedkv.api.checks import check_batch
from pagedkv_cpu.scratch import CHUNK, TALL, WASTE, Sizes

MANY_ROWS, LARGE_BLOCK = 2048, 8
"""From how many rows on, and from which block size on, whole blocks are gathered rather than single slots."""
HIDDEN = -1.5e38
"""The score of a key that is not seen: below every real one, and finite, so that differences stay finite."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Shape(NamedTuple):
    """All of a layer that its passes depend on."""

    q_heads: int
    kv_heads: int
    causal: bool
    window: int | None

    @classmethod
    def of(cls, layer: LayerSpec) -> Shape:
        return cls(layer.q_heads, layer.kv_heads, layer.causal, layer.window)

    @property
    def group(self) -> int:
        """The most query heads that read one KV head."""
        return -(-self.q_heads // self.kv_heads)

    def visible(self, position: Ints, context: Ints | int) -> tuple[Ints, Ints]:
        """[first, end) of the keys that queries at `position` see."""
        end = np.minimum(position + 1, context) if self.causal else np.broadcast_to(context, position.shape)
        first = np.maximum(position - self.window + 1, 0) if self.window else np.zeros_like(position)
        return first, np.maximum(end, 0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tokens:
    """Some query tokens: each one's batch row, its index in q, and its position in the sequence."""

    row: Ints
    index: Ints
    position: Ints


class Blocks(NamedTuple):
    """The same rows as `slots` of a piece, whole blocks at a time, for a quicker copy.

    numbers int32 [n]: the block of each run of block_size rows, 0 where it is not read whole; such runs stand at
    patch_at int64 [p] and are read row by row, from patch_slots int32 [p * block_size].
    """

    block_size: int
    numbers: torch.Tensor
    patch_at: torch.Tensor
    patch_slots: torch.Tensor


class Piece(NamedTuple):
    """Chunks first .. first + number - 1 of all sequences of a pass: int32 slots [sequences * number * CHUNK]."""

    first: int
    number: int
    slots: torch.Tensor
    blocks: Blocks | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pass:
    """One pass: `lanes` x `tiles` tiles of `height` query rows, each against `chunks` chunks of keys.

    pieces: the chunks of keys that are gathered at a time
    query_rows: int32 [lanes, tiles, height] -> row of q seen as [tokens * q_heads, dim]
    result_rows: int32 [tokens, q_heads] -> tile row;   out_rows: where they go, a slice or int64 rows of out
    ceilings: (chunk, fp32 [1, sequences, tiles | 1, height | 1, CHUNK]): HIDDEN where a key is not seen, else infinity
    positions, first_keys: fp32 [sequences, tiles, height] and [sequences], for position biases
    """

    lanes: int
    tiles: int
    height: int
    chunks: int
    pieces: tuple[Piece, ...]
    query_rows: torch.Tensor
    result_rows: torch.Tensor
    out_rows: slice | torch.Tensor
    ceilings: tuple[tuple[int, torch.Tensor], ...]
    positions: torch.Tensor
    first_keys: torch.Tensor
    blank: bool
    tokens: Tokens
    mixed: bool


def tile_height(rows: int, uniform: bool) -> int:
    """Query rows of one tile where a lane has `rows` of them.

    Short tiles waste less where one token's heads are all there is; `uniform` forgoes them, for processors on which a
    product's bits depend on its height.
    """
    if uniform or rows > 8:
        return TALL
    return 4 if rows <= 4 else 8


def tile_count(rows: int, height: int, lanes: int) -> int:
    """Tiles for `rows` rows of each lane. A product never runs alone: torch hands a batch of one to another routine."""
    return max(-(-rows // height), 2 if lanes == 1 else 1)


class Geometry:
    """The batch as it stood when it was planned: copies of all that is needed from the core's arrays."""

    def __init__(self, batch: Batch, block_size: int, num_blocks: int) -> None:
        check_batch(batch, block_size, num_blocks)
        count = batch.num_seqs
        self.block_size = block_size
        self.starts = batch.cu_q[: count + 1].astype(np.int64)
        self.context = batch.ctx_len[:count].astype(np.int64)
        columns = -(-int(self.context.max(initial=0)) // block_size)
        self.table = batch.block_table[batch.rows[:count], : max(1, columns)].astype(np.int32)

    def tokens(self) -> Tokens:
        """Every query token."""
        counts = np.diff(self.starts)
        row = np.repeat(np.arange(len(counts)), counts)
        index = np.arange(len(row))
        position = self.context[row] - counts[row] + index - self.starts[row]
        return Tokens(row=row, index=index, position=position)

    def slots(self, rows: Ints, keys: Ints, visible: Bools) -> npt.NDArray[np.int32]:
        """Slots of `keys` [n, k] of batch rows `rows` [n]; the null block's where not visible."""
        column = np.minimum(keys // self.block_size, self.table.shape[1] - 1)
        slots = self.table[rows[:, None], column] * self.block_size + keys % self.block_size
        return np.where(visible, slots, 0).astype(np.int32)


class Planner:
    """Cuts the query tokens of one batch into passes, for one shape of layer."""

    def __init__(self, geometry: Geometry, shape: Shape, sizes: Sizes, uniform: bool) -> None:
        self._geometry = geometry
        self._shape = shape
        self._sizes = sizes
        self._uniform = uniform
        head = np.arange(shape.q_heads)
        self._lane_of = head * shape.kv_heads // shape.q_heads
        first = np.searchsorted(self._lane_of, np.arange(shape.kv_heads))
        self._place_of = head - first[self._lane_of]
        last = np.append(first[1:], shape.q_heads)[:, None] - 1
        self._heads = np.minimum(first[:, None] + np.arange(shape.group), last)  # [kv_heads, group], last one repeated

    def all(self) -> list[Pass]:
        """Passes for every query token of the batch."""
        tokens = self._geometry.tokens()
        count = np.diff(self._geometry.starts)[tokens.row]
        alone = np.flatnonzero(count == 1)
        passes = list(self.singles(_take(tokens, alone)))
        for row in np.flatnonzero(np.diff(self._geometry.starts) > 1):
            passes += self._prompt(int(row), tokens)
        return passes

    # -- single tokens -------------------------------------------------------------------------------------------------

    def singles(self, tokens: Tokens) -> Iterator[Pass]:
        """Passes in which every token has its own lanes, so that it sees only what it may see."""
        if not len(tokens.row):
            return
        first, end = self._shape.visible(tokens.position, self._geometry.context[tokens.row])
        chunks = np.maximum(-(-end // CHUNK) - first // CHUNK, 1)
        order = np.argsort(-chunks, kind="stable")
        start = 0
        while start < len(order):
            stop = self._fill(chunks[order[start:]]) + start
            members = np.sort(order[start:stop])
            yield self._single_pass(_take(tokens, members), first[members], end[members], int(chunks[members].max()))
            start = stop

    def _fill(self, chunks: Ints) -> int:
        """How many of the next tokens (longest first) go into one pass, by scratch and by what padding wastes."""
        shape, sizes, most = self._shape, self._sizes, int(chunks[0])
        height = tile_height(shape.group, self._uniform)
        rows = tile_count(shape.group, height, shape.kv_heads) * height
        room = min(
            sizes.scores // (shape.kv_heads * rows * most * CHUNK), sizes.rows // (shape.kv_heads * CHUNK * sizes.width)
        )
        waste = np.cumsum(most - chunks) * shape.kv_heads
        return max(1, min(room, int(np.searchsorted(waste, WASTE, side="right"))))

    def _single_pass(self, tokens: Tokens, first: Ints, end: Ints, chunks: int) -> Pass:
        shape, count = self._shape, len(tokens.row)
        height = tile_height(shape.group, self._uniform)
        tiles = tile_count(shape.group, height, shape.kv_heads * count)
        start = first // CHUNK * CHUNK
        keys = start[:, None] + np.arange(chunks * CHUNK)
        visible = (keys >= first[:, None]) & (keys < end[:, None])
        slots = self._geometry.slots(tokens.row, keys, visible).reshape(count, chunks, CHUNK)
        seen = visible.reshape(count, chunks, CHUNK)
        place = np.minimum(np.arange(tiles * height), shape.group - 1)
        query_rows = tokens.index[None, :, None] * shape.q_heads + self._heads[:, None, place]
        result_rows = (self._lane_of * count + np.arange(count)[:, None]) * (tiles * height) + self._place_of
        return Pass(
            lanes=shape.kv_heads * count,
            tiles=tiles,
            height=height,
            chunks=chunks,
            pieces=self._pieces(slots),
            query_rows=_int32(query_rows),
            result_rows=_int32(result_rows),
            out_rows=_out_rows(tokens.index, shape.q_heads),
            ceilings=tuple(
                (chunk, _ceiling(seen[None, :, chunk, None, None, :]))
                for chunk in range(chunks)
                if not seen[:, chunk].all()
            ),
            positions=_fp32(np.broadcast_to(tokens.position[:, None, None], (count, tiles, height))),
            first_keys=_fp32(start),
            blank=bool((end <= first).any()),
            tokens=tokens,
            mixed=False,
        )

    # -- prompts -------------------------------------------------------------------------------------------------------

    def _prompt(self, row: int, tokens: Tokens) -> Iterator[Pass]:
        """Passes for the tokens of one batch row with several."""
        begin, stop = self._geometry.starts[row : row + 2]
        positions = tokens.position[begin:stop]
        base, keys = self._row_keys(row, positions)
        done = 0
        while done < len(positions):
            size = self._prompt_size(positions[done:], int(self._geometry.context[row]))
            yield self._prompt_pass(row, int(begin) + done, positions[done : done + size], base, keys)
            done += size

    def _row_keys(self, row: int, positions: Ints) -> tuple[int, torch.Tensor]:
        """(first chunk, int32 slots [chunks, CHUNK]) of all that the row's queries see."""
        context = int(self._geometry.context[row])
        first, end = self._shape.visible(positions, context)
        base = int(first[0]) // CHUNK
        chunks = max(1, -(-int(end[-1]) // CHUNK) - base)
        keys = (base + np.arange(chunks))[:, None] * CHUNK + np.arange(CHUNK)
        slots = self._geometry.slots(np.full(chunks, row), keys, keys < context)
        return base, torch.from_numpy(slots)

    def _prompt_size(self, positions: Ints, context: int) -> int:
        """Tokens of the next pass: to the end of a chunk of positions, at most what the score buffer holds."""
        shape, start = self._shape, int(positions[0])
        to_edge = CHUNK - start % CHUNK
        first, end = shape.visible(positions[:to_edge], context)
        chunks = max(1, -(-int(end[-1]) // CHUNK) - int(first[0]) // CHUNK)
        rows = self._sizes.scores // (shape.kv_heads * chunks * CHUNK) // TALL * TALL
        return max(1, min(to_edge, len(positions), rows // shape.group))

    def _prompt_pass(self, row: int, index: int, positions: Ints, base: int, keys: torch.Tensor) -> Pass:
        shape, count = self._shape, len(positions)
        context = int(self._geometry.context[row])
        first, end = shape.visible(positions, context)
        start = int(first[0]) // CHUNK
        chunks = max(1, -(-int(end[-1]) // CHUNK) - start)
        tiles = tile_count(count * shape.group, TALL, shape.kv_heads)
        flat = np.minimum(np.arange(tiles * TALL), count * shape.group - 1)
        token, place = flat // shape.group, flat % shape.group
        query_rows = (index + token) * shape.q_heads + self._heads[:, place]
        result_rows = self._lane_of * (tiles * TALL) + np.arange(count)[:, None] * shape.group + self._place_of
        return Pass(
            lanes=shape.kv_heads,
            tiles=tiles,
            height=TALL,
            chunks=chunks,
            pieces=self._shared_pieces(keys[start - base : start - base + chunks]),
            query_rows=_int32(query_rows),
            result_rows=_int32(result_rows),
            out_rows=slice(index * shape.q_heads, (index + count) * shape.q_heads),
            ceilings=tuple(_prompt_ceilings(first[token], end[token], start, chunks, tiles)),
            positions=_fp32(positions[token].reshape(1, tiles, TALL)),
            first_keys=_fp32(np.array([start * CHUNK])),
            blank=bool((end <= first).any()),
            tokens=Tokens(row=np.full(count, row), index=index + np.arange(count), position=positions),
            mixed=True,
        )

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _piece_chunks(self, sequences: int) -> int:
        """Chunks whose rows fit the row buffer at once."""
        return max(1, self._sizes.rows // (self._shape.kv_heads * sequences * CHUNK * self._sizes.width))

    def _pieces(self, slots: npt.NDArray[np.int32]) -> tuple[Piece, ...]:
        """Cut slots [sequences, chunks, CHUNK] into what is gathered at once."""
        step, chunks = self._piece_chunks(len(slots)), slots.shape[1]
        cuts = [(chunk, slots[:, chunk : chunk + step]) for chunk in range(0, chunks, step)]
        flat = [(at, cut.shape[1], np.ascontiguousarray(cut).reshape(-1)) for at, cut in cuts]
        size = self._geometry.block_size
        return tuple(Piece(at, number, torch.from_numpy(cut), _blocks(cut, size)) for at, number, cut in flat)

    def _shared_pieces(self, slots: torch.Tensor) -> tuple[Piece, ...]:
        """The same for one sequence: views, so that passes share the slots' memory."""
        step = self._piece_chunks(1)
        cuts = [(chunk, slots[chunk : chunk + step]) for chunk in range(0, len(slots), step)]
        return tuple(Piece(at, len(cut), cut.view(-1), None) for at, cut in cuts)


def _blocks(slots: npt.NDArray[np.int32], block_size: int) -> Blocks | None:
    """How to read `slots` by whole blocks; None where that takes more calls than it saves."""
    if len(slots) < MANY_ROWS or CHUNK % block_size or block_size < LARGE_BLOCK:
        return None
    runs = slots.reshape(-1, block_size)
    first = runs[:, 0]
    whole = (first % block_size == 0) & (runs == first[:, None] + np.arange(block_size)).all(1)
    patch = np.flatnonzero(~whole & runs.any(1))
    numbers = np.where(whole, first // block_size, 0).astype(np.int32)
    return Blocks(block_size, *map(torch.from_numpy, (numbers, patch, runs[patch].reshape(-1))))


def _prompt_ceilings(first: Ints, end: Ints, start: int, chunks: int, tiles: int) -> Iterator[tuple[int, torch.Tensor]]:
    """What rows that see [first, end) do not see, for each chunk that some row does not see whole."""
    for chunk in range(chunks):
        low = (start + chunk) * CHUNK
        if low >= first.max() and low + CHUNK <= end.min():
            continue
        keys = low + np.arange(CHUNK)
        seen = (keys >= first[:, None]) & (keys < end[:, None])
        yield chunk, _ceiling(seen.reshape(1, 1, tiles, TALL, CHUNK))


def _out_rows(index: Ints, q_heads: int) -> slice | torch.Tensor:
    """Rows of `out` seen as [tokens * q_heads, dim]: a slice where the tokens follow one another."""
    if int(index[-1] - index[0]) + 1 == len(index):
        return slice(int(index[0]) * q_heads, (int(index[-1]) + 1) * q_heads)
    rows = index[:, None] * q_heads + np.arange(q_heads)
    return torch.from_numpy(rows.reshape(-1))


def _take(tokens: Tokens, members: Ints) -> Tokens:
    return Tokens(row=tokens.row[members], index=tokens.index[members], position=tokens.position[members])


def _ceiling(seen: Bools) -> torch.Tensor:
    return torch.from_numpy(np.where(seen, np.float32(np.inf), np.float32(HIDDEN)))


def _int32(values: Ints) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32).reshape(-1))


def _fp32(values: Ints) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))
