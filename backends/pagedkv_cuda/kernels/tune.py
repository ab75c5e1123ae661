"""Measures tiles on the card at hand and writes its family's part of tiles.json: `python -m pagedkv_cuda.kernels.tune`.

Each entry of the table is tried in every candidate tile on one shape: few queries are 32 rows over 2,048 tokens each,
many are one prompt of 4,096. The fastest median wins. Not yet run on hardware.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from pagedkv_cuda.kernels.arguments import Cache, Layer, Rows
from pagedkv_cuda.kernels.attention import Choice, attend, scratch_floats
from pagedkv_cuda.kernels.tiles import TABLE, Tile, family, table, target_of

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
Measure = Callable[[str, str, int, Tile], float]
"""(kernel, bytes, head dim, tile) -> milliseconds."""


def candidates(kernel: str) -> Iterator[Tile]:
    """Tiles worth a try."""
    heights = (16,) if kernel == "few" else (16, 32, 64, 128)
    for height, width, warps, stages in itertools.product(heights, (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)):
        yield Tile(height, width, warps, stages)


def fastest(kernel: str, size: str, dim: int, measure: Measure) -> Tile | None:
    """The tile of the least time; None where none runs. One that does not fit the device is reported and left out."""
    times: dict[Tile, float] = {}
    for tile in candidates(kernel):
        try:
            times[tile] = measure(kernel, size, dim, tile)
        except (TritonError, RuntimeError) as error:
            _log.info("%s, %s bytes, dim %d: %s does not run: %s", kernel, size, dim, tile, error)
    return min(times, key=lambda tile: times[tile]) if times else None


def tuned(name: str, measure: Measure) -> dict[str, dict[str, dict[str, dict[str, list[int]]]]]:
    """The whole table, the family `name` measured anew; where nothing ran its old entry stays, with a warning."""
    made = json.loads(json.dumps(table()))
    for kernel, sizes in made[name].items():
        for size, dims in sizes.items():
            for dim in dims:
                best = fastest(kernel, size, int(dim), measure)
                if best is None:
                    _log.warning("%s, %s bytes, dim %s: no tile ran, the old one stays", kernel, size, dim)
                else:
                    dims[dim] = [best.block_m, best.block_n, best.warps, best.stages]
    return made  # type: ignore[no-any-return]


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
    name = family(target_of(torch.device("cuda")))
    path.write_text(spelt(tuned(name, on_card)), "utf-8")
    _log.info("tiles of family %s written to %s", name, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
