"""Launches `attend`: few queries a row by splits over their keys and a merge, many queries by tiles, both in one batch.

The first `num_decode` rows go to the kernel for few queries, one tile a row, the others to tiles of queries; a mixed
batch is one launch of each. How many splits is decided by the numbers in `Rows`, never by what the device holds, so
that a captured launch stays right for every batch within them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from pagedkv.api.errors import UnsupportedError
from pagedkv_cuda.kernels.arguments import Cache, Layer, Rows
from pagedkv_cuda.kernels.formats import NATIVE_E4M3, format_of, scale_of, stored
from pagedkv_cuda.kernels.grids import one_axis, power_of_two
from pagedkv_cuda.kernels.jit_attention import LOG2E, attend_tile, merge_splits
from pagedkv_cuda.kernels.tiles import (
    DESCRIPTOR_BLOCKS,
    DESCRIPTOR_TARGET,
    Tile,
    processors,
    shared_of,
    target_of,
    tile_for,
)

MOST_SPLITS = 64
PROGRAMS_EACH = 4
"""Programs wanted on each multiprocessor before keys are split no further."""
LEAST_SPAN = 256
"""Keys of a split that is worth its merge."""
MERGED_AT_ONCE = 8
LARGEST_GROUP = 128
DESCRIPTOR_BLOCK = {"few": 16, "many": 64}
"""From which block size on descriptors are used. A box lies within one block and is a product of its own: narrow
products cost nothing where memory sets the pace, and do for many queries, where a product of four warps wants 64 keys.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What may be fixed instead of chosen.

    `span`: keys of a split, a multiple of the tile's: with it a row's bits do not depend on the other rows.
    `descriptors`: whether keys and values come by descriptor. `tile`: for both kernels, instead of the table's.
    """

    span: int | None = None
    descriptors: bool | None = None
    tile: Tile | None = None


CHOSEN = Choice()


def scratch_floats(q_heads: int, v_dim: int, rows: int, decode_q: int = 1) -> int:
    """Floats of `scratch` that serve every batch of at most `rows` rows with few queries."""
    return rows * decode_q * q_heads * MOST_SPLITS * (v_dim + 1)


def attend(
    q: torch.Tensor,
    out: torch.Tensor,
    cache: Cache,
    layer: Layer,
    rows: Rows,
    scratch: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    target: int | None = None,
    choice: Choice = CHOSEN,
) -> None:
    """Attention of q [>= T, q_heads, k_dim] over the cache into out [>= T, q_heads, v_dim], contiguous; all enqueued.

    `lse` [>= T, q_heads] float32 takes the natural logarithm of each softmax denominator. `scratch` is float32 of
    `scratch_floats` or fewer: with less room keys are split less. Rows of out past T are left alone.
    Raises `UnsupportedError` for dtypes, head dims, groups and capabilities that these kernels do not have.
    """
    launch = Launch(q, out, cache, layer, rows, scratch, lse, target or target_of(q.device), choice)
    if launch.few:
        launch.few_queries()
    if rows.num_seqs > launch.few:
        launch.many_queries()


class Launch:
    """One call of `attend`: what its launches have in common."""

    def __init__(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        cache: Cache,
        layer: Layer,
        rows: Rows,
        scratch: torch.Tensor,
        lse: torch.Tensor | None,
        target: int,
        choice: Choice,
    ) -> None:
        self._q, self._out, self._lse, self._scratch = q, out, lse, scratch
        self._cache, self._layer, self._rows = cache, layer, rows
        self._target, self._choice = target, choice
        self._kind = format_of(cache, q.dtype)
        self._group = -(-layer.q_heads // layer.kv_heads)
        if self._group > LARGEST_GROUP:
            raise UnsupportedError([f"{self._group} query heads share a KV head; these kernels take {LARGEST_GROUP}"])
        self._dims = cache.keys.shape[3], cache.values.shape[3]
        fits = rows.decode_q * self._group <= LARGEST_GROUP
        self.few = rows.num_decode if fits else 0

    def few_queries(self) -> None:
        """The first rows: one tile each, their keys in splits."""
        layer, rows = self._layer, self._rows
        tile = self._tile("few", rows.decode_q * self._group)
        splits, span = self._splits(tile)
        grid = one_axis(self.few * layer.kv_heads * splits, "attention of few queries")
        self._run("few", grid, tile, 0, self.few, splits, span)
        if splits > 1:
            self._merge(splits)

    def many_queries(self) -> None:
        """The rows after them: tiles of queries, each over all of its keys."""
        rows = self._rows
        tile = self._tile("many", self._group)
        count = rows.num_seqs - self.few
        tiles = rows.num_tokens // (tile.block_m // self._group) + count
        grid = one_axis(tiles * self._layer.kv_heads, "attention of many queries")
        self._run("many", grid, tile, self.few, count, 1, max(rows.max_ctx, 1) + tile.block_n)

    def _tile(self, kernel: str, least: int) -> Tile:
        """The table's tile, tall enough for `least` rows and small enough for the device."""
        if self._choice.tile is None:
            shared = shared_of(self._q.device)
            return tile_for(kernel, self._target, self._bytes(), max(self._dims), least=least, shared=shared)
        return replace(self._choice.tile, block_m=max(self._choice.tile.block_m, power_of_two(least)))

    def _bytes(self) -> int:
        """How the table counts this product: a quantized cache under 16-bit queries needs registers to decode."""
        size = self._q.element_size()
        return 1 if size == 2 and self._kind != "plain" else size

    def _splits(self, tile: Tile) -> tuple[int, int]:
        """(splits, keys of each) for the longest context within the rows' bounds."""
        layer, rows = self._layer, self._rows
        extent = max(rows.max_ctx, 1)
        if layer.window is not None:
            extent = min(extent, layer.window + rows.decode_q - 1 + tile.block_n)
        room = self._scratch.numel() // (self.few * rows.decode_q * layer.q_heads * (self._dims[1] + 1))
        most = max(1, min(MOST_SPLITS, room))
        if self._choice.span is not None:
            wanted = -(-extent // self._choice.span)
            if self._choice.span % tile.block_n:
                raise UnsupportedError([f"splits of {self._choice.span} keys: give a multiple of {tile.block_n}"])
            if wanted > most:
                raise UnsupportedError([f"{wanted} splits of {self._choice.span} keys, there is room for {most}"])
            return wanted, self._choice.span
        programs = PROGRAMS_EACH * processors(self._q.device)
        wanted = min(-(-programs // (self.few * layer.kv_heads)), -(-extent // LEAST_SPAN))
        steps = -(-extent // tile.block_n)
        each = -(-steps // max(1, min(most, wanted)))
        return -(-steps // each), each * tile.block_n

    def _run(self, kernel: str, grid: tuple[int], tile: Tile, first: int, count: int, splits: int, span: int) -> None:
        cache, layer, rows = self._cache, self._layer, self._rows
        k_scale, v_scale = scale_of(cache.k_scale, cache.keys), scale_of(cache.v_scale, cache.values)
        part, part_lse = self._parts(splits)
        keys, values = self._stored(cache.keys), self._stored(cache.values)
        given = self._boxes(keys, values, tile) if self._descriptors(kernel) else (keys, values)
        attend_tile[grid](
            self._q, self._out, self._lse if self._lse is not None else self._scratch, part, part_lse, *given,
            k_scale, v_scale, rows.cu_q, rows.ctx_len, rows.block_table, rows.rows,
            layer.sinks if layer.sinks is not None else self._scratch,
            layer.alibi if layer.alibi is not None else self._scratch,
            first, count, span, splits, self._scale(), layer.softcap or 1.0, self._q.stride(0),
            *keys.stride()[:3], *values.stride()[:3], *k_scale.stride(), *v_scale.stride(), rows.block_table.stride(0),
            **self._constants(kernel, tile, splits), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _merge(self, splits: int) -> None:
        layer, rows = self._layer, self._rows
        part, part_lse = self._parts(splits)
        grid = one_axis(self.few * rows.decode_q * layer.q_heads, "merging splits")
        merge_splits[grid](
            self._out, self._lse if self._lse is not None else self._scratch, part, part_lse, rows.cu_q,
            layer.sinks if layer.sinks is not None else self._scratch, self.few, splits,
            Q_HEADS=layer.q_heads, DV=self._dims[1], BLOCK_DV=power_of_two(self._dims[1]), AT_ONCE=MERGED_AT_ONCE,
            SINKS=layer.sinks is not None, LSE=self._lse is not None, num_warps=4,
        )  # fmt: skip

    def _constants(self, kernel: str, tile: Tile, splits: int) -> dict[str, Any]:
        layer, (k_dim, v_dim) = self._layer, self._dims
        return {
            "Q_HEADS": layer.q_heads, "KV_HEADS": layer.kv_heads, "DK": k_dim, "DV": v_dim,
            "BLOCK_DK": power_of_two(k_dim), "BLOCK_DV": power_of_two(v_dim), "BLOCK_SIZE": self._cache.keys.shape[2],
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "GROUP": self._group, "SPLIT": splits > 1,
            "UNIFORM": kernel == "few", "CAUSAL": layer.causal, "WINDOW": layer.window or 0,
            "SOFTCAP": layer.softcap is not None, "SINKS": layer.sinks is not None, "ALIBI": layer.alibi is not None,
            "FORMAT": self._format(), "SCALED": self._kind != "plain", "DESCRIPTORS": self._descriptors(kernel),
            "LSE": self._lse is not None,
        }  # fmt: skip

    def _parts(self, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What splits leave: values [tokens, q_heads, splits, v_dim] and logarithms, both within scratch."""
        places = self.few * self._rows.decode_q * self._layer.q_heads * splits if splits > 1 else 0
        return self._scratch, self._scratch[places * self._dims[1] :]

    def _scale(self) -> float:
        return self._layer.scale if self._layer.softcap is not None else self._layer.scale * LOG2E.value

    def _format(self) -> str:
        return "e4m3_native" if self._kind == "e4m3" and self._target >= NATIVE_E4M3 else self._kind

    def _stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return stored(tensor, self._kind)

    def _descriptors(self, kernel: str) -> bool:
        block_size = self._cache.keys.shape[2]
        possible = self._target >= DESCRIPTOR_TARGET and block_size in DESCRIPTOR_BLOCKS and self._aligned()
        if self._choice.descriptors is None:
            narrow = self._q.element_size() == 2  # float32's scalar products spill beside them
            return possible and narrow and block_size >= DESCRIPTOR_BLOCK[kernel]
        if self._choice.descriptors and not possible:
            raise UnsupportedError(
                [f"descriptors for blocks of {block_size} on {self._target}: leave `descriptors` unset"]
            )
        return self._choice.descriptors

    def _aligned(self) -> bool:
        """Whether a descriptor may stand on the cache: 16 bytes for its address and strides."""
        caches = (self._cache.keys, self._cache.values)
        strides = [stride * cache.element_size() for cache in caches for stride in cache.stride()[:3]]
        return all(number % 16 == 0 for number in (*strides, *(cache.data_ptr() for cache in caches)))

    def _boxes(self, keys: torch.Tensor, values: torch.Tensor, tile: Tile) -> list[Any]:
        """Descriptors of rows from within one block: a whole tile of keys, or one of several boxes of it."""
        height = min(tile.block_n, self._cache.keys.shape[2])
        return [
            TensorDescriptor(cache, cache.shape, cache.stride(), [1, 1, height, power_of_two(cache.shape[3])])
            for cache in (keys, values)
        ]
