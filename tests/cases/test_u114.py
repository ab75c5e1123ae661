"""U114: tiles fit what the device says it has, and no launch is larger than a device starts at once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api.errors import UnsupportedError
from pagedkv_cuda import copies, jit_copy
from pagedkv_cuda.kernels import append, attention, ops, sampling
from pagedkv_cuda.kernels.arguments import Cache, Layer, Rows
from pagedkv_cuda.kernels.tiles import SHARED_LIMIT, Tile, table, tile_for

KIB = 1024
LEAST_HELD = {1: (2, 1), 2: (2, 2), 4: (4, 4)}
"""The table's bytes: bytes of an entry of q, of the cache."""
SEQUENCES, TOKENS = 384, 50_000
LIMITS = (2**31 - 1, 65_535, 65_535)
"""Programs on x, y, z. Source: CUDA C++ Programming Guide, technical specifications per compute capability."""


def held(tile: Tile, size: int, dim: int) -> int:
    """Bytes that a program cannot do without: its queries, and the keys and values of every step but the newest."""
    query, entry = LEAST_HELD[size]
    width = 1 << (dim - 1).bit_length()
    return tile.block_m * width * query + max(1, tile.stages - 1) * 2 * tile.block_n * width * entry


@pytest.mark.parametrize("shared", [64 * KIB, 99 * KIB, 192 * KIB])
@pytest.mark.parametrize("target", [80, 90, 120])
def test_u114_tiles_fit_the_buffer_that_is_given(shared: int, target: int) -> None:
    for kernel, size, dim in itertools.product(("few", "many"), (1, 2, 4), (64, 80, 96, 128, 192, 256)):
        tile = tile_for(kernel, target, size, dim, shared=shared)
        assert held(tile, size, dim) < shared
        assert tile.block_m >= 16 and tile.block_n >= 16 and tile.stages >= 1
        assert tile.block_m & (tile.block_m - 1) == tile.block_n & (tile.block_n - 1) == 0


def test_u114_a_small_buffer_takes_stages_first_then_keys_then_queries() -> None:
    whole = tile_for("many", 80, 2, 128)
    seen = [tile_for("many", 80, 2, 128, shared=room * KIB) for room in range(160, 16, -1)]
    assert seen[0] == whole == Tile(*table()["80"]["many"]["2"]["128"])
    sizes = [(tile.stages, tile.block_n, tile.block_m) for tile in seen]
    assert sizes == sorted(sizes, reverse=True), "a smaller buffer never gives a larger tile"
    assert {(whole.stages, whole.block_n, whole.block_m), (1, 16, 16)} <= set(sizes)


def test_u114_a_tall_group_counts_and_what_fits_nowhere_is_refused() -> None:
    tall = tile_for("few", 86, 2, 256, least=128)
    assert tall.block_m == 128 and held(tall, 2, 256) < SHARED_LIMIT[86] * KIB
    with pytest.raises(UnsupportedError, match=r"no tile of 128 rows fits 49152 bytes.*smaller head dim"):
        tile_for("few", 86, 2, 256, least=128, shared=48 * KIB)


# -- launches ----------------------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """In a kernel's place: the grids and the constants of its launches."""

    grids: list[tuple[int, ...]] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *arguments, **constants: self.given.append(constants)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    kernels = {
        attention: ("attend_tile", "merge_splits"),
        append: ("append_tile",),
        ops: ("norm_row", "turn_heads", "gate_block"),
        sampling: ("greedy_row", "sample_row"),
        jit_copy: ("copy_rows",),
    }
    for module, names in kernels.items():
        for name in names:
            monkeypatch.setattr(module, name, recorder)
    return recorder


def anything(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of this shape that holds nothing."""
    return torch.empty(shape, dtype=dtype, device="meta")


def attend(rows: list[int], block_size: int = 16, dim: int = 128, target: int = 80, decode: bool = False) -> None:
    """Attention of rows of so many tokens over as many; with `decode` of their last one."""
    counts = [1] * len(rows) if decode else rows
    held = [anything(4, 8, block_size, dim) for _ in "kv"]
    ints = anything(len(rows) + 1, dtype=torch.int32)
    attention.attend(
        anything(sum(counts), 32, dim), anything(sum(counts), 32, dim), Cache(keys=held[0], values=held[1]),
        Layer(q_heads=32, kv_heads=8, scale=1.0),
        Rows(cu_q=ints, ctx_len=ints, block_table=ints[None], rows=ints, num_seqs=len(rows), num_tokens=sum(counts),
             max_ctx=max(rows), num_decode=len(rows) if decode else 0),
        anything(attention.scratch_floats(32, dim, len(rows)), dtype=torch.float32), target=target,
    )  # fmt: skip


def launch_all(sequences: int, tokens: int) -> None:
    """Every launcher over `sequences` rows of `tokens` tokens each."""
    total = sequences * tokens
    x, slots = anything(total, 4096), anything(total, dtype=torch.int64)
    cache = Cache(keys=anything(4, 8, 16, 128), values=anything(4, 8, 16, 128))
    heads, angles = anything(total, 32, 128), anything(total, 64, dtype=torch.float32)
    numbers, ids = anything(total, dtype=torch.float32), anything(total, dtype=torch.int32)
    attend([tokens] * sequences)
    attend([tokens] * sequences, decode=True)
    append.append(heads[:, :8], heads[:, :8], cache, slots)
    ops.rms_norm(heads, x[0, :128], 1e-5)
    ops.add_rms_norm(x, x, x[0], 1e-5)
    ops.rope(heads, heads[:, :8], angles, angles)
    ops.silu_mul(x), ops.gelu_tanh_mul(x)
    sampling.greedy(x), sampling.sample(x, numbers, numbers, ids, numbers)
    copies.by_kernel(
        anything(9, 8 << 20, dtype=torch.uint8), anything(9, 8 << 20, dtype=torch.uint8), slots[:9], "meta"
    )


def test_u114_no_launch_is_larger_than_a_device_starts(launched: Recorder) -> None:
    launch_all(SEQUENCES, TOKENS)
    assert len(launched.grids) >= 11
    for grid in launched.grids:
        assert all(0 < count <= limit for count, limit in zip(grid, LIMITS, strict=False)), grid
    assert max(map(np.prod, launched.grids)) > SEQUENCES * TOKENS  # a second axis would have ended long before


def test_u114_what_no_device_starts_is_refused_before_the_launch(launched: Recorder) -> None:
    with pytest.raises(UnsupportedError, match="split the batch"):
        ops.rms_norm(anything(1 << 26, 64, 16), anything(16), 1e-5)
    assert launched.grids == []


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_u114_boxes_of_a_block_make_up_a_tile(launched: Recorder, block_size: int, dim: int) -> None:
    attend([300, 17], block_size, dim, target=90, decode=True)
    (constants,) = [given for given in launched.given if "BLOCK_N" in given]
    assert constants["DESCRIPTORS"]
    assert (
        constants["BLOCK_N"] % min(block_size, constants["BLOCK_N"]) == 0
        and min(block_size, constants["BLOCK_N"]) >= 16
    )
