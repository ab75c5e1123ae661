"""Sizes of tiles by compute capability, from tiles.json.

    {family: {kernel: {bytes: {head dim: [BLOCK_M, BLOCK_N, warps, stages]}}}}

A capability takes a family within its limits; a head dim takes the entry of the next larger one, made smaller
where the device has less shared memory than that may take. `bytes` are those of an entry of q, or 1 where 16-bit
queries meet a quantized cache. `stages` is how many steps of keys and values are under way at once, the one that is
being multiplied among them. Nothing is tuned while the engine starts:
`python -m pagedkv_cuda.kernels.tune` measures on a card and writes the file anew. The table has not been measured on
hardware: it is what compiles without spilling and within each limit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pagedkv.api.errors import UnsupportedError
from pagedkv_cuda.kernels.grids import power_of_two

TABLE = Path(__file__).with_name("tiles.json")
FAMILIES = {80: "80", 86: "86", 87: "86", 89: "86", 90: "90", 100: "100", 103: "100", 120: "120", 121: "120"}
"""Which family a compute capability takes its tiles from: of those within its limits the one whose registers are
given out alike. 8.7 has the shared memory of 8.0 and spills where 8.6 does.
"""
SHARED_LIMIT = {80: 163, 87: 163, 86: 99, 89: 99, 120: 99, 121: 99, 90: 227, 100: 227, 103: 227}
"""KiB of shared memory that one program can have. Source: CUDA C++ Programming Guide, compute capabilities."""
OLDEST = 80
DESCRIPTOR_TARGET = 90
"""The first compute capability that loads boxes by descriptor (TMA)."""
DESCRIPTOR_BLOCKS = (16, 32, 64, 128, 256)
"""Block sizes that one descriptor load can serve: a box lies within a block, and a product needs 16 keys."""
HOST = 80
"""Whose tiles tensors in host memory take: kernels reach them only under Triton's interpreter."""
WIDEST = 256
LEAST_KEYS = 16
"""A product of two 16-bit tiles is not narrower."""
HELD = {"80": 0.0, "86": 0.0, "90": 1.0, "100": 1.0, "120": 0.5}
"""Steps that keep their place by family while they are multiplied: both tiles, or the values only."""
EXCHANGED = 4096
"""Bytes for what warps tell each other, barriers and padding."""


@dataclass(frozen=True, slots=True)
class Tile:
    """BLOCK_M rows of queries against BLOCK_N keys at a time."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def target_of(device: torch.device) -> int:
    """The compute capability of a device as one number: 8.0 is 80."""
    if device.type != "cuda":
        return HOST
    major, minor = _capability(device.index or 0)
    return 10 * major + minor


def tile_for(
    kernel: str, target: int, itemsize: int, head_dim: int, *, least: int = 16, shared: int | None = None
) -> Tile:
    """The tile of `kernel` ("few" or "many" queries), by `itemsize` of the table's bytes.

    At least `least` rows of queries tall, and within `shared` bytes of shared memory, those of the capability where it
    is None. Raises `UnsupportedError` where there is no such tile.
    """
    by_dim = table()[family(target)][kernel][str(itemsize)]
    fitting = [dim for dim in map(int, by_dim) if dim >= head_dim]
    if not fitting:
        raise UnsupportedError([f"head dim {head_dim} is above {WIDEST}, the largest of these kernels"])
    tile = Tile(*by_dim[str(min(fitting))])
    tile = replace(tile, block_m=max(tile.block_m, power_of_two(least)))
    room = SHARED_LIMIT[nearest(target)] * 1024 if shared is None else shared
    while shared_bytes(tile, target, itemsize, head_dim) > room:
        tile = smaller(tile, power_of_two(least), room)
    return tile


def smaller(tile: Tile, least: int, room: int) -> Tile:
    """The next tile that takes less: fewer steps on their way first, then fewer keys, then fewer queries."""
    if tile.stages > 1:
        return replace(tile, stages=tile.stages - 1)
    if tile.block_n > LEAST_KEYS:
        return replace(tile, block_n=tile.block_n // 2)
    if tile.block_m > least:
        return replace(tile, block_m=tile.block_m // 2)
    raise UnsupportedError(
        [f"no tile of {least} rows fits {room} bytes of shared memory: a smaller head dim or group of query heads does"]
    )


def shared_bytes(tile: Tile, target: int, itemsize: int, head_dim: int) -> int:
    """What a program may take of shared memory at most, as Triton 3.6 to 3.9 allocate it; `make aot` holds it to this.

    Queries, and weights on their way to the second product; keys and values of the steps that are under way, and once
    more in the queries' dtype where they are decoded; what warps exchange.
    """
    width, wide = power_of_two(head_dim), max(itemsize, 2)
    queries = tile.block_m * (width + tile.block_n) * wide
    step = 2 * tile.block_n * width
    decoded = step * wide if itemsize < wide else 0
    steps = max(1, tile.stages - 1 + HELD[family(target)])
    return queries + int(steps * step * itemsize) + decoded + EXCHANGED


def family(target: int) -> str:
    """The family of a compute capability; one that is not known takes that of the nearest older one."""
    if target < OLDEST:
        raise UnsupportedError(
            [
                f"compute capability {target // 10}.{target % 10} has no tensor cores that Triton compiles for; "
                'these kernels need 8.0: set backend_options={"kernels": "torch"}'
            ]
        )
    return FAMILIES[nearest(target)]


def nearest(target: int) -> int:
    """The newest known capability that is not newer."""
    return max(known for known in FAMILIES if known <= target)


@lru_cache(maxsize=64)
def shared_of(device: torch.device) -> int | None:
    """Bytes of shared memory that one program can have on a device; None in host memory."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@lru_cache(maxsize=1)
def table() -> dict[str, dict[str, dict[str, dict[str, list[int]]]]]:
    """tiles.json."""
    loaded: dict[str, dict[str, dict[str, dict[str, list[int]]]]] = json.loads(TABLE.read_text("utf-8"))
    return loaded


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """How many programs run side by side, one on each multiprocessor; 1 in host memory."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
