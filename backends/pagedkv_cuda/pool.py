"""The cache's bytes: what a pool costs, and how a block lies in memory.

Block after block, each with the keys and values of all layers, so that a block is copied as one row of bytes:

    storage     [num_blocks (+ one that takes what is not kept)][row bytes]
    one row     layer 0: keys [kv_heads, block_size, k_dim]  values [...] | layer 1: ...     each part aligned to 128

With "int8/token_head" the scales of a layer's keys and of its values follow, float32 [kv_heads, block_size] each.
Groups share the ids and so the rows: a row is as long as the group that needs most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from pagedkv.api import GroupSpec, LayerSpec, OutOfDeviceMemory, PoolCost, PoolSpec
from pagedkv.api.checks import PARAMETERS, SCALES
from pagedkv.api.torch import DTYPES
from pagedkv.api.torch_backend import DevicePool, unbound
from pagedkv.api.torch_streams import HostMemory, Runtime
from pagedkv_cuda.path import Path

ALIGN = 128
"""A descriptor load wants 16; a line of the cache is 128."""
GRANULE = 2 << 20
"""torch's allocator asks the driver for multiples of this."""
STORED = DTYPES | {
    "int8/token_head": torch.int8,
    "fp8_e4m3fn/tensor": torch.float8_e4m3fn,
    "fp8_e5m2/tensor": torch.float8_e5m2,
}
"""What lies in memory of each KV dtype."""


def up(count: int, step: int) -> int:
    """`count` rounded up to a multiple of `step`."""
    return -(-count // step) * step


def scaled_by_token(kv_dtype: str) -> bool:
    """Whether each token and KV head has a scale in its block."""
    return kv_dtype.endswith("/token_head")


def scaled_by_tensor(kv_dtype: str) -> bool:
    """Whether the scales of a layer are bound."""
    return kv_dtype.endswith("/tensor")


def part_bytes(layer: LayerSpec, group: GroupSpec) -> list[int]:
    """Bytes of this layer's keys in one block, of its values, and of the scales of both, each with its padding."""
    entries = layer.kv_heads * group.block_size
    parts = [STORED[group.kv_dtype].itemsize * entries * dim for dim in (layer.k_dim, layer.v_dim)]
    parts += [4 * entries] * 2 if scaled_by_token(group.kv_dtype) else []
    return [up(part, ALIGN) for part in parts]


def row_bytes(spec: PoolSpec) -> int:
    """Bytes of one block."""
    return max(
        sum(sum(part_bytes(layer, group)) for layer in group.layers if layer.kv_of is None) for group in spec.groups
    )


def pool_cost(spec: PoolSpec, path: Path) -> PoolCost:
    """Exact bytes of a pool. `fixed`: alignment; on the device also working memory, plans, the block for discards."""
    per_block, fixed = row_bytes(spec), ALIGN
    if spec.placement == "device":
        layers = [layer for group in spec.groups for layer in group.layers]
        fixed += 2 * GRANULE + per_block * path.discard_blocks + path.working_bytes(spec)
        fixed += sum(4 * len(PARAMETERS) * layer.q_heads + 4 * len(SCALES) * layer.kv_heads for layer in layers)
        fixed += 2 * max(1, spec.limits.plans) * sum(path.staging_bytes(spec, group) for group in spec.groups)
    return PoolCost(per_block=per_block, fixed=fixed)


@dataclass(slots=True)
class Layer:
    """One layer's part of a pool: views of its rows, and what was bound to it.

    keys [blocks, kv_heads, block_size, k_dim], values the same with v_dim; sinks and alibi float32 [q_heads], at the
    same address for ever, zeros until they are `bound`. Scales float32 [blocks, kv_heads, block_size] in the blocks, or
    [kv_heads], ones until they are bound; None where the cache is not quantized. `record` is the path's own.
    """

    spec: LayerSpec
    group: int
    keys: torch.Tensor
    values: torch.Tensor
    sinks: torch.Tensor
    alibi: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    bound: frozenset[str] = frozenset()
    record: Any = None

    def unbound(self) -> list[str]:
        """What the layer needs and nobody has bound."""
        return unbound(self.spec, self.bound)


class CudaPool(DevicePool):
    """Blocks in the device's memory, or in host memory that it can reach; one allocation."""

    def __init__(self, spec: PoolSpec, cost: PoolCost, runtime: Runtime, path: Path) -> None:
        super().__init__(spec, cost, runtime)
        self._host: HostMemory | None = None
        blocks = spec.num_blocks + (path.discard_blocks if spec.placement == "device" else 0)
        self.rows = self._aligned(self._storage(blocks * cost.per_block + ALIGN, runtime), blocks)
        self.rows[0].zero_()
        self.working: Any = None
        if spec.placement == "device":
            self.layers = {one.spec.index: one for number in range(len(spec.groups)) for one in self._make(number)}
            self.working = path.working(spec, runtime.torch_device)

    def free(self) -> None:
        self.working = None
        self.rows = torch.empty(0, dtype=torch.uint8)
        if self._host is not None:
            self._host.close()

    def _storage(self, nbytes: int, runtime: Runtime) -> torch.Tensor:
        if self.placement == "host":
            self._host = runtime.host_memory(nbytes)
            return self._host.tensor
        return _on_device(nbytes, self.spec.num_blocks * self.cost.per_block + self.cost.fixed, runtime)

    def _aligned(self, storage: torch.Tensor, blocks: int) -> torch.Tensor:
        """uint8 [blocks, row bytes], the first row on a multiple of `ALIGN`."""
        start = -storage.data_ptr() % ALIGN
        return storage[start : start + blocks * self.cost.per_block].view(blocks, self.cost.per_block)

    def _make(self, number: int) -> Iterator[Layer]:
        """The layers of a group, owners of bytes first."""
        group, start = self.spec.groups[number], 0
        owners: dict[int, Layer] = {}
        for spec in sorted(group.layers, key=lambda layer: layer.kv_of is not None):
            sinks, alibi = (torch.zeros(spec.q_heads, device=self.rows.device) for _ in PARAMETERS)
            if spec.kv_of is not None:
                owner = owners[spec.kv_of]
                yield Layer(spec, number, owner.keys, owner.values, sinks, alibi, owner.k_scale, owner.v_scale)
                continue
            starts = [start + before for before in accumulate(part_bytes(spec, group), initial=0)]
            start, stored = starts[-1], STORED[group.kv_dtype]
            keys = self._part(group, starts[0], stored, spec.kv_heads, spec.k_dim)
            values = self._part(group, starts[1], stored, spec.kv_heads, spec.v_dim)
            k_scale, v_scale = self._scales(group, starts[2:], spec.kv_heads)
            owners[spec.index] = Layer(spec, number, keys, values, sinks, alibi, k_scale, v_scale)
            yield owners[spec.index]

    def _scales(self, group: GroupSpec, starts: Sequence[int], heads: int) -> Iterable[torch.Tensor | None]:
        """Of keys and of values."""
        if scaled_by_token(group.kv_dtype):
            return [self._part(group, start, torch.float32, heads, 1)[..., 0] for start in starts[:2]]
        bound = scaled_by_tensor(group.kv_dtype)
        return [torch.ones(heads, device=self.rows.device) if bound else None for _ in SCALES]

    def _part(self, group: GroupSpec, start: int, dtype: torch.dtype, heads: int, dim: int) -> torch.Tensor:
        """[blocks, heads, block_size, dim] at byte `start` of every row."""
        typed = self.rows.view(dtype)
        strides = (typed.stride(0), group.block_size * dim, dim, 1)
        first = typed.storage_offset() + start // typed.element_size()
        return typed.as_strided((len(typed), heads, group.block_size, dim), strides, first)


def _on_device(nbytes: int, wanted: int, runtime: Runtime) -> torch.Tensor:
    """Device memory; `OutOfDeviceMemory` when the whole pool, `wanted` bytes, cannot fit."""
    memory = runtime.memory()
    free = None if memory.free is None else memory.free + (memory.reclaimable or 0)
    if free is not None and wanted > free:
        raise OutOfDeviceMemory(
            f"the cache needs {wanted} bytes and {free} of {memory.total} are free on {runtime.torch_device}: give "
            "fewer blocks, a smaller context or a lower memory fraction; the rest is held by "
            + (runtime.holders() or "processes that nvidia-smi lists"),
            requested=wanted,
            free=free,
        )
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=runtime.torch_device)
    except (RuntimeError, MemoryError, TypeError) as error:
        if runtime.words.failure(error):
            raise
        raise OutOfDeviceMemory(
            f"the cache needs {wanted} bytes, which {runtime.torch_device} refused ({error}): give fewer blocks, a "
            "smaller context or a lower memory fraction",
            requested=wanted,
            free=free,
        ) from error
