"""Attention of one layer over gathered keys and values, in products of one fixed shape.

Every product is [height, width] x [width, CHUNK] or [height, CHUNK] x [CHUNK, width], whatever the batch. A row's sums
then always run in the same order, and a chunk that is hidden from a row adds exact zeros to it: reading it or not
changes no bit. Maxima know no order. So a row's bits depend on its own query and visible keys only.

    scores [chunks, lanes, tiles, height, CHUNK]    s = scale q.k, softcap, position bias, hidden keys far below all
    top    [lanes, tiles, height]                   the largest score, the sink among them
    weight exp(s - top), 0 where hidden;   out = sum over chunks of (weight v) / (sum over chunks of weight + sink)
"""

from __future__ import annotations

import torch

from pagedkv_cpu.planning import HIDDEN, Pass, Planner, tile_height
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
        picked = rows if kept is None else rows.index_select(0, kept)
        narrow = picked.to(cache.dtype)
        if narrow.shape[2] != cache.shape[2]:
            narrow = torch.nn.functional.pad(narrow, (0, cache.shape[2] - narrow.shape[2]))
        cache.index_copy_(1, slots, narrow.transpose(0, 1))


def scaled_queries(layer: Layer, q: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """q [T, heads, dim] times the layer's scale, fp32, as [T * heads, padded dim] of the scratch."""
    count, heads, dim = q.shape
    width = padded(dim)
    scale = layer.spec.scale if layer.spec.softcap is None else layer.spec.scale / layer.spec.softcap
    target = scratch.queries[: count * heads * width].view(count, heads, width)
    if q.dtype == torch.float32 and width == dim:
        torch.mul(q, scale, out=target)
    else:
        if width != dim:
            target.zero_()
        target[:, :, :dim].copy_(q).mul_(scale)
    return target.view(count * heads, width)


def attend(layer: Layer, passes: list[Pass], planner: Planner, q: torch.Tensor, out: torch.Tensor, s: Scratch) -> None:
    """Attention of q [T, heads, k_dim] into out [T, heads, v_dim]."""
    queries = scaled_queries(layer, q, s)
    rows = out.view(-1, out.shape[2])
    for part in passes:
        result = _run(layer, part, queries, s)
        if part.mixed and bool(torch.isnan(result).any()):
            # A NaN in a value that only some of a tile's tokens see reaches all of them as 0 x NaN. Looked at one by
            # one, tokens keep what they may see and gather zeros for the rest. The bits of good rows are the same.
            for single in planner.singles(part.tokens):
                _store(_run(layer, single, queries, s), single, rows)
        else:
            _store(result, part, rows)


def _store(result: torch.Tensor, part: Pass, out: torch.Tensor) -> None:
    """Bring tile rows into the order of out [T * heads, v_dim]."""
    flat = result.view(-1, result.shape[-1])
    if isinstance(part.out_rows, slice):
        target = out[part.out_rows]
        if target.dtype == flat.dtype and target.shape[1] == flat.shape[1]:
            torch.index_select(flat, 0, part.result_rows, out=target)
        else:
            target.copy_(flat.index_select(0, part.result_rows)[:, : target.shape[1]])
    else:
        picked = flat.index_select(0, part.result_rows)[:, : out.shape[1]]
        out.index_copy_(0, part.out_rows, picked.to(out.dtype))


def _run(layer: Layer, part: Pass, queries: torch.Tensor, s: Scratch) -> torch.Tensor:
    """One pass: its result [lanes, tiles, height, v_width], in the scratch."""
    lanes, tiles, height, chunks = part.lanes, part.tiles, part.height, part.chunks
    count, width = lanes * tiles * height, queries.shape[1]
    tiled = s.tiles[: count * width].view(count, width)
    torch.index_select(queries, 0, part.query_rows, out=tiled)
    tiled = tiled.view(lanes, tiles, height, width)
    scores = s.scores[: chunks * count * CHUNK].view(chunks, lanes, tiles, height, CHUNK)
    for first, number, slots in part.pieces:
        keys = _gather(layer.keys, slots, number, lanes, s)
        for chunk in range(number):
            _multiply_keys(tiled, keys[:, chunk], scores[first + chunk])
    _shape_scores(layer, part, scores)
    total = _to_weights(layer, part, scores)
    result = s.result[: count * layer.values.shape[2]].view(lanes, tiles, height, -1).zero_()
    for first, number, slots in part.pieces:
        values = _gather(layer.values, slots, number, lanes, s)
        for chunk in range(number):
            _add_values(result, scores[first + chunk], values[:, chunk])
    return result.div_(total.unsqueeze(-1))


def _gather(cache: torch.Tensor, slots: torch.Tensor, number: int, lanes: int, s: Scratch) -> torch.Tensor:
    """Rows `slots` of every KV head, fp32 [lanes, number, CHUNK, width] (lanes: KV heads x sequences)."""
    heads, _, width = cache.shape
    size = heads * len(slots) * width
    target = s.rows[:size].view(heads, len(slots), width)
    if cache.dtype == torch.float32:
        torch.index_select(cache, 1, slots, out=target)
    else:
        raw = s.raw(cache.dtype)[:size].view(heads, len(slots), width)
        target.copy_(torch.index_select(cache, 1, slots, out=raw))
    return target.view(lanes, number, CHUNK, width)


def _multiply_keys(tiled: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
    """out [lanes, tiles, height, CHUNK] = tiled [lanes, tiles, height, width] x keys [lanes, CHUNK, width]."""
    lanes, tiles, height, width = tiled.shape
    turned = keys.transpose(1, 2)
    if tiles == 1:
        torch.bmm(tiled.view(lanes, height, width), turned, out=out.view(lanes, height, CHUNK))
        return
    for lane in range(lanes):
        torch.bmm(tiled[lane], turned[lane].expand(tiles, width, CHUNK), out=out[lane])


def _add_values(result: torch.Tensor, weights: torch.Tensor, values: torch.Tensor) -> None:
    """result [lanes, tiles, height, width] += weights [lanes, tiles, height, CHUNK] x values [lanes, CHUNK, width]."""
    lanes, tiles, height, width = result.shape
    if tiles == 1:
        result.view(lanes, height, width).baddbmm_(weights.view(lanes, height, CHUNK), values)
        return
    for lane in range(lanes):
        result[lane].baddbmm_(weights[lane], values[lane].expand(tiles, CHUNK, width))


def _by_sequence(layer: Layer, part: Pass, values: torch.Tensor) -> torch.Tensor:
    """[lanes, tiles, height, ...] seen as [kv_heads, sequences, tiles, height, ...]."""
    heads = layer.spec.kv_heads
    return values.view(heads, part.lanes // heads, *values.shape[1:])


def _shape_scores(layer: Layer, part: Pass, scores: torch.Tensor) -> None:
    """Softcap, position bias, and hidden keys, in place."""
    if layer.spec.softcap is not None:
        scores.tanh_().mul_(layer.spec.softcap)
    if layer.alibi is not None:
        _add_alibi(layer, part, scores)
    for chunk, ceiling in part.ceilings:
        seen = _by_sequence(layer, part, scores[chunk])
        torch.minimum(seen, ceiling, out=seen)


def _add_alibi(layer: Layer, part: Pass, scores: torch.Tensor) -> None:
    """s += slope (i - p) for key i and query position p (Press et al., 2022)."""
    slopes = _by_sequence(layer, part, _per_row(layer, part, layer.alibi)).unsqueeze(-1)
    for chunk in range(part.chunks):
        keys = part.first_keys[:, None] + torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=torch.float32)
        distance = keys[:, None, None, :] - part.positions[..., None]
        _by_sequence(layer, part, scores[chunk]).add_(distance * slopes)


def _per_row(layer: Layer, part: Pass, per_head: torch.Tensor | None) -> torch.Tensor:
    """A value per query head, for every tile row: [lanes, tiles, height]."""
    if per_head is None:
        raise TypeError("nothing was bound")
    heads = part.query_rows.remainder(layer.spec.q_heads)
    return per_head.index_select(0, heads).view(part.lanes, part.tiles, part.height)


def _to_weights(layer: Layer, part: Pass, scores: torch.Tensor) -> torch.Tensor:
    """Turn scores into weights in place; their sum [lanes, tiles, height]."""
    top = scores.amax((0, 4))
    sinks = None
    if layer.spec.sinks:
        sinks = _per_row(layer, part, layer.sinks)
        top = torch.maximum(top, sinks)
    scores.sub_(top.unsqueeze(-1)).clamp_(min=LOWEST).exp_()
    if part.blank:
        _silence_blank(scores, top)
    torch.nn.functional.threshold(scores, NOTHING, 0.0, inplace=True)
    sums = scores.sum(-1)
    total = sums[0] if part.chunks == 1 else sums.cumsum(0)[-1]  # in the order of the chunks, unlike sum(0)
    if sinks is not None:
        total = total + (sinks - top).clamp_(min=LOWEST).exp_()
    return total.clamp_(min=SMALLEST) if part.blank else total


def _silence_blank(scores: torch.Tensor, top: torch.Tensor) -> None:
    """Rows whose largest score is that of a hidden key see none: all their weights become zero."""
    scores.masked_fill_((top <= HIDDEN).unsqueeze(-1), 0.0)


# -- whether this processor keeps the promise --------------------------------------------------------------------------


def same_bits(width: int, heights: tuple[int, ...]) -> bool:
    """Whether a row of a product has the same bits in tiles of every height, at every place, in every batch."""
    generator = torch.Generator().manual_seed(width)
    queries = torch.randn(3, 2 * TALL, width, generator=generator)
    keys = torch.randn(3, CHUNK, width, generator=generator)
    weights = torch.rand(3, 2 * TALL, CHUNK, generator=generator)
    base = torch.randn(3, 2 * TALL, width, generator=generator)
    scores = torch.cat([torch.bmm(tile, keys.transpose(1, 2)) for tile in _tiles(queries, TALL)], 1)
    sums = torch.cat(
        [torch.baddbmm(b, w, keys) for b, w in zip(_tiles(base, TALL), _tiles(weights, TALL), strict=True)], 1
    )
    for height in heights:
        for start in range(0, 2 * TALL - height + 1, 5):
            rows = slice(start, start + height)
            for batch in (1, 3):
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
