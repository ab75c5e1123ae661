"""Working memory of attention: how much a pool's limits call for, and the one buffer it is cut from.

Attention works in passes; a pass's scores fit `scores`, one chunk of keys of all its sequences fits `rows`. Both are as
large as the limits can fill, at most the budgets below, at least what one token at full context needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedkv.api import GroupSpec, LayerSpec, PoolSpec
from pagedkv.api.torch import DTYPES

ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}

CHUNK = 128
"""Keys per product. Fixed: with it the shape of every product, and so the bits of every row, are fixed too."""
TALL = 16
"""Query rows per product where there are many; a few need shorter tiles, see `planning.tile_height`."""
WASTE = 24
"""Chunks of keys, summed over KV heads, that a pass may read for nothing to save a second pass."""
WIDTH = 8
"""Rows are padded to a multiple of this: with odd widths a product's bits depend on the row's place in it."""
SCORE_BUDGET = 4 << 20
ROW_BUDGET = 2 << 20


def padded(dim: int) -> int:
    """`dim` rounded up to a multiple of `WIDTH`."""
    return up(dim, WIDTH)


def up(count: int, step: int) -> int:
    """`count` rounded up to a multiple of `step`."""
    return -(-count // step) * step


def group_size(layer: LayerSpec) -> int:
    """The most query heads that read one KV head."""
    return -(-layer.q_heads // layer.kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Elements of each part of the scratch, `width` of the widest row, and all fixed bytes of a pool."""

    queries: int
    tiles: int
    rows: int
    scores: int
    raw: int
    width: int
    fixed_bytes: int

    @classmethod
    def of(cls, spec: PoolSpec) -> Sizes:
        """What `spec` calls for: pure arithmetic."""
        limits, layers = spec.limits, [layer for group in spec.groups for layer in group.layers]
        chunks = max(1, -(-limits.context // CHUNK))
        width = max(padded(max(layer.k_dim, layer.v_dim)) for layer in layers)
        heads = max(layer.kv_heads for layer in layers)
        per_token = max(layer.kv_heads * up(group_size(layer), TALL) for layer in layers) + TALL
        all_tiles = max(layer.kv_heads * group_size(layer) for layer in layers) * limits.tokens
        all_tiles += 2 * heads * TALL * (limits.rows + 1)
        scores = CHUNK * chunks * min(all_tiles, max(per_token, SCORE_BUDGET // (CHUNK * chunks)))
        columns = min(heads * chunks * limits.rows, max(heads, ROW_BUDGET // (CHUNK * width)))
        queries = limits.tokens * max(layer.q_heads for layer in layers) * width
        narrow = any(group.kv_dtype != "fp32" for group in spec.groups)
        raw = columns * CHUNK * width if narrow else 0
        tiles, rows = scores // CHUNK * width, columns * CHUNK * width
        biased = any(layer.alibi for layer in layers)
        fixed = 4 * (queries + 2 * tiles + rows + scores) + 2 * raw
        fixed += 4 * (6 * scores // CHUNK + 2 * scores * biased)  # maxima, sums; position biases
        fixed += 4 * 3 * queries  # converted copies of k, v, and of a pass's result
        fixed += limits.plans * sum(_plan_bytes(group, spec) for group in spec.groups)
        return cls(queries=queries, tiles=tiles, rows=rows, scores=scores, raw=raw, width=width, fixed_bytes=fixed)


def _plan_bytes(group: GroupSpec, spec: PoolSpec) -> int:
    """An upper bound of what one live plan of `group` holds, see `planning`."""
    limits = spec.limits
    chunks = max(1, -(-limits.context // CHUNK))
    total = 4 * limits.rows * -(-limits.context // group.block_size) + 48 * limits.rows + 24 * limits.tokens
    for shape in {(layer.q_heads, layer.kv_heads, layer.causal, layer.window) for layer in group.layers}:
        query_heads, kv_heads, _, window = shape
        size = -(-query_heads // kv_heads)
        padded_rows = 2 * limits.tokens * size + 2 * TALL * (limits.tokens // CHUNK + 2 * limits.rows + 2)
        edges = 1 if window is None else 3
        total += 4 * (2 * limits.rows * chunks * CHUNK)  # slots to gather, twice where rows are looked at singly
        total += 4 * padded_rows * (kv_heads * 3 + edges * CHUNK)  # row maps, what is hidden at the edges
        total += 4 * limits.rows * CHUNK * (WASTE + 4)
    return total


class Scratch:
    """Fixed buffers shared by all layers of a pool: attention runs one layer at a time.

    queries: scaled queries; tiles: queries cut to tiles; result: what tiles give; rows: gathered keys or values;
    scores: products, then weights; raw: rows before their conversion to fp32. All but `raw` are fp32.
    """

    def __init__(self, spec: PoolSpec) -> None:
        self.sizes = sizes = Sizes.of(spec)
        self.queries = torch.empty(sizes.queries)
        self.tiles = torch.empty(sizes.tiles)
        self.result = torch.empty(sizes.tiles)
        self.rows = torch.empty(sizes.rows)
        self.scores = torch.empty(sizes.scores)
        self._raw = torch.empty(2 * sizes.raw, dtype=torch.uint8)

    def raw(self, dtype: torch.dtype) -> torch.Tensor:
        """The buffer for rows of a two-byte dtype."""
        return self._raw.view(dtype)
