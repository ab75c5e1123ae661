"""Attention of one layer over gathered keys and values, in products of one fixed shape.

Every product is [height, width] x [width, CHUNK] or [height, CHUNK] x [CHUNK, width], whatever the batch. A row's sums
then always run in the same order, and a chunk that is hidden from a row adds exact zeros to it: reading it or not
changes no bit. Maxima know no order. So a row's bits depend on its own query and visible keys only.

    scores [chunks, lanes, tiles, height, CHUNK]    s = scale q.k, softcap, position bias, hidden keys far below all
    top    [lanes, tiles, height]                   the largest score, the sink among them
    weight exp(s - top), 0 where hidden;   out = sum over chunks of (weight v) / (sum over chunks of weight + sink)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pagedkv_cpu.planning import HIDDEN, Blocks, Pass, Piece, Planner, tile_height
from pagedkv_cpu.pool import Layer
from pagedkv_cpu.scratch import CHUNK, TALL, Scratch, padded

LOWEST, NOTHING = -87.0, 1.7e-38
"""exp of less than LOWEST is denormal or zero, which takes a processor twenty times as long. What it gives for LOWEST
itself is below NOTHING and becomes zero, so that hidden keys weigh exactly nothing."""
SMALLEST = 1e-30
"""Stands for the sum of a row that sees no key. A row that sees one sums to at least 1."""


def append(layer: Layer, slots: torch.Tensor, kept: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write rows `kept` (None: all) of k and v [A, kv_heads, dim] to `slots`."""
    for cache, rows in ((layer.keys, k), (layer.values, v)):
        write(cache, slots, rows if kept is None else rows.index_select(0, kept))


def write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [A, kv_heads, dim] to `slots` of a cache [kv_heads, slots, width], its padding as zeros."""
    narrow = rows.to(cache.dtype)
    if narrow.shape[2] != cache.shape[2]:
        narrow = torch.nn.functional.pad(narrow, (0, cache.shape[2] - narrow.shape[2]))
    cache.index_copy_(1, slots, narrow.transpose(0, 1))


def scaled_queries(layer: Layer, q: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """q [T, heads, dim] times the layer's scale (over its softcap), fp32, as [T * heads, padded dim] of the scratch."""
    count, heads, dim = q.shape
    width = padded(dim)
    target = scratch.queries[: count * heads * width].view(count, heads, width)
    if q.dtype == torch.float32 and width == dim:
        torch.mul(q, layer.scale, out=target)
    else:
        if width != dim:
            target.zero_()
        target[:, :, :dim].copy_(q).mul_(layer.scale)
    return target.view(count * heads, width)


def attend(
    layer: Layer,
    works: list[Work],
    planner: Planner,
    q: torch.Tensor,
    out: torch.Tensor,
    s: Scratch,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of q [T, heads, k_dim] into out [T, heads, v_dim]; `works` come from the plan.

    `lse`, fp32 [T, heads], takes the logarithm of each softmax's denominator.
    """
    queries = scaled_queries(layer, q, s)
    rows = out.view(-1, out.shape[2])
    sums = None if lse is None else lse.view(-1, 1)
    for work in works:
        result = work.run(layer, queries, sums)
        if work.part.mixed and bool(torch.isnan(result).any()):
            # A NaN in a value that only some of a tile's tokens see reaches all of them as 0 x NaN. Looked at one by
            # one, tokens keep what they may see and gather zeros for the rest. The bits of good rows are the same.
            for single in planner.singles(work.part.tokens):
                _store(Work(single, layer, s).run(layer, queries, sums), single, rows)
        else:
            _store(result, work.part, rows)


def _store(result: torch.Tensor, part: Pass, out: torch.Tensor) -> None:
    """Bring tile rows [rows, v_width] into the order of out [T * heads, v_dim]."""
    if isinstance(part.out_rows, slice):
        whole = part.out_rows == slice(0, len(out))  # a view less per layer
        target = out if whole else out[part.out_rows]
        if target.dtype == result.dtype and target.shape[1] == result.shape[1]:
            torch.index_select(result, 0, part.result_rows, out=target)
        else:
            target.copy_(result.index_select(0, part.result_rows)[:, : target.shape[1]])
    else:
        picked = result.index_select(0, part.result_rows)[:, : out.shape[1]]
        out.index_copy_(0, part.out_rows, picked.to(out.dtype))


def _log_sums(top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """log of sum(exp(s)) for each tile row, fp32 [rows, 1]; minus infinity where nothing is seen.

    In float64, whose rounded result does not show by which instructions a row's logarithm was taken.
    """
    sums = total.double().log_().add_(top).masked_fill_(top <= HIDDEN, -torch.inf)
    return sums.float().view(-1, 1)


Product = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Work:
    """A pass over the scratch, for layers of one width and KV dtype: all its views are made once, for every layer.

    tiled [lanes, tiles, height, k_width], scores [chunks, lanes, tiles, height, CHUNK],
    result [lanes, tiles, height, v_width]
    """

    def __init__(self, part: Pass, layer: Layer, s: Scratch) -> None:
        self.part = part
        self._heads = layer.spec.kv_heads
        shape = (part.lanes, part.tiles, part.height)
        count = part.lanes * part.tiles * part.height
        self._rows = s.tiles[: count * layer.keys.shape[2]].view(count, -1)
        self._tiled = self._rows.view(*shape, -1)
        self._scores = s.scores[: part.chunks * count * CHUNK].view(part.chunks, *shape, CHUNK)
        self._result_rows = s.result[: count * layer.values.shape[2]].view(count, -1)
        self._result = self._result_rows.view(*shape, -1)
        self._ceilings = [(self._by_sequence(self._scores[chunk]), ceiling) for chunk, ceiling in part.ceilings]
        self._keys = [_Gather(piece, layer.keys, part.lanes, s) for piece in part.pieces]
        self._values = [_Gather(piece, layer.values, part.lanes, s) for piece in part.pieces]
        few = part.tiles == 1  # else the views would outweigh the work they save
        self._key_products = [list(self._with_keys(keys)) for keys in self._keys] if few else None
        self._value_products = [list(self._with_values(values)) for values in self._values] if few else None

    def run(self, layer: Layer, queries: torch.Tensor, lse: torch.Tensor | None = None) -> torch.Tensor:
        """The pass's result, tile rows [rows, v_width], for queries [tokens * heads, k_width].

        The logarithms of the pass's denominators go to their rows of `lse`, [tokens * heads, 1].
        """
        torch.index_select(queries, 0, self.part.query_rows, out=self._rows)
        for index, keys in enumerate(self._keys):
            keys.read(layer.keys)
            for tiles, turned, out in self._key_products[index] if self._key_products else self._with_keys(keys):
                torch.bmm(tiles, turned, out=out)
        self._shape_scores(layer)
        top, total = self._to_weights(layer)
        if lse is not None:
            _store(_log_sums(top, total), self.part, lse)
        self._result.zero_()
        for index, values in enumerate(self._values):
            values.read(layer.values)
            made = self._value_products[index] if self._value_products else self._with_values(values)
            for out, weights, rows in made:
                out.baddbmm_(weights, rows)
        self._result.div_(total.unsqueeze(-1))
        return self._result_rows

    def _with_keys(self, keys: _Gather) -> Iterator[Product]:
        """(tiles [n, height, width], keys [n, width, CHUNK], scores [n, height, CHUNK]) of every product with keys."""
        for chunk in range(keys.number):
            turned, scores = keys.rows[:, chunk].transpose(1, 2), self._scores[keys.first + chunk]
            if self.part.tiles == 1:
                yield self._tiled.squeeze(1), turned, scores.squeeze(1)
            else:
                for lane in range(self.part.lanes):
                    yield self._tiled[lane], turned[lane].expand(self.part.tiles, -1, -1), scores[lane]

    def _with_values(self, values: _Gather) -> Iterator[Product]:
        """(result [n, height, width], weights [n, height, CHUNK], values [n, CHUNK, width]) of every product."""
        for chunk in range(values.number):
            rows, weights = values.rows[:, chunk], self._scores[values.first + chunk]
            if self.part.tiles == 1:
                yield self._result.squeeze(1), weights.squeeze(1), rows
            else:
                for lane in range(self.part.lanes):
                    yield self._result[lane], weights[lane], rows[lane].expand(self.part.tiles, -1, -1)

    def _by_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """[lanes, tiles, height, ...] seen as [kv_heads, sequences, tiles, height, ...]."""
        return values.view(self._heads, -1, *values.shape[1:])

    def _shape_scores(self, layer: Layer) -> None:
        """Softcap, position bias, and hidden keys, in place."""
        if layer.spec.softcap is not None:
            self._scores.tanh_().mul_(layer.spec.softcap)
        if layer.spec.alibi:
            self._add_alibi(layer)
        for scores, ceiling in self._ceilings:
            torch.minimum(scores, ceiling, out=scores)

    def _add_alibi(self, layer: Layer) -> None:
        """s += slope (i - p) for key i and query position p (Press et al., 2022)."""
        slopes = self._by_sequence(self._per_row(layer, layer.alibi)).unsqueeze(-1)
        for chunk in range(self.part.chunks):
            offset = torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=torch.float32)
            keys = self.part.first_keys[:, None] + offset
            distance = keys[:, None, None, :] - self.part.positions[..., None]
            self._by_sequence(self._scores[chunk]).add_(distance * slopes)

    def _per_row(self, layer: Layer, per_head: torch.Tensor) -> torch.Tensor:
        """A value per query head, for every tile row: [lanes, tiles, height]."""
        heads = self.part.query_rows.remainder(layer.spec.q_heads)
        return per_head.index_select(0, heads).view(self._scores.shape[1:4])

    def _to_weights(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn scores into weights in place: (the largest score, the weights' sum), each [lanes, tiles, height]."""
        scores, top = self._scores, self._scores.amax((0, 4))
        sinks = None
        if layer.spec.sinks:
            sinks = self._per_row(layer, layer.sinks)
            top = torch.maximum(top, sinks)
        scores.sub_(top.unsqueeze(-1)).clamp_(min=LOWEST).exp_()
        if self.part.blank:  # rows whose largest score is a hidden key's see none
            scores.masked_fill_((top <= HIDDEN).unsqueeze(-1), 0.0)
        torch.threshold_(scores, NOTHING, 0.0)
        sums = scores.sum(-1)
        total = sums[0] if self.part.chunks == 1 else sums.cumsum(0)[-1]  # in the order of the chunks, unlike sum(0)
        if sinks is not None:
            total = total + (sinks - top).clamp_(min=LOWEST).exp_()
        return top, total.clamp_(min=SMALLEST) if self.part.blank else total


class _Gather:
    """Where some chunks of keys or values go: fp32 rows [lanes, number, CHUNK, width] (lanes: heads x sequences)."""

    def __init__(self, piece: Piece, cache: torch.Tensor, lanes: int, s: Scratch) -> None:
        self.first, self.number, self._slots, self._blocks = piece
        shape = (cache.shape[0], len(self._slots), cache.shape[2])
        size = shape[0] * shape[1] * shape[2]
        self._target = s.rows[:size].view(shape)
        self._raw = None if cache.dtype == torch.float32 else s.raw(cache.dtype)[:size].view(shape)
        self.rows = self._target.view(lanes, self.number, CHUNK, shape[2])
        self._into = self._target if self._raw is None else self._raw
        if self._blocks is not None:
            first = torch.arange(shape[0], dtype=torch.int32) * (cache.shape[1] // self._blocks.block_size)
            self._numbers = (first[:, None] + self._blocks.numbers).view(-1)
            self._by_block = self._into.view(len(self._numbers), -1)
            self._by_head = self._into.view(shape[0], len(self._blocks.numbers), -1)

    def read(self, cache: torch.Tensor) -> None:
        """Gather from a cache [heads, slots, width]."""
        if self._blocks is None:
            torch.index_select(cache, 1, self._slots, out=self._into)
        else:
            self._read_blocks(cache, self._blocks)
        if self._raw is not None:
            self._target.copy_(self._raw)

    def _read_blocks(self, cache: torch.Tensor, blocks: Blocks) -> None:
        torch.index_select(cache.view(-1, self._by_block.shape[1]), 0, self._numbers, out=self._by_block)
        if len(blocks.patch_at):
            rows = cache.index_select(1, blocks.patch_slots)
            self._by_head.index_copy_(1, blocks.patch_at, rows.view(len(cache), len(blocks.patch_at), -1))


# -- whether this processor keeps the promise --------------------------------------------------------------------------


def same_bits(width: int, heights: tuple[int, ...]) -> bool:
    """Whether a row of a product has the same bits in tiles of every height, at every place, in batches of several."""
    generator = torch.Generator().manual_seed(width)
    queries = torch.randn(5, 2 * TALL, width, generator=generator)
    keys = torch.randn(5, CHUNK, width, generator=generator)
    weights = torch.rand(5, 2 * TALL, CHUNK, generator=generator)
    base = torch.randn(5, 2 * TALL, width, generator=generator)
    scores = torch.cat([torch.bmm(tile, keys.transpose(1, 2)) for tile in _tiles(queries, TALL)], 1)
    sums = torch.cat(
        [torch.baddbmm(b, w, keys) for b, w in zip(_tiles(base, TALL), _tiles(weights, TALL), strict=True)], 1
    )
    for height in heights:
        for start in range(0, 2 * TALL - height + 1, 5):
            rows = slice(start, start + height)
            for batch in (2, 3):
                few = keys[:batch]
                if not torch.equal(torch.bmm(_cut(queries, batch, rows), few.transpose(1, 2)), scores[:batch, rows]):
                    return False
                product = torch.baddbmm(_cut(base, batch, rows), _cut(weights, batch, rows), few)
                if not torch.equal(product, sums[:batch, rows]):
                    return False
    return True


def _cut(tensor: torch.Tensor, batch: int, rows: slice) -> torch.Tensor:
    return tensor[:batch, rows].contiguous()


def _tiles(tensor: torch.Tensor, height: int) -> list[torch.Tensor]:
    return [tile.contiguous() for tile in torch.split(tensor, height, 1)]


def heights(uniform: bool) -> tuple[int, ...]:
    """The tile heights in use."""
    return tuple(sorted({tile_height(rows, uniform) for rows in (1, 8, TALL)}))
