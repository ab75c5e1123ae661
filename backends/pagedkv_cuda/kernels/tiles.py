"""Sizes of tiles by compute capability, from tiles.json.

    {family: {kernel: {bytes: {head dim: [BLOCK_M, BLOCK_N, warps, stages]}}}}

A capability takes the family that shares its limits; a head dim takes the entry of the next larger one. `bytes` are
those of an entry of q, or 1 where 16-bit queries meet a quantized cache. On families with cp.async (8.x), `stages` is
how many steps of keys and values are on their way at once. Nothing is tuned while the engine starts:
`python -m pagedkv_cuda.kernels.tune` measures on a card and writes the file anew. The table has not been measured on
hardware: it is what compiles without spilling and within each limit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from pagedkv.api.errors import UnsupportedError

TABLE = Path(__file__).with_name("tiles.json")
FAMILIES = {80: "80", 87: "80", 86: "86", 89: "86", 90: "90", 100: "100", 103: "100", 120: "86", 121: "86"}
"""Which family a compute capability takes its tiles from."""
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


def tile_for(kernel: str, target: int, itemsize: int, head_dim: int) -> Tile:
    """The tile of `kernel` ("few" or "many" queries), by `itemsize` of the table's bytes. Raises `UnsupportedError`."""
    by_dim = table()[family(target)][kernel][str(itemsize)]
    fitting = [dim for dim in map(int, by_dim) if dim >= head_dim]
    if not fitting:
        raise UnsupportedError([f"head dim {head_dim} is above {WIDEST}, the largest of these kernels"])
    return Tile(*by_dim[str(min(fitting))])


def family(target: int) -> str:
    """The family of a compute capability; one that is not known takes that of the nearest older one."""
    if target < OLDEST:
        raise UnsupportedError(
            [
                f"compute capability {target // 10}.{target % 10} has no tensor cores that Triton compiles for; "
                'these kernels need 8.0: set backend_options={"kernels": "torch"}'
            ]
        )
    return FAMILIES[max(known for known in FAMILIES if known <= target)]


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
