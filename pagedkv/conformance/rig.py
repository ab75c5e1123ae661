"""A small core for one pool: sequences with their blocks, batches over them, and the oracle's answer beside.

Blocks come in shuffled order, a sequence's row in the table is not its row in the batch, and the table is a slice of a
larger array whose other entries are valid ids: a backend that reads more than it is told is wrong at once.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pagedkv.api import AttentionBackend, Batch, Event, GroupSpec, LayerSpec, PoolSpec
from pagedkv.conformance import quantized
from pagedkv.conformance.oracle import Floats, attention
from pagedkv.conformance.quantized import FLOAT8, QUANTIZED, SCALES, Float32

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}
"""Largest absolute error for inputs of unit size: a few roundings of the coarser of dtype and KV dtype.

What a quantized cache loses is no error: the oracle reads the same codes and scales.
"""


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Seq:
    """One sequence: the queries, keys and values of every position for every layer, and the blocks they lie in."""

    def __init__(self, rig: Rig, length: int, blocks: Sequence[int], prefix: tuple[Seq, int] | None = None) -> None:
        self.length, self.blocks = length, list(blocks)
        self._made: dict[int, QKV] = {}
        self._rig, self._prefix = rig, prefix

    def moved(self, blocks: Sequence[int]) -> Seq:
        """The same content in other blocks, of this pool or of one with equal layers."""
        other = Seq(self._rig, self.length, blocks)
        other._made = self._made
        return other

    def give(self, layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Content chosen by the case, in place of random numbers."""
        self._made = {**self._made, layer.index: (q, k, v)}

    def qkv(self, layer: LayerSpec) -> QKV:
        """q [length, Hq, Dk], k [length, Hkv, Dk], v [length, Hkv, Dv] of the pool's dtype, in host memory.

        A layer that reads another's cache has that layer's keys and values.
        """
        if layer.index not in self._made:
            random, n = self._rig.random, self.length
            q = random(n, layer.q_heads, layer.k_dim)
            if layer.kv_of is not None:
                _, k, v = self.qkv(self._rig.layer(layer.kv_of))
            else:
                k, v = random(n, layer.kv_heads, layer.k_dim), random(n, layer.kv_heads, layer.v_dim)
                k, v = self._rig.settled(layer, "k_scale", k), self._rig.settled(layer, "v_scale", v)
            if self._prefix is not None:
                seq, shared = self._prefix
                q, k, v = (
                    torch.cat([old[:shared], new[shared:]]) for old, new in zip(seq.qkv(layer), (q, k, v), strict=True)
                )
            self._made[layer.index] = (q, k, v)
        return self._made[layer.index]

    def slots(self, positions: Any, block_size: int) -> np.ndarray:
        """Where the tokens at `positions` lie, int64."""
        at = np.asarray(positions, np.int64)
        return np.asarray(self.blocks, np.int64)[at // block_size] * block_size + at % block_size


Row = tuple[Seq, int, int]
"""(sequence, context with this step's tokens, query tokens)."""


class Rig:
    """One pool and what is in it. `spec.num_blocks - 1` blocks are free at first, in shuffled order."""

    def __init__(self, backend: AttentionBackend, spec: PoolSpec, *, seed: int = 0, group: int = 0) -> None:
        self.backend, self.spec, self.group_index = backend, spec, group
        self._generator = torch.Generator().manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.pool = backend.alloc_pool(spec)
        self.free = [int(i) for i in self.rng.permutation(np.arange(1, spec.num_blocks))]
        self.bound: dict[int, dict[str, np.ndarray]] = {}
        self.scales: dict[int, dict[str, np.ndarray]] = {}

    def close(self) -> None:
        """Give the pool back."""
        self.pool.close()

    @property
    def group(self) -> GroupSpec:
        """The group that batches are made for."""
        return self.spec.groups[self.group_index]

    @property
    def block_size(self) -> int:
        return self.group.block_size

    def layer(self, index: int | None = None) -> LayerSpec:
        """The layer `index`; the group's first when none is given."""
        if index is None:
            return self.group.layers[0]
        return next(layer for group in self.spec.groups for layer in group.layers if layer.index == index)

    # -- data ----------------------------------------------------------------------------------------------------------

    def random(self, *shape: int) -> torch.Tensor:
        """Normal numbers of the pool's dtype, in host memory."""
        return torch.randn(*shape, generator=self._generator).to(TORCH[self.spec.dtype])

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.backend.torch_device)

    def to_array(self, tensor: torch.Tensor) -> Floats:
        """A tensor's values once all work enqueued so far is done."""
        event, array = self.backend.to_host(tensor.float())
        event.join()
        return np.array(array, np.float64)

    def stored(self, layer: LayerSpec, name: str, values: torch.Tensor) -> Floats:
        """A layer's keys (name "k_scale") or values ("v_scale") as the group's KV dtype gives them back."""
        kv_dtype = self.group.kv_dtype
        if kv_dtype not in QUANTIZED:
            return np.asarray(values.to(TORCH[kv_dtype]).double().numpy())
        numbers, scale = values.float().numpy(), self.scale(layer, name, values)
        return quantized.decoded(kv_dtype, quantized.codes(kv_dtype, numbers, scale), scale)

    def scale(self, layer: LayerSpec, name: str, values: torch.Tensor) -> Float32:
        """The scales [length, kv_heads] of quantized keys ("k_scale") or values ("v_scale") [length, kv_heads, dim]."""
        if self.group.kv_dtype not in FLOAT8:
            return quantized.token_scales(values.float().numpy())
        owner = layer.index if layer.kv_of is None else layer.kv_of
        bound = self.scales.get(owner, {}).get(name, np.float32(1))
        return np.broadcast_to(np.asarray(bound, np.float32), values.shape[:2])

    def settled(self, layer: LayerSpec, name: str, values: torch.Tensor) -> torch.Tensor:
        """The numbers, smaller where their codes would hang on the last bit of a division."""
        kv_dtype = self.group.kv_dtype
        while kv_dtype in QUANTIZED and len(values):
            scale = self.scale(layer, name, values)
            unsettled = torch.from_numpy(quantized.unsettled(kv_dtype, values.float().numpy(), scale))
            if not unsettled.any():
                break
            values = torch.where(unsettled, values * 0.97, values).to(values.dtype)
        return values

    def sequence(self, length: int, blocks: Sequence[int] | None = None) -> Seq:
        """A sequence of random content in fresh blocks (or in `blocks`); nothing is written yet."""
        needed = -(-length // self.block_size)
        return Seq(self, length, [self.free.pop() for _ in range(needed)] if blocks is None else blocks)

    def fork(self, seq: Seq, shared: int, length: int) -> Seq:
        """A sequence that starts with the first `shared` tokens of another: whole blocks of it, then fresh ones."""
        whole = shared // self.block_size
        fresh = [self.free.pop() for _ in range(-(-length // self.block_size) - whole)]
        return Seq(self, length, [*seq.blocks[:whole], *fresh], (seq, shared))

    def of_group(self, index: int) -> Rig:
        """The same pool and free blocks, for batches of another group."""
        other = copy.copy(self)
        other.group_index = index
        return other

    def bind(self, layer: LayerSpec, seed: int = 7) -> None:
        """Bind random sinks, slopes and scales to a layer that has them."""
        rng = np.random.default_rng(seed + layer.index)
        if self._kv_dtype(layer) in FLOAT8 and layer.kv_of is None and self.spec.placement == "device":
            self.bind_scales(layer, {name: rng.uniform(0.02, 0.1, layer.kv_heads) for name in SCALES})
        wanted = [name for name in ("sinks", "alibi") if getattr(layer, name)]
        params = {name: rng.uniform(0.05, 1.0, layer.q_heads).astype(np.float32) for name in wanted}
        if params:
            self.backend.bind(self.pool, layer.index, params)
            self.bound[layer.index] = params

    def bind_scales(self, layer: LayerSpec, scales: Mapping[str, Any]) -> None:
        """Bind scales, scalar or [kv_heads], to a layer of an 8-bit float cache."""
        given = {name: np.asarray(values, np.float32) for name, values in scales.items()}
        self.backend.bind(self.pool, layer.index, given)
        self.scales.setdefault(layer.index, {}).update(given)

    def _kv_dtype(self, layer: LayerSpec) -> str:
        return next(group.kv_dtype for group in self.spec.groups if layer in group.layers)

    # -- batches -------------------------------------------------------------------------------------------------------

    def batch(
        self,
        rows: Sequence[Row],
        *,
        write: bool = True,
        slots: np.ndarray | None = None,
        pad_rows: int = 0,
        pad_slots: int = 0,
        **changes: Any,
    ) -> Batch:
        """A legal batch; `pad_rows` rows without a query and `pad_slots` slots of -1 follow. `changes` replace fields.

        Rows with one query token that come first are its decode rows.
        """
        counts = [count for _, _, count in rows]
        contexts = [context for _, context, _ in rows] + [0] * pad_rows
        table, at = self._table(rows, pad_rows)
        if slots is None:
            parts = [seq.slots(range(context - count, context), self.block_size) for seq, context, count in rows]
            slots = np.concatenate([*parts, np.full(pad_slots, -1, np.int64)]) if write else None
        decode = next((i for i, count in enumerate(counts) if count != 1), len(counts))
        made = Batch(
            num_seqs=len(rows),
            num_tokens=sum(counts),
            cu_q=np.cumsum([0, *counts, *[0] * pad_rows]).astype(np.int32),
            ctx_len=np.array(contexts, np.int32),
            block_table=table,
            rows=at,
            slots=slots,
            max_q=max(counts, default=0),
            max_ctx=max(contexts, default=0),
            num_decode=decode,
        )
        return dataclasses.replace(made, **changes)

    def _table(self, rows: Sequence[Row], pad_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(block table [R, W] as a slice with a longer stride, the row of each batch row in it)."""
        width = max([len(seq.blocks) for seq, _, _ in rows], default=1) + 1
        height = len(rows) + 3
        others = self.rng.integers(1, max(2, self.spec.num_blocks), (height, width + 3))
        whole = others.astype(np.int32)
        at = self.rng.permutation(np.arange(1, height))[: len(rows)].astype(np.int32)
        whole[0, :width] = 0
        for row, (seq, _, _) in zip(at, rows, strict=True):
            whole[row, :width] = 0
            whole[row, : len(seq.blocks)] = seq.blocks
        return whole[:, :width], np.concatenate([at, np.zeros(pad_rows, np.int32)]).astype(np.int32)

    def qkv(self, rows: Sequence[Row], layer: LayerSpec) -> QKV:
        """q, k, v of the rows' query tokens, on the device."""
        empty = [self.random(0, *shape) for shape in _shapes(layer)]
        parts = [[t[c - n : c] for t in seq.qkv(layer)] for seq, c, n in rows]
        q, k, v = (torch.cat([*(part[i] for part in parts), empty[i]]) for i in range(3))
        return self.to_device(q), self.to_device(k), self.to_device(v)

    def empty_out(self, tokens: int, layer: LayerSpec) -> torch.Tensor:
        """An out tensor full of NaN: what is not written shows."""
        out = torch.full((tokens, layer.q_heads, layer.v_dim), float("nan"), dtype=TORCH[self.spec.dtype])
        return self.to_device(out)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, *rows: Row, layer: int | None = None, write: bool = True, **batch: Any) -> Floats:
        """Append (if `write`) and attend in one call: out [T, Hq, Dv]."""
        spec = self.layer(layer)
        return self.attend(self.plan(*rows, write=write, **batch), rows, spec, write=write)

    def plan(self, *rows: Row, **batch: Any) -> Any:
        """A plan of these rows; keywords are those of `batch`."""
        return self.backend.plan(self.pool, self.group_index, self.batch(rows, **batch))

    def read(self, seq: Seq, layer: int | None = None) -> Floats:
        """Attend only, all positions as one prefill: what is in the sequence's blocks, seen by its queries."""
        return self.step((seq, seq.length, seq.length), layer=layer, write=False)

    def attend(self, plan: Any, rows: Sequence[Row], layer: LayerSpec, *, write: bool = True) -> Floats:
        """`attend` with a plan made before: out [T, Hq, Dv]."""
        q, k, v = self.qkv(rows, layer)
        write = write and layer.kv_of is None
        return self.call(plan, layer, q, k if write else None, v if write else None)

    def call(self, plan: Any, layer: LayerSpec, q: torch.Tensor, k: Any = None, v: Any = None) -> Floats:
        """`attend` with tensors of the case's own: out, as many rows as q."""
        out = self.empty_out(len(q), layer)
        self.backend.attend(plan, layer.index, q, k, v, out)
        return self.to_array(out)

    def copy(self, pairs: Any, dst: Rig | None = None, after: Event | None = None) -> Event:
        """Copy blocks to the pool of `dst` (default: within this one); nothing waits for it yet."""
        target = self if dst is None else dst
        array = np.asarray(pairs, np.int32).reshape(-1, 2)
        return self.backend.copy_blocks(self.pool, target.pool, array, after=after)

    def clear(self, blocks: Sequence[int]) -> None:
        """Copy the null block over `blocks`; later compute waits for it."""
        self.backend.wait(self.copy([(0, block) for block in blocks]))

    def write(self, seq: Seq, start: int, end: int, layer: int | None = None) -> None:
        """Append positions start .. end-1 without attending; to every layer that owns bytes, or to one."""
        layers = self.group.layers if layer is None else (self.layer(layer),)
        most = self.spec.limits.tokens
        for low in range(start, end, most):
            high = min(end, low + most)
            rows = [(seq, high, high - low)]
            plan = self.backend.plan(self.pool, self.group_index, self.batch(rows))
            for spec in layers:
                if spec.kv_of is None:
                    _, k, v = self.qkv(rows, spec)
                    self.backend.attend(plan, spec.index, None, k, v, None)

    def fill(self, blocks: Sequence[int], value: float) -> None:
        """Write one number into every slot of `blocks`, every layer: what an earlier owner left."""
        size, most = self.block_size, self.spec.limits.tokens
        slots = (np.asarray(blocks, np.int64)[:, None] * size + np.arange(size)).reshape(-1)
        for part in np.array_split(slots, max(1, -(-len(slots) // most))) if len(slots) else ():
            plan = self.backend.plan(self.pool, self.group_index, self.batch([], slots=part))
            for layer in self.group.layers:
                if layer.kv_of is None:
                    k, v = (
                        torch.full((len(part), *s), value, dtype=TORCH[self.spec.dtype]) for s in _shapes(layer)[1:]
                    )
                    self.backend.attend(plan, layer.index, None, self.to_device(k), self.to_device(v), None)

    def poison(self, *, nan: bool) -> None:
        """Fill all blocks with NaN, or with large finite numbers, as earlier owners would have."""
        self.fill(range(1, self.spec.num_blocks), float("nan") if nan else 3e4)

    # -- what is expected ----------------------------------------------------------------------------------------------

    def expected(self, *rows: Row, layer: int | None = None) -> Floats:
        """The oracle's out [T, Hq, Dv]."""
        spec = self.layer(layer)
        outs = [self._oracle(row, spec)[0] for row in rows]
        return np.concatenate([*outs, np.zeros((0, spec.q_heads, spec.v_dim))])

    def expected_lse(self, *rows: Row, layer: int | None = None) -> Floats:
        """The oracle's log of each softmax denominator [T, Hq]."""
        spec = self.layer(layer)
        return np.concatenate([*(self._oracle(row, spec)[1] for row in rows), np.zeros((0, spec.q_heads))])

    def _oracle(self, row: Row, layer: LayerSpec) -> tuple[Floats, Floats]:
        seq, context, count = row
        q, k, v = seq.qkv(layer)
        params: Mapping[str, Any] = self.bound.get(layer.index, {})
        queries = q[context - count : context].double().numpy()
        keys, values = self.stored(layer, "k_scale", k[:context]), self.stored(layer, "v_scale", v[:context])
        return attention(layer, queries, keys, values, **params)

    @property
    def tolerance(self) -> float:
        """The largest absolute error allowed here."""
        return max(TOLERANCE[self.spec.dtype], TOLERANCE.get(self.group.kv_dtype, 0.0))


def _shapes(layer: LayerSpec) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """(heads, dim) of q, k, v."""
    return (layer.q_heads, layer.k_dim), (layer.kv_heads, layer.k_dim), (layer.kv_heads, layer.v_dim)
