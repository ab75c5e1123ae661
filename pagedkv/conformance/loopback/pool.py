"""The device's memory: what a pool costs, how a block lies in it, and numbers as they are stored.

    bytes of a pool   [num_blocks][per_block]     one block: the keys, then the values, of each layer that owns bytes
    keys of a layer   [num_blocks, block_size, kv_heads, k_dim]      a view of these bytes, values likewise
    scales of keys    [num_blocks, block_size, kv_heads]             of "int8/token_head", behind the values

Groups share the ids, and an id's bytes begin at the same place for each of them. All bytes but those of block 0 are
0xff at first, which is NaN in every dtype here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
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
    "int8/token_head": np.dtype(np.int8),
    "fp8_e4m3fn/tensor": np.dtype(np.uint8),
    "fp8_e5m2/tensor": np.dtype(np.uint8),
}
"""What numpy holds of each KV dtype; it has neither bf16 nor fp8, so these are their bits."""
SCALED_BY_TOKEN = frozenset({"int8/token_head"})
SCALED_BY_TENSOR = frozenset({"fp8_e4m3fn/tensor", "fp8_e5m2/tensor"})
INT8_LARGEST = 127
POISON = 0xFF
ALIGN = 8

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


def _fp8_numbers(mantissa: int, bias: int, finite: int) -> Floats:
    """The numbers of the 256 codes; `finite` codes of each sign have one."""
    code = np.arange(128)
    exponent, rest = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    numbers = np.where(exponent == 0, rest * 2.0 ** (1 - bias), (1 + rest) * 2.0 ** (exponent - bias))
    numbers[finite:] = np.nan
    both: Floats = np.concatenate([numbers, -numbers])
    return both


FP8 = {
    "fp8_e4m3fn/tensor": (_fp8_numbers(3, 7, 127), 127),
    "fp8_e5m2/tensor": (_fp8_numbers(2, 15, 124), 124),
}
"""KV dtype -> (the number of each code, how many codes of a sign are finite). What is not finite is stored as NaN."""


def to_stored(values: Array, kv_dtype: str) -> Array:
    """float32 numbers rounded to the KV dtype, as numpy holds it; quantized ones were divided by their scale."""
    if kv_dtype in SCALED_BY_TOKEN:
        whole: Array = np.clip(np.rint(np.nan_to_num(values)), -INT8_LARGEST, INT8_LARGEST)
        return whole.astype(np.int8)
    if kv_dtype in SCALED_BY_TENSOR:
        return _to_fp8(values, *FP8[kv_dtype])
    rounded = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(TORCH[kv_dtype])
    bits = rounded.view(torch.int16) if kv_dtype == "bf16" else rounded
    return bits.numpy().view(ITEM[kv_dtype])


def _to_fp8(values: Array, numbers: Floats, finite: int) -> Array:
    """The code of the nearest number, of an even one at a tie; the last finite one for what lies beyond it."""
    middles = (numbers[: finite - 1] + numbers[1:finite]) / 2
    size = np.abs(values.astype(np.float64))
    below, above = (np.searchsorted(middles, size, side) for side in ("left", "right"))
    code = np.where(below % 2 == 0, below, above)
    code = np.where(np.isnan(size), 0x7F, code)
    return np.where(np.signbit(values), code | 0x80, code).astype(np.uint8)


def from_stored(stored: Array, kv_dtype: str) -> Floats:
    """Stored numbers as float64, without their scales."""
    if kv_dtype in FP8:
        return FP8[kv_dtype][0][stored]
    if kv_dtype == "bf16":  # the upper half of a float32
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


def layer_parts(layer: LayerSpec, group: GroupSpec) -> list[tuple[np.dtype[Any], int]]:
    """(type, numbers of a token and head) of what a layer has in a block; nothing where it reads another's."""
    if layer.kv_of is not None:
        return []
    parts = [(ITEM[group.kv_dtype], layer.k_dim), (ITEM[group.kv_dtype], layer.v_dim)]
    return parts + [(np.dtype(np.float32), 1)] * 2 if group.kv_dtype in SCALED_BY_TOKEN else parts


def layer_bytes(layer: LayerSpec, group: GroupSpec) -> int:
    """Bytes of a layer in one block."""
    return group.block_size * layer.kv_heads * sum(kind.itemsize * dim for kind, dim in layer_parts(layer, group))


def pool_cost(spec: PoolSpec) -> PoolCost:
    """Exact bytes: `per_block` holds the largest group, `fixed` what is bound to layers and the plans alive."""
    blocks = [sum(layer_bytes(layer, group) for layer in group.layers) for group in spec.groups]
    bound = sum(4 * layer.q_heads * (layer.sinks + layer.alibi) for group in spec.groups for layer in group.layers)
    bound += sum(_scale_bytes(group) for group in spec.groups if group.kv_dtype in SCALED_BY_TENSOR)
    plans = 0 if spec.placement == "host" else sum(_plan_bytes(group, spec) for group in spec.groups)
    return PoolCost.of(per_block=-(-max(blocks, default=0) // ALIGN) * ALIGN, fixed=bound + spec.limits.plans * plans)


def _scale_bytes(group: GroupSpec) -> int:
    """Of bound scales: one for the keys and one for the values of each KV head."""
    return sum(2 * 4 * layer.kv_heads for layer in group.layers if layer.kv_of is None)


def _plan_bytes(group: GroupSpec, spec: PoolSpec) -> int:
    """Starts, contexts and tables as int32, slots as int64, at the pool's limits."""
    rows, tokens = spec.limits.rows, spec.limits.tokens
    return 4 * (rows + 1) + 4 * rows + 4 * rows * -(-spec.limits.context // group.block_size) + 8 * tokens


@dataclass(slots=True, eq=False)
class Layer:
    """One layer's part of a pool: views of the bytes, and what was bound to it (float32, sinks and alibi [q_heads]).

    k_scale, v_scale: float32 [num_blocks, block_size, kv_heads] in the blocks, or [kv_heads] as last bound, 1 before;
    None where the KV dtype is not quantized. `bound` is the host's view, what work that runs now uses is here.
    """

    spec: LayerSpec
    group: int
    kv_dtype: str
    keys: Array
    values: Array
    k_scale: Array | None = None
    v_scale: Array | None = None
    bound: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    def halves(self) -> tuple[tuple[Array, Array | None], tuple[Array, Array | None]]:
        """(codes or numbers, scales) of the keys, and of the values."""
        return (self.keys, self.k_scale), (self.values, self.v_scale)

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
                cache = (owner.keys, owner.values, owner.k_scale, owner.v_scale)
                made[spec.index] = Layer(spec, index, group.kv_dtype, *cache)
                continue
            views = list(self._views(spec, group, start))
            k_scale, v_scale = _scales(spec, group, views[2:])
            made[spec.index] = Layer(spec, index, group.kv_dtype, views[0], views[1], k_scale, v_scale)
            start += layer_bytes(spec, group)
        return list(made.values())

    def _views(self, spec: LayerSpec, group: GroupSpec, start: int) -> Iterator[Array]:
        """What a layer has in the blocks, [num_blocks, block_size, kv_heads, numbers] each, from byte `start` on."""
        for kind, dim in layer_parts(spec, group):
            size = group.block_size * spec.kv_heads * dim * kind.itemsize
            typed = self._bytes[:, start : start + size].view(kind)
            yield typed.reshape(self.num_blocks, group.block_size, spec.kv_heads, dim)
            start += size


def _scales(spec: LayerSpec, group: GroupSpec, views: Sequence[Array]) -> list[Array | None]:
    """Scales of keys and values: those in the blocks, those to be bound, or none."""
    if group.kv_dtype in SCALED_BY_TENSOR:
        return [np.ones(spec.kv_heads, np.float32) for _ in range(2)]
    return [view[..., 0] for view in views] or [None, None]


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
