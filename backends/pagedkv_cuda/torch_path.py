"""Attention by torch's operators: where Triton has no kernels, and to compare them with.

A row's query tokens are cut into tiles of at most 64. Some tiles at a time meet `KEYS` keys at a time, gathered by
their block tables, with a running maximum and sum (Milakov and Gimelshein, 2018):

    queries [g, kv_heads, group * height, dim]   keys, values [g, kv_heads, KEYS, dim]
    scores  [g, kv_heads, group * height, KEYS]

Nothing here asks the device for a value, so that it can be recorded; in a static plan every bound is the shape's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagedkv.api import GroupSpec, LayerSpec, PoolSpec
from pagedkv.api.torch_streams import copy_rows
from pagedkv_cuda.path import Arrays, Path, Staged, table_bytes

if TYPE_CHECKING:
    from pagedkv_cuda.plans import CudaPlan
    from pagedkv_cuda.pool import Layer

KEYS = 256
TALL = 64
BUDGET = 4 << 20
"""Numbers in the scores of one pass, and in its keys, at most; one tile may need more."""
NOTHING = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bounds:
    """For each tile: the position of its first query and its row's context, on the host. `height` of all tiles."""

    height: int
    first: np.ndarray
    context: np.ndarray
    static_context: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tiles:
    """What a pass knows of its tiles, on the device; g tiles, h rows each. `begin`, `end`: the keys each query sees.

    tokens [g, h] rows of q; position, begin, end [g, h]; table [g, W].
    """

    tokens: torch.Tensor
    position: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    table: torch.Tensor
    low: int
    high: int


class TorchPath(Path):
    """Gathers keys and values, then multiplies in float32."""

    name = "torch"
    discard_blocks = 1
    decode_q = 1

    def working_bytes(self, spec: PoolSpec) -> int:
        """Kept: nothing. Temporaries: scores, gathered keys and values in two forms, queries and results."""
        limits, layers = spec.limits, [layer for group in spec.groups for layer in group.layers]
        width = max(max(layer.k_dim, layer.v_dim) for layer in layers)
        heads = max(layer.q_heads for layer in layers)
        tile = TALL * heads * KEYS
        scores = min(max(BUDGET, tile), (limits.tokens // TALL + limits.rows + 1) * tile)
        keys = min(max(BUDGET, heads * KEYS * width), limits.tokens * heads * KEYS * width)
        rows = (limits.tokens + TALL * (limits.rows + 1)) * heads * (width + 1)
        return 4 * (4 * scores + 5 * keys + 4 * rows)

    def working(self, spec: PoolSpec, device: str) -> Any:
        return None

    def staging_bytes(self, spec: PoolSpec, group: GroupSpec) -> int:
        return table_bytes(spec, group, 0, 8)

    def arrays(self, batch: Staged, num_blocks: int) -> Arrays:
        row, first, height = _tiles(batch)
        starts = batch.starts
        count = np.minimum(starts[row + 1] - first, height)
        return {
            "slots": np.where(batch.slots < 0, num_blocks * batch.block_size, batch.slots),
            "row": row.astype(np.int64),
            "first": first.astype(np.int32),
            "count": count.astype(np.int32),
            "position": (batch.contexts[row] - batch.counts[row] + first - starts[row]).astype(np.int32),
            "context": batch.contexts[row],
            "token_at": _token_at(first, count, height, len(batch.slots) if batch.static else batch.num_tokens),
            "table": batch.table,
        }

    def bounds(self, batch: Staged) -> Bounds:
        row, first, height = _tiles(batch)
        position = batch.contexts[row] - batch.counts[row] + first - batch.starts[row]
        static = batch.most_context if batch.static else None
        return Bounds(height=height, first=position, context=batch.contexts[row], static_context=static)

    def append(self, plan: CudaPlan, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> None:
        slots = plan.arrays["slots"]
        size = layer.keys.shape[2]
        block, offset = slots // size, slots % size
        for cache, scale, rows in ((layer.keys, layer.k_scale, k), (layer.values, layer.v_scale, v)):
            _put(cache, scale, (block, slice(None), offset), rows[: len(slots)])

    def attend(
        self, plan: CudaPlan, layer: Layer, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        spec, height = layer.spec, plan.bounds.height
        rows = len(plan.arrays["row"]) * height
        result = torch.zeros(rows + 1, spec.q_heads, spec.v_dim, device=out.device)
        logs = torch.full((rows + 1, spec.q_heads), NOTHING, device=out.device)
        for part in _passes(spec, height, len(plan.arrays["row"])):
            tiles = _gathered(plan, spec, part, len(q))
            target = slice(part.start * height, part.stop * height)
            result[target], logs[target] = _attend(layer, q, tiles)
        where = plan.arrays["token_at"]
        out[: len(where)].copy_(result.index_select(0, where))
        if lse is not None:
            lse[: len(where)].copy_(logs.index_select(0, where))

    def copy(self, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, device: str) -> None:
        copy_rows(source, target, pairs)


def _put(cache: torch.Tensor, scale: torch.Tensor | None, at: Any, rows: torch.Tensor) -> None:
    """Rows [A, heads, dim] to where `at` points in the cache; a scale of each token is made here."""
    if scale is None:
        cache[at] = rows.to(cache.dtype)
        return
    x, used = rows.float(), scale
    if scale.ndim == 3:
        used = x.abs().amax(-1).div_(_largest(cache.dtype))
        scale[at] = used = used.masked_fill_(used == 0, 1.0)
    _raw(cache)[at] = _codes(x / used.unsqueeze(-1), cache.dtype)


def _codes(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quotients as codes, ties to even, what is beyond the largest number as that."""
    most = _largest(dtype)
    if dtype == torch.int8:
        return y.nan_to_num().round_().clamp_(-most, most).to(dtype)
    return _raw(y.clamp(-most, most).to(dtype))


def _largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def _raw(cache: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes, which every operator moves."""
    return cache.view(torch.uint8) if cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else cache


def _numbers(cache: torch.Tensor, scale: torch.Tensor | None, at: Any) -> torch.Tensor:
    """What `at` points to, in float32."""
    numbers = _raw(cache)[at].view(cache.dtype).float()
    if scale is None:
        return numbers
    used = scale[at] if scale.ndim == 3 else scale
    return numbers.mul_(used.unsqueeze(-1))


def _tiles(batch: Staged) -> tuple[np.ndarray, np.ndarray, int]:
    """(row of each tile, its first query token, height of all); the longest contexts first, but in a static plan."""
    height = 1 if batch.static else min(TALL, 1 << (int(batch.counts.max(initial=1)) - 1).bit_length())
    numbers = np.ones_like(batch.counts) if batch.static else -(-batch.counts // height)
    row = np.repeat(np.arange(len(batch.counts)), numbers)
    place = np.arange(len(row)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    first = batch.starts[row] + place * height
    if not batch.static:
        order = np.argsort(-batch.contexts[row], kind="stable")
        row, first = row[order], first[order]
    return row, first, height


def _token_at(first: np.ndarray, count: np.ndarray, height: int, tokens: int) -> np.ndarray:
    """int64 [tokens]: where each query token's result lies among the tiles' rows; past them for one that is padding."""
    where = np.full(tokens, len(first) * height, np.int64)
    offsets = np.arange(height)
    used = offsets < count[:, None]
    token = (first[:, None] + offsets)[used]
    where[token] = np.arange(len(first) * height).reshape(-1, height)[used]
    return where


def _passes(spec: LayerSpec, height: int, tiles: int) -> Iterator[slice]:
    """So many tiles at a time as the budget allows."""
    scores, keys = spec.q_heads * height * KEYS, spec.q_heads * KEYS * max(spec.k_dim, spec.v_dim)
    step = max(1, min(BUDGET // scores, BUDGET // keys))
    for start in range(0, tiles, step):
        yield slice(start, min(start + step, tiles))


def _gathered(plan: CudaPlan, spec: LayerSpec, part: slice, length: int) -> Tiles:
    """The tiles of a pass, and between which positions the keys of all of them lie."""
    arrays, bounds = plan.arrays, plan.bounds
    offsets = torch.arange(bounds.height, dtype=torch.int32, device=arrays["row"].device)
    context = arrays["context"][part, None]
    position = arrays["position"][part, None] + offsets
    end = torch.minimum(context, position + 1) if spec.causal else context.expand_as(position)
    end = torch.where(offsets < arrays["count"][part, None], end, 0)
    begin = torch.zeros_like(position) if spec.window is None else (position - spec.window + 1).clamp_(min=0)
    first, last = int(bounds.first[part].min()), int(bounds.context[part].max())
    static = bounds.static_context
    return Tiles(
        tokens=(arrays["first"][part, None] + offsets).clamp_(max=max(0, length - 1)),
        position=position,
        begin=begin,
        end=end,
        table=arrays["table"].index_select(0, arrays["row"][part]),
        low=0 if spec.window is None or static is not None else max(0, first - spec.window + 1),
        high=last if static is None else static,
    )


def _attend(layer: Layer, q: torch.Tensor, tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor]:
    """(result [g * h, q_heads, v_dim], log of the denominators [g * h, q_heads]), float32, of the tiles' rows."""
    spec, (count, height) = layer.spec, tiles.tokens.shape
    heads = _head_rows(spec)
    picked = q.index_select(0, tiles.tokens.view(-1)).float().mul_(spec.scale)
    queries = picked.view(count, height, heads, -1, spec.k_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    shape = queries.shape[:3]
    top = torch.full(shape, NOTHING, device=q.device)
    total, sums = torch.zeros(shape, device=q.device), torch.zeros(*shape, spec.v_dim, device=q.device)
    for start in range(tiles.low, tiles.high, KEYS):
        keys, values, seen = _keys(layer, tiles, start)
        scores = _scores(layer, queries, keys, tiles, start)
        scores = scores.masked_fill_(~_by_group(seen, spec), NOTHING)
        higher = torch.maximum(top, scores.amax(-1))
        base = higher.masked_fill(higher == NOTHING, 0.0)
        weights = scores.sub_(base.unsqueeze(-1)).exp_()
        shrink = (top - base).exp_()
        total = total * shrink + weights.sum(-1)
        sums = sums * shrink.unsqueeze(-1) + _weighted(weights, values, seen, spec)
        top = higher
    return _finished(layer, top, total, sums, height)


def _head_rows(spec: LayerSpec) -> int:
    """KV heads as the products see them: where groups are unequal, each query head has a copy of its own."""
    return spec.q_heads if spec.q_heads % spec.kv_heads else spec.kv_heads


def _keys(layer: Layer, tiles: Tiles, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values [g, heads, KEYS, dim] in float32 from position `start` on, and who sees them [g, h, KEYS].

    What no query of its tile sees is zero, whatever lies there.
    """
    size = layer.keys.shape[2]
    at = torch.arange(start, start + KEYS, dtype=torch.int32, device=tiles.table.device)
    seen = (at >= tiles.begin.unsqueeze(-1)) & (at < tiles.end.unsqueeze(-1))
    block = tiles.table.index_select(1, (at // size).clamp_(max=tiles.table.shape[1] - 1))
    used = seen.any(1)
    block = block.masked_fill_(~used, 0)
    where = (block, slice(None), (at % size).expand_as(block))
    hidden = ~used[:, :, None, None]
    keys, values = (
        _numbers(cache, scale, where).masked_fill_(hidden, 0.0).transpose(1, 2)
        for cache, scale in ((layer.keys, layer.k_scale), (layer.values, layer.v_scale))
    )
    if layer.spec.q_heads % layer.spec.kv_heads:
        heads = torch.arange(layer.spec.q_heads, device=keys.device) * layer.spec.kv_heads // layer.spec.q_heads
        keys, values = keys.index_select(1, heads), values.index_select(1, heads)
    return keys, values, seen


def _scores(layer: Layer, queries: torch.Tensor, keys: torch.Tensor, tiles: Tiles, start: int) -> torch.Tensor:
    """Scaled products, softcapped, with the position bias: [g, heads, group * h, KEYS]."""
    spec = layer.spec
    scores = queries @ keys.transpose(2, 3)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if spec.alibi:
        at = torch.arange(start, start + KEYS, dtype=torch.float32, device=queries.device)
        distance = at - tiles.position.unsqueeze(-1)
        slopes = layer.alibi.view(_head_rows(spec), -1)
        scores += (slopes[None, :, :, None, None] * distance[:, None, None]).flatten(2, 3)
    return scores


def _by_group(seen: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """[g, h, KEYS] for every head and every query of its group: [g, 1, group * h, KEYS]."""
    group = spec.q_heads // _head_rows(spec)
    return seen.unsqueeze(1).expand(-1, group, -1, -1).flatten(1, 2).unsqueeze(1)


def _weighted(weights: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """weights x values. 0 x NaN is NaN: where queries share keys, one that is not finite reaches only who sees it."""
    if seen.shape[1] == 1:
        return weights @ values
    wild = ~torch.isfinite(values)
    product = weights @ values.masked_fill(wild, 0.0)
    touched = _by_group(seen, spec).float() @ wild.float()
    return product.masked_fill_(touched > 0, float("nan"))


def _finished(
    layer: Layer, top: torch.Tensor, total: torch.Tensor, sums: torch.Tensor, height: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sinks, the division, and the order of q."""
    spec, count, heads = layer.spec, len(top), top.shape[1]
    if spec.sinks:
        sinks = layer.sinks.view(heads, -1, 1).expand(-1, -1, height).reshape(1, heads, -1)
        higher = torch.maximum(top, sinks)
        shrink = (top - higher).exp_()
        total = total * shrink + (sinks - higher).exp_()
        sums, top = sums * shrink.unsqueeze(-1), higher
    result = sums.div_(total.masked_fill(total == 0, 1.0).unsqueeze(-1))
    logs = total.log_().add_(top.masked_fill(top == NOTHING, 0.0))
    ordered = result.view(count, heads, -1, height, spec.v_dim).permute(0, 3, 1, 2, 4)
    logs = logs.view(count, heads, -1, height).permute(0, 3, 1, 2)
    return ordered.reshape(count * height, spec.q_heads, spec.v_dim), logs.reshape(count * height, spec.q_heads)
