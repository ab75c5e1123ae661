"""The cache's bytes: what a pool costs, and how its planes lie in memory.

    one plane    [num_blocks (+ those for discards)][block bytes]    keys, or values, of some KV heads of one layer
    as a cache   [blocks, block_size, kv_heads * width]              contiguous, as the operators want it

A layer has one plane for its keys and one for its values; more, each with a part of the KV heads, where one tensor
would have more elements than an operator takes. Groups share the ids, an id belongs to one group at a time, and so
groups share planes too: of each size there are as many as the group that needs most. No id's bytes hold another's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagedkv.api import GroupSpec, LayerSpec, OutOfDeviceMemory, PoolCost, PoolSpec, UnsupportedError
from pagedkv.api.checks import PARAMETERS
from pagedkv.api.torch import DTYPES
from pagedkv.api.torch_backend import DevicePool, unbound
from pagedkv.api.torch_streams import HostMemory
from pagedkv_ascend import limits
from pagedkv_ascend.runtime import Runtime

ALIGN = 512
"""torch's allocator rounds each tensor up to this."""
GRANULE = 2 << 20
"""It asks the driver for multiples of this."""
STATIC_ROWS = 256
"""Rows of a recorded step at most; those of them that are padding write to blocks of their own."""


def plane_bytes(layer: LayerSpec, group: GroupSpec, count: int = 1) -> int:
    """Bytes of one block in one of the `count` planes of a layer's keys."""
    item = DTYPES[group.kv_dtype].itemsize
    return item * group.block_size * (layer.kv_heads // count) * limits.width(layer)


def planes(spec: PoolSpec, num_blocks: int) -> dict[int, int]:
    """How many planes of each size a pool has, by bytes of a block."""
    most: Counter[int] = Counter()
    for group in spec.groups:
        mine: Counter[int] = Counter()
        for layer in group.layers:
            if layer.kv_of is None:
                count = limits.parts(layer, group, num_blocks) or 1
                mine[plane_bytes(layer, group, count)] += 2 * count
        most |= mine
    return dict(most)


def discard_blocks(spec: PoolSpec) -> int:
    """Blocks behind the pool's own that take what the padding of a recorded step writes."""
    if spec.placement != "device":
        return 0
    return max(-(-min(STATIC_ROWS, max(1, spec.limits.rows)) // group.block_size) for group in spec.groups)


def blocks_of(spec: PoolSpec) -> int:
    """Blocks of a pool's tensors: its own, and those for discards."""
    return spec.num_blocks + discard_blocks(spec)


def pool_cost(spec: PoolSpec, working: int) -> PoolCost:
    """Exact bytes of a pool. `fixed`: alignment; on the device also `working` memory, and the blocks for discards."""
    per_block = sum(size * count for size, count in planes(spec, 1).items())
    heads = sum(2 * layer.kv_heads for group in spec.groups for layer in group.layers)
    fixed = 2 * GRANULE + ALIGN * heads + discard_blocks(spec) * per_block
    if spec.placement == "device":
        layers = [layer for group in spec.groups for layer in group.layers]
        fixed += working + sum(4 * len(PARAMETERS) * layer.q_heads + ALIGN for layer in layers)
    return PoolCost(per_block=per_block, fixed=fixed)


@dataclass(slots=True, kw_only=True)
class Part:
    """Some KV heads of a layer: keys, values [blocks, block_size, heads * width]; `first` is the first of them."""

    first: int
    heads: int
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Layer:
    """One layer's part of a pool, and what was bound to it: sinks float32 [q_heads], zeros until then."""

    spec: LayerSpec
    group: int
    block_size: int
    parts: tuple[Part, ...]
    sinks: torch.Tensor
    bound: frozenset[str] = frozenset()

    def unbound(self) -> list[str]:
        """What the layer needs and nobody has bound."""
        return unbound(self.spec, self.bound)


class AscendPool(DevicePool):
    """Blocks in the device's memory, or in pinned memory of the host.

    `planes`: uint8 [blocks, bytes of a block] each. Those of a host pool are laid out like those of the first device
    pool that it exchanges blocks with, as its own number of blocks would not cut layers alike.
    """

    def __init__(self, spec: PoolSpec, cost: PoolCost, runtime: Runtime) -> None:
        super().__init__(spec, cost, runtime)
        self._host: HostMemory | None = None
        self._memory = runtime.cache_memory()
        self.planes: dict[int, list[torch.Tensor]] = {}
        if spec.placement == "host":
            self._host = runtime.host_memory(spec.num_blocks * cost.per_block)
            return
        try:
            self._allocate(planes(spec, blocks_of(spec)))
        except OutOfDeviceMemory:
            self.close()
            raise
        self.layers = {one.spec.index: one for number in range(len(spec.groups)) for one in self._make(number)}

    def free(self) -> None:
        self.planes = {}
        if self._host is not None:
            self._host.close()
        self._memory.close()

    def planes_to(self, other: AscendPool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every plane beside that of a pool of equal groups. Raises `UnsupportedError` for pools cut differently."""
        self._lay_out(other)
        other._lay_out(self)
        if {size: len(mine) for size, mine in self.planes.items()} != {n: len(its) for n, its in other.planes.items()}:
            raise UnsupportedError(
                "these pools cut their layers into different tensors, as one has more blocks than an operator takes in "
                "one: copy between pools of like sizes, or through a host pool of each"
            )
        return [pair for size, mine in self.planes.items() for pair in zip(mine, other.planes[size], strict=True)]

    def _lay_out(self, like: AscendPool) -> None:
        """Give a host pool the planes of another."""
        if self._host is None or self.planes:
            return
        rest, blocks = self._host.tensor, self.num_blocks
        layout = {size: len(its) for size, its in like.planes.items()} or planes(self.spec, blocks)
        for size, count in layout.items():
            self.planes[size] = list(rest[: count * size * blocks].view(count, blocks, size).unbind(0))
            rest = rest[count * size * blocks :]
        self._clear_null()

    def _allocate(self, sizes: dict[int, int]) -> None:
        """Into `planes` one by one: a refusal half way must find no tensor elsewhere, or its memory would not go."""
        wanted = self.spec.num_blocks * self.cost.per_block + self.cost.fixed
        blocks = blocks_of(self.spec)
        for size, count in sizes.items():
            self.planes[size] = []
            for _ in range(count):
                self.planes[size].append(self._memory.take(size * blocks, wanted).view(blocks, size))
        self._clear_null()

    def _clear_null(self) -> None:
        for plane in (plane for mine in self.planes.values() for plane in mine):
            plane[0].zero_()

    def _make(self, number: int) -> Iterator[Layer]:
        """The layers of a group, owners of bytes first."""
        group = self.spec.groups[number]
        free = {size: iter(all_) for size, all_ in self.planes.items()}
        owners: dict[int, tuple[Part, ...]] = {}
        for spec in sorted(group.layers, key=lambda layer: layer.kv_of is not None):
            if spec.kv_of is None:
                owners[spec.index] = tuple(self._parts(spec, group, free))
            parts = owners[spec.index if spec.kv_of is None else spec.kv_of]
            sinks = torch.zeros(spec.q_heads, device=self._runtime.torch_device)
            yield Layer(spec=spec, group=number, block_size=group.block_size, parts=parts, sinks=sinks)

    def _parts(self, spec: LayerSpec, group: GroupSpec, free: dict[int, Iterator[torch.Tensor]]) -> Iterator[Part]:
        count = limits.parts(spec, group, blocks_of(self.spec)) or 1
        heads, size = spec.kv_heads // count, plane_bytes(spec, group, count)
        for number in range(count):
            keys, values = (
                next(free[size]).view(DTYPES[group.kv_dtype]).view(-1, group.block_size, heads * limits.width(spec))
                for _ in "kv"
            )
            yield Part(first=number * heads, heads=heads, keys=keys, values=values)
