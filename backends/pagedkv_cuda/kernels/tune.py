"""Measures tiles on the card at hand and writes its family's part of tiles.json: `python -m pagedkv_cuda.kernels.tune`.

Each entry of the table is tried in every candidate tile on one shape: few queries are 32 rows over 2,048 tokens each,
many are one prompt of 4,096. The fastest median wins, and the file is written after every entry, so that a run that is
broken off keeps what it has. About a thousand kernels are compiled: allow an hour. `make aot` afterwards says whether a
tile spills in a shape that was not measured. Not yet run on hardware.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from pagedkv_cuda.kernels.arguments import Cache, Layer, Rows
from pagedkv_cuda.kernels.attention import Choice, attend, scratch_floats
from pagedkv_cuda.kernels.grids import power_of_two
from pagedkv_cuda.kernels.tiles import (
    SHARED_LIMIT,
    TABLE,
    Tile,
    family,
    nearest,
    shared_bytes,
    shared_of,
    table,
    target_of,
)

_log = logging.getLogger("pagedkv.backends.cuda.tune")

DTYPES = {
    "1": (torch.bfloat16, torch.int8),
    "2": (torch.bfloat16, torch.bfloat16),
    "4": (torch.float32, torch.float32),
}
"""The table's bytes: dtype of queries, of the cache."""
HEADS = (32, 8)
BLOCK_SIZE = 16
REPEATS = 20
MOST_RESULTS = 128
"""float32 of scores and sums that a thread may hold: half of its registers."""
Table = dict[str, dict[str, dict[str, dict[str, list[int]]]]]
Measure = Callable[[str, str, int, Tile], float]
"""(kernel, bytes, head dim, tile) -> milliseconds."""


def candidates(kernel: str, target: int, size: int, dim: int, shared: int | None = None) -> Iterator[Tile]:
    """Tiles worth a try: within the device's shared memory, and results within half of a thread's registers."""
    room = SHARED_LIMIT[nearest(target)] * 1024 if shared is None else shared
    heights = (16,) if kernel == "few" else (16, 32, 64, 128)
    for shape in itertools.product(heights, (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)):
        tile = Tile(*shape)
        results = tile.block_m * (power_of_two(dim) + tile.block_n) // (32 * tile.warps)
        if results <= MOST_RESULTS and shared_bytes(tile, target, size, dim) <= room:
            yield tile


def fastest(kernel: str, size: str, dim: int, tiles: Iterable[Tile], measure: Measure) -> Tile | None:
    """The tile of the least time; None where none runs. One that does not run is reported and left out.

    An error of the device itself is raised: after it nothing that the device says can be trusted.
    """
    times: dict[Tile, float] = {}
    for tile in tiles:
        try:
            times[tile] = measure(kernel, size, dim, tile)
        except torch.AcceleratorError:
            raise
        except (TritonError, RuntimeError) as error:
            _log.info("%s, %s bytes, dim %d: %s does not run: %s", kernel, size, dim, tile, error)
    return min(times, key=lambda tile: times[tile]) if times else None


def tuned(target: int, measure: Measure, shared: int | None = None) -> Iterator[Table]:
    """The whole table after each entry of the target's family; where nothing ran its old entry stays: a warning."""
    made: Table = json.loads(json.dumps(table()))
    for kernel, sizes in made[family(target)].items():
        for size, dims in sizes.items():
            for dim in dims:
                tiles = candidates(kernel, target, int(size), int(dim), shared)
                best = fastest(kernel, size, int(dim), tiles, measure)
                if best is None:
                    _log.warning("%s, %s bytes, dim %s: no tile ran, the old one stays", kernel, size, dim)
                else:
                    _log.info("%s, %s bytes, dim %s: %s", kernel, size, dim, best)
                    dims[dim] = [best.block_m, best.block_n, best.warps, best.stages]
                yield made


def spelt(made: object) -> str:
    """JSON with a tile on one line."""
    return re.sub(r"\[\s*(\d+),\s*(\d+),\s*(\d+),\s*(\d+)\s*\]", r"[\1, \2, \3, \4]", json.dumps(made, indent=1)) + "\n"


def on_card(kernel: str, size: str, dim: int, tile: Tile) -> float:
    """Milliseconds of one call on the current device, the median of several after a warm-up."""
    call = workload(kernel, size, dim, tile, torch.device("cuda"))
    call()
    times: list[float] = []
    for _ in range(REPEATS):
        began, ended = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times)


def workload(kernel: str, size: str, dim: int, tile: Tile, device: torch.device) -> Callable[[], None]:
    """One call of attention on random numbers."""
    count, context, queries = (32, 2048, 1) if kernel == "few" else (1, 4096, 4096)
    dtype, stored = DTYPES[size]
    width = context // BLOCK_SIZE
    shape = (count * width + 1, HEADS[1], BLOCK_SIZE)
    held = [torch.randn((*shape, dim), device=device).to(stored) for _ in range(2)]
    scale = torch.ones((), device=device) if stored == torch.int8 else None
    cache = Cache(keys=held[0], values=held[1], k_scale=scale, v_scale=scale)
    ints: Any = {"dtype": torch.int32, "device": device}
    rows = Rows(
        cu_q=torch.arange(count + 1, **ints) * queries,
        ctx_len=torch.full((count,), context, **ints),
        block_table=torch.arange(1, count * width + 1, **ints).view(count, width),
        rows=torch.arange(count, **ints),
        num_seqs=count,
        num_tokens=count * queries,
        max_ctx=context,
        num_decode=count if kernel == "few" else 0,
    )
    q = torch.randn((count * queries, HEADS[0], dim), device=device).to(dtype)
    out, scratch = torch.empty_like(q), torch.empty(scratch_floats(HEADS[0], dim, count), device=device)
    layer = Layer(q_heads=HEADS[0], kv_heads=HEADS[1], scale=dim**-0.5)
    return lambda: attend(q, out, cache, layer, rows, scratch, choice=Choice(tile=tile))


def main(path: Path = TABLE) -> int:
    """Tune for the current device and write `path`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not torch.cuda.is_available():
        _log.error("tuning needs a CUDA device, and torch finds none: run this on the machine with the card")
        return 1
    device = torch.device("cuda")
    target = target_of(device)
    for made in tuned(target, on_card, shared_of(device)):
        path.write_text(spelt(made), "utf-8")
    _log.info("tiles of family %s written to %s", family(target), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
