"""The cache's bytes: what a pool costs, and how its planes lie in memory.

A layer's keys lie head-major, so that a gather of slots gives contiguous [tokens, dim] matrices per head:

    keys of one layer    [kv_heads][num_blocks * block_size][k_width]      width: dim rounded up to 8, for even products
    one plane            [num_blocks][block_bytes]                         one KV head's keys (or values) of one layer

Planes of equal `block_bytes` form a region. Groups share the ids, an id belongs to one group at a time, and so groups
share planes too: a region has as many planes as the group that needs most. No id's bytes hold another's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pagedkv.api import (
    ContractViolation,
    GroupSpec,
    LayerSpec,
    OutOfDeviceMemory,
    Pool,
    PoolCost,
    PoolSpec,
)
from pagedkv.api.torch import DTYPES
from pagedkv_cpu import host
from pagedkv_cpu.copies import CHUNK, Planes
from pagedkv_cpu.scratch import ITEM_BYTES, padded

ALIGN = 64
SMALL = (1 << 16) + CHUNK
"""Bytes for what is bound to the layers (sinks, slopes) and for the temporaries of a copy."""


def plane_bytes(layer: LayerSpec, group: GroupSpec) -> tuple[int, int]:
    """Bytes of one block in a plane of this layer's keys, and of its values."""
    row = group.block_size * ITEM_BYTES[group.kv_dtype]
    return row * padded(layer.k_dim), row * padded(layer.v_dim)


def regions(spec: PoolSpec) -> dict[int, int]:
    """{bytes of a block in one plane: planes of that kind}, in ascending order."""
    most: Counter[int] = Counter()
    for group in spec.groups:
        mine: Counter[int] = Counter()
        for layer in group.layers:
            if layer.kv_of is None:
                for size in plane_bytes(layer, group):
                    mine[size] += layer.kv_heads
        most |= mine  # the larger count of the two
    return dict(sorted(most.items()))


def pool_cost(spec: PoolSpec, working: Callable[[PoolSpec], int]) -> PoolCost:
    """Exact bytes of a pool: `per_block` for its planes, `fixed` for alignment and, where it computes, `working`."""
    kinds = regions(spec)
    fixed = ALIGN * (len(kinds) + 1) + SMALL
    if spec.placement == "device":
        fixed += working(spec)
    return PoolCost(per_block=sum(size * count for size, count in kinds.items()), fixed=fixed)


@dataclass(slots=True)
class Layer:
    """One layer's part of a pool: views of its planes, and what was bound to it.

    keys [kv_heads, slots, k_width], values [kv_heads, slots, v_width] in the group's KV dtype. Layers of equal `kind`
    can share a plan's work. Sinks and slopes [q_heads] are zeros until they are `bound`. `scale`: what q is multiplied
    by, a tensor because torch makes one of a number at every call.
    """

    spec: LayerSpec
    group: int
    keys: torch.Tensor
    values: torch.Tensor
    sinks: torch.Tensor
    alibi: torch.Tensor
    scale: torch.Tensor
    kind: tuple[object, ...]
    bound: frozenset[str] = frozenset()

    @classmethod
    def of(cls, spec: LayerSpec, group: int, keys: torch.Tensor, values: torch.Tensor) -> Layer:
        """A layer on its planes, nothing bound yet."""
        kind = (spec.q_heads, spec.kv_heads, spec.causal, spec.window, keys.shape[2], values.shape[2])
        scale = torch.tensor(spec.scale if spec.softcap is None else spec.scale / spec.softcap, dtype=torch.float32)
        return cls(spec, group, keys, values, torch.zeros(spec.q_heads), torch.zeros(spec.q_heads), scale, kind)

    def unbound(self) -> list[str]:
        """What the layer needs and nobody has bound."""
        wanted = [name for name in ("sinks", "alibi") if getattr(self.spec, name)]
        return [name for name in wanted if name not in self.bound]


class CpuPool(Pool):
    """Blocks in host memory, as one allocation. `settle` returns once no copy is under way."""

    def __init__(
        self, spec: PoolSpec, cost: PoolCost, scratch: Callable[[PoolSpec], Any], settle: Callable[[], None]
    ) -> None:
        self.spec = spec
        self._settle = settle
        self._closed = False
        self._regions = regions(spec)
        self._storage = _allocate(cost, spec.num_blocks, ALIGN * (len(self._regions) + 1))
        self._planes = self._cut()
        self._layers = {layer.spec.index: layer for index in range(len(spec.groups)) for layer in self._make(index)}
        self._scratch = scratch(spec) if spec.placement == "device" else None
        self._clear_null_block()

    def close(self) -> None:
        self._closed = True
        self._settle()
        self._storage = torch.empty(0, dtype=torch.uint8)
        self._planes = {}
        self._layers = {}
        self._scratch = None

    def check_open(self) -> None:
        """Raise `ContractViolation` after close."""
        if self._closed:
            raise ContractViolation("this pool was closed; allocate a new one", law="use after close")

    def group(self, index: int) -> GroupSpec:
        """The group `index`; `ContractViolation` when the pool has none."""
        if not 0 <= index < len(self.spec.groups):
            raise ContractViolation(f"the pool has groups 0..{len(self.spec.groups) - 1}, not {index}", law="group")
        return self.spec.groups[index]

    def layer(self, index: int) -> Layer:
        """The layer `index`; `ContractViolation` when the pool has none."""
        self.check_open()
        found = self._layers.get(index)
        if found is None:
            raise ContractViolation(f"the pool has no layer {index}; it has {sorted(self._layers)}", law="layer index")
        return found

    def planes_to(self, other: CpuPool) -> Planes:
        """Every plane, beside that of a pool of equal groups."""
        return [(mine, other._planes[size]) for size, mine in self._planes.items()]

    def scratch(self) -> Any:
        """The working memory of this pool's attention; a host pool has none."""
        self.check_open()
        if self._scratch is None:
            raise ContractViolation(
                "this pool has placement 'host' and holds blocks only; plan on a pool with placement 'device'",
                law="placement",
            )
        return self._scratch

    def _cut(self) -> dict[int, torch.Tensor]:
        """{block bytes: planes as uint8 [planes, num_blocks, block bytes]}."""
        planes, start = {}, 0
        for size, count in self._regions.items():
            end = start + size * count * self.num_blocks
            planes[size] = self._storage[start:end].view(count, self.num_blocks, size)
            start = -(-end // ALIGN) * ALIGN
        return planes

    def _make(self, group_index: int) -> list[Layer]:
        group = self.spec.groups[group_index]
        free = dict.fromkeys(self._planes, 0)
        made: dict[int, Layer] = {}
        for spec in sorted(group.layers, key=lambda layer: layer.kv_of is not None):
            if spec.kv_of is not None:
                owner = made[spec.kv_of]
                made[spec.index] = Layer.of(spec, group_index, owner.keys, owner.values)
                continue
            views = []
            for size, dim in zip(plane_bytes(spec, group), (spec.k_dim, spec.v_dim), strict=True):
                planes = self._planes[size][free[size] : free[size] + spec.kv_heads]
                free[size] += spec.kv_heads
                typed = planes.view(spec.kv_heads, -1).view(DTYPES[group.kv_dtype])
                views.append(typed.view(spec.kv_heads, -1, padded(dim)))
            made[spec.index] = Layer.of(spec, group_index, views[0], views[1])
        return list(made.values())

    def _clear_null_block(self) -> None:
        for planes in self._planes.values():
            planes[:, 0] = 0


def _allocate(cost: PoolCost, num_blocks: int, slack: int) -> torch.Tensor:
    """The planes' storage, its pages still untouched; `OutOfDeviceMemory` when the whole pool cannot fit."""
    wanted = cost.per_block * num_blocks + cost.fixed
    free = host.memory().available
    advice = "give fewer blocks, a smaller context or a lower memory fraction"
    if free is not None and wanted > free:
        raise OutOfDeviceMemory(
            f"the cache needs {wanted} bytes and {free} are free: {advice}", requested=wanted, free=free
        )
    try:
        return torch.empty(cost.per_block * num_blocks + slack, dtype=torch.uint8)
    except (RuntimeError, MemoryError, TypeError) as error:
        raise OutOfDeviceMemory(
            f"the cache needs {wanted} bytes, which the system refused ({error}): {advice}", requested=wanted, free=free
        ) from error
