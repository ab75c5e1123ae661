"""The device's memory: what a pool costs, how a block lies in it, and numbers as they are stored.

    bytes of a pool   [num_blocks][per_block]     one block: the keys, then the values, of each layer that owns bytes
    keys of a layer   [num_blocks, block_size, kv_heads, k_dim]      a view of these bytes, values likewise

Groups share the ids, and an id's bytes begin at the same place for each of them. All bytes but those of block 0 are
0xff at first, which is NaN in every dtype here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api import ContractViolation, GroupSpec, LayerSpec, OutOfDeviceMemory, Pool, PoolCost, PoolSpec

if TYPE_CHECKING:
    from pagedkv.conformance.loopback.plans import LoopbackPlan

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ITEM: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(np.uint16),
    "fp16": np.dtype(np.float16),
}
"""What numpy holds of each KV dtype; it has no bf16, so these are its bits."""
POISON = 0xFF
ALIGN = 8

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


def to_stored(values: Array, kv_dtype: str) -> Array:
    """float32 numbers rounded to the KV dtype, as numpy holds it."""
    rounded = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(TORCH[kv_dtype])
    bits = rounded.view(torch.int16) if kv_dtype == "bf16" else rounded
    return bits.numpy().view(ITEM[kv_dtype])


def from_stored(stored: Array, kv_dtype: str) -> Floats:
    """Stored numbers as float64."""
    if kv_dtype == "bf16":  # the upper half of a float32
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


def layer_bytes(layer: LayerSpec, group: GroupSpec) -> tuple[int, int]:
    """Bytes of one block's keys and values of a layer; none where it reads another's."""
    if layer.kv_of is not None:
        return 0, 0
    tokens = group.block_size * layer.kv_heads * ITEM[group.kv_dtype].itemsize
    return tokens * layer.k_dim, tokens * layer.v_dim


def pool_cost(spec: PoolSpec) -> PoolCost:
    """Exact bytes: `per_block` holds the largest group, `fixed` what is bound to layers and the plans alive."""
    blocks = [sum(sum(layer_bytes(layer, group)) for layer in group.layers) for group in spec.groups]
    bound = sum(4 * layer.q_heads * (layer.sinks + layer.alibi) for group in spec.groups for layer in group.layers)
    plans = 0 if spec.placement == "host" else sum(_plan_bytes(group, spec) for group in spec.groups)
    return PoolCost.of(per_block=-(-max(blocks, default=0) // ALIGN) * ALIGN, fixed=bound + spec.limits.plans * plans)


def _plan_bytes(group: GroupSpec, spec: PoolSpec) -> int:
    """Starts, contexts and tables as int32, slots as int64, at the pool's limits."""
    rows, tokens = spec.limits.rows, spec.limits.tokens
    return 4 * (rows + 1) + 4 * rows + 4 * rows * -(-spec.limits.context // group.block_size) + 8 * tokens


@dataclass(slots=True, eq=False)
class Layer:
    """One layer's part of a pool: views of the bytes, and what was bound to it (float32 [q_heads])."""

    spec: LayerSpec
    group: int
    kv_dtype: str
    keys: Array
    values: Array
    bound: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    def unbound(self) -> list[str]:
        """What the layer needs and nobody has bound."""
        return [name for name in ("sinks", "alibi") if getattr(self.spec, name) and name not in self.bound]


class LoopbackPool(Pool):
    """Blocks as one array of bytes. `_owner` ends what is enqueued before the bytes go."""

    def __init__(self, spec: PoolSpec, owner: Any, free: int | None) -> None:
        self.spec, self._owner = spec, owner
        cost = pool_cost(spec)
        self._nbytes = cost.fixed + spec.num_blocks * cost.per_block
        self._bytes = _poisoned(spec.num_blocks, cost.per_block, self._nbytes, free)
        self._layers = {layer.spec.index: layer for i in range(len(spec.groups)) for layer in self._make(i)}
        self._plans: list[deque[LoopbackPlan]] = [deque() for _ in spec.groups]
        self._closed = False

    def close(self) -> None:
        if self._closed:
            return
        self._owner._settle()
        self._closed = True
        self._bytes, self._layers = np.empty((0, 0), np.uint8), {}

    def _check_open(self) -> None:
        """Raise `ContractViolation` after close."""
        if self._closed:
            raise ContractViolation("this pool was closed; allocate a new one", law="use after close")

    def _layer(self, index: int) -> Layer:
        """The layer `index`; `ContractViolation` when the pool has none."""
        self._check_open()
        found = self._layers.get(index)
        if found is None:
            raise ContractViolation(f"the pool has no layer {index}; it has {sorted(self._layers)}", law="layer index")
        return found

    def _make(self, index: int) -> list[Layer]:
        group, start, made = self.spec.groups[index], 0, dict[int, Layer]()
        for spec in sorted(group.layers, key=lambda layer: (layer.kv_of is not None, layer.index)):
            if spec.kv_of is not None:
                owner = made[spec.kv_of]
                made[spec.index] = Layer(spec, index, group.kv_dtype, owner.keys, owner.values)
                continue
            views: list[Array] = []
            for size, dim in zip(layer_bytes(spec, group), (spec.k_dim, spec.v_dim), strict=True):
                typed = self._bytes[:, start : start + size].view(ITEM[group.kv_dtype])
                views.append(typed.reshape(self.num_blocks, group.block_size, spec.kv_heads, dim))
                start += size
            made[spec.index] = Layer(spec, index, group.kv_dtype, views[0], views[1])
        return list(made.values())


def _poisoned(num_blocks: int, per_block: int, wanted: int, free: int | None) -> npt.NDArray[np.uint8]:
    """The bytes of a pool; `OutOfDeviceMemory` when it takes more than `free` (None: the host's own limit decides)."""
    advice = "give fewer blocks, a smaller context or the backend option memory=..."
    if free is not None and wanted > free:
        raise OutOfDeviceMemory(
            f"the pool needs {wanted} bytes, {free} are free: {advice}", requested=wanted, free=free
        )
    try:
        made = np.full((num_blocks, per_block), POISON, np.uint8)
    except (MemoryError, ValueError) as error:  # numpy refuses sizes beyond its index as values
        message = f"the pool needs {wanted} bytes, which the host refused ({error}): {advice}"
        raise OutOfDeviceMemory(message, requested=wanted, free=free) from error
    made[0] = 0
    return made
