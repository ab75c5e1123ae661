"""The contract in plain numpy, one query at a time: copy it, see it pass, then make the work at the end fast."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from pagedkv import api

Array = np.ndarray[Any, Any]
Row = tuple[int, int, int, Array]  # of a batch: its query tokens [start, end), its context length, its blocks in order
DTYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16)}


class Layer(NamedTuple):
    """One layer of a pool: keys and values [num_blocks, block_size, kv_heads, dim], and sinks [q_heads, 1]."""

    spec: api.LayerSpec
    keys: Array
    values: Array
    sinks: Array  # NaN until they are bound; minus infinity, which adds nothing, in a layer without


def require(holds: Any, law: str, message: str) -> None:
    if not holds:
        raise api.ContractViolation(message, law=law)


def refuse(reasons: Iterable[str]) -> None:
    if found := tuple(reasons):  # all at once, so that the user mends them in one go
        raise api.UnsupportedError(found)


def within(ids: Array, first: int, end: int) -> bool:
    return bool(((ids >= first) & (ids < end)).all())


def block_dtype(group: api.GroupSpec) -> np.dtype[Any]:
    """What a block holds: keys "k0" and values "v0" [block_size, kv_heads, dim] of layer 0, and so on."""
    owners = [layer for layer in group.layers if layer.kv_of is None]
    sides = [(f"k{layer.index}", layer.kv_heads, layer.k_dim) for layer in owners]
    sides += [(f"v{layer.index}", layer.kv_heads, layer.v_dim) for layer in owners]
    return np.dtype([(name, DTYPES[group.kv_dtype], (group.block_size, *shape)) for name, *shape in sides])


class TemplatePool(api.Pool):
    """A row of bytes for each block. An id belongs to one group at a time, so each group lays out the whole row."""

    def __init__(self, spec: api.PoolSpec, per_block: int) -> None:
        self.spec, self._open = spec, True
        self._blocks = np.zeros((spec.num_blocks, per_block), np.uint8)  # zeros: the null block has to read as zero
        self._layers = {layer.spec.index: layer for group in spec.groups for layer in self._lay_out(group)}

    def close(self) -> None:
        self._open, self._blocks, self._layers = False, np.zeros((0, 0), np.uint8), {}

    def _lay_out(self, group: api.GroupSpec) -> Iterator[Layer]:
        block = block_dtype(group)
        views = self._blocks[:, : block.itemsize].view(block)[:, 0]
        for spec in group.layers:
            owner = spec.index if spec.kv_of is None else spec.kv_of
            sinks = np.full((spec.q_heads, 1), np.nan if spec.sinks else -np.inf, np.float32)
            yield Layer(spec, views[f"k{owner}"], views[f"v{owner}"], sinks)


class TemplatePlan(api.Plan):
    """What attend needs of a batch, copied: the core may overwrite its arrays once `plan` has returned."""

    def __init__(self, pool: TemplatePool, group: api.GroupSpec, batch: api.Batch) -> None:
        self._pool, self._group, self._num_tokens = pool, group, batch.num_tokens
        self._slots = np.array([] if batch.slots is None else batch.slots, np.int64)
        starts, context = batch.cu_q[: batch.num_seqs + 1].tolist(), batch.ctx_len[: batch.num_seqs].tolist()
        asked, most = (batch.num_seqs, batch.num_tokens, max(context, default=0)), pool.spec.limits
        fits = all(got <= limit for got, limit in zip(asked, (most.rows, most.tokens, most.context), strict=True))
        require(fits, "limits", f"rows, tokens and context are {asked}, the pool was made for {most}")
        size, columns, slots = group.block_size, -(-asked[2] // group.block_size), self._slots[self._slots != -1]
        require(within(slots, size, size * pool.num_blocks), "slots", "a slot is -1, or in a block of the pool but 0")
        table = batch.block_table[batch.rows[: batch.num_seqs], :columns]  # copied, as every choice by an array is
        legal = starts[-1] == batch.num_tokens and table.shape[1] == columns and within(table, 0, pool.num_blocks)
        require(legal, "batch", f"cu_q ends at num_tokens, and {columns} columns of the table hold blocks of the pool")
        self._rows: list[Row] = list(zip(starts[:-1], starts[1:], context, table, strict=True))


class TemplateBackend(api.AttentionBackend):
    """Attention and pools in host memory. All is done when a call returns, so no queue and no stream appears."""

    def __init__(self, capabilities: api.Capabilities) -> None:
        self._capabilities, self._open = capabilities, True
        self._pools = weakref.WeakSet[TemplatePool]()

    def capabilities(self) -> api.Capabilities:
        return self._capabilities

    def pool_cost(self, spec: api.PoolSpec) -> api.PoolCost:
        """A block is as large as the largest group needs; fixed: the plans, and one row's keys, values and scores."""
        refuse(self._undeclared(spec))
        limits, layers = spec.limits, [layer for group in spec.groups for layer in group.layers]
        require(len({layer.index for layer in layers}) == len(layers), "pool spec", "layer indices must be distinct")
        widest = max((layer.q_heads * (layer.k_dim + layer.v_dim + 4) for layer in layers), default=0)
        columns = sum(limits.context // group.block_size + 40 for group in spec.groups)
        plans = limits.plans * (limits.rows * columns + limits.tokens * len(spec.groups))
        per_block = max((block_dtype(group).itemsize for group in spec.groups), default=0)
        return api.PoolCost.of(per_block=per_block, fixed=8 * (widest * (limits.context + limits.tokens) + plans))

    def alloc_pool(self, spec: api.PoolSpec) -> api.Pool:
        require(self._open, "use after close", "this backend was closed; create a new one")
        require(spec.num_blocks >= 1, "pool spec", "a pool has at least the null block")
        cost = self.pool_cost(spec)
        wanted = cost.fixed + spec.num_blocks * cost.per_block
        try:
            pool = TemplatePool(spec, cost.per_block)
        except (MemoryError, ValueError) as error:  # ValueError: more than numpy can count
            raise api.OutOfDeviceMemory(f"no {wanted} bytes for a pool: give fewer blocks", requested=wanted) from error
        self._pools.add(pool)
        return pool

    def plan(self, pool: api.Pool, group: int, batch: api.Batch) -> api.Plan:
        mine = self._mine(pool)
        refuse(f"feature {name!r} is not declared" for name in {*api.needs(batch)} - self._capabilities.features)
        require(0 <= group < len(mine.spec.groups), "group", f"the pool has no group {group}")
        return TemplatePlan(mine, mine.spec.groups[group], batch)

    def attend(
        self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        require(isinstance(plan, TemplatePlan), "plan", "attend takes a plan that this backend made")
        refuse(f"attend takes no extra {name!r}" for name in extra or ())
        found = self._layer(plan._pool, layer)
        self._check(plan, found, q, k, v, out)  # all of it before the first write: a call that raises changes nothing
        if k is not None:
            self._append(found, plan._slots, k.numpy(), v.numpy())  # numpy() is a view of a tensor in host memory
        if q is not None:
            for row in plan._rows:
                self._attend_row(found, row, q.numpy(), out.numpy())
            out[plan._num_tokens :] = 0  # padding, which has to be finite

    def copy_blocks(self, src: Any, dst: Any, pairs: Any, *, after: api.Event | None = None) -> api.Event:
        source, target, pairs = self._mine(src), self._mine(dst), np.array(pairs, np.int64).reshape(-1, 2)
        read, written = pairs.T
        require(source.spec.groups == target.spec.groups, "copy_blocks", "both pools must have the same groups")
        inside = within(read, 0, src.num_blocks) and within(written, 1, dst.num_blocks)
        require(inside, "copy_blocks", "ids must be blocks of their pools, and no destination block 0")
        distinct = len(np.unique(written)) == len(written) and not (src is dst and np.intersect1d(read, written).size)
        require(distinct, "copy_blocks", "destinations must be distinct, and within one pool no id on both sides")
        if after is not None:
            after.join()
        for pair in pairs.tolist():
            self._copy_block(source, target, *pair)
        return api.Event()  # one that is done

    def kv_budget(self, fraction: float | None, reserved: int) -> int | None:
        """1 GiB. A share of the memory is not known without `memory()`: the core then asks the user for a size."""
        return 1 << 30 if fraction is None else None

    def bind(self, pool: api.Pool, layer: int, params: Mapping[str, Any]) -> None:
        """Sinks, float32 [q_heads]; again after each reload, in place."""
        found = self._layer(pool, layer)
        taken = {"sinks": (found.spec.q_heads,)} if found.spec.sinks else {}
        refuse(f"layer {layer} takes {taken}, not {n!r}" for n, x in params.items() if taken.get(n) != np.shape(x))
        for value in params.values():
            found.sinks[:, 0] = value

    def close(self) -> None:
        self._open = False
        for pool in list(self._pools):
            pool.close()

    def _mine(self, pool: Any) -> TemplatePool:
        require(isinstance(pool, TemplatePool) and pool in self._pools, "pool", "this is no pool of this instance")
        require(self._open and pool._open, "use after close", "this pool was closed; allocate a new one")
        return pool

    def _layer(self, pool: api.Pool, index: int) -> Layer:
        layers = self._mine(pool)._layers
        require(index in layers, "layer index", f"the pool has the layers {sorted(layers)}, not {index}")
        return layers[index]

    def _check(self, plan: TemplatePlan, layer: Layer, q: Any, k: Any, v: Any, out: Any) -> None:
        spec, slots, dtype = layer.spec, len(plan._slots), f"torch.{DTYPES[plan._pool.spec.dtype]}"
        require(spec in plan._group.layers, "layer index", f"layer {spec.index} is not in the plan's group")
        require((k is None) == (v is None) and (q is None) == (out is None), "attend forms", "half a pair is missing")
        require(k is None or spec.kv_of is None, "kv_of", f"layer {spec.index} owns no cache: k = v = None")
        require(q is None or not np.isnan(layer.sinks).any(), "bind", f"bind the sinks of layer {spec.index} first")
        wanted = {"q": (q, plan._num_tokens, spec.q_heads, spec.k_dim), "k": (k, slots, spec.kv_heads, spec.k_dim)}
        wanted |= {"v": (v, slots, spec.kv_heads, spec.v_dim), "out": (out, plan._num_tokens, spec.q_heads, spec.v_dim)}
        for name, (tensor, rows, *dims) in wanted.items():
            if tensor is not None:
                fits = str(tensor.dtype) == dtype and len(tensor) >= rows and list(tensor.shape[1:]) == dims
                require(fits, "attend tensors", f"{name} must be {dtype} [>= {rows}, {dims[0]}, {dims[1]}]")
        require(out is None or out.is_contiguous(), "attend tensors", "out must be contiguous")

    def _undeclared(self, spec: api.PoolSpec) -> Iterator[str]:
        """Each value in `spec` that `capabilities` leaves out."""
        can = self._capabilities  # of sizes it declares one range each
        sizes, dims = (range(least, most + 1, step) for ((step, least, most),) in (can.block_sizes, can.head_dims))
        asked: Any = [("dtype", spec.dtype, can.dtypes), ("placement", spec.placement, can.placements)]
        asked += [("feature", name, can.features) for name in sorted({*spec.features, *api.needs(spec)})]
        for group in spec.groups:
            asked += [("KV dtype", group.kv_dtype, can.kv_dtypes), ("block size", group.block_size, sizes)]
            for layer in group.layers:
                mine = layer.kv_heads, layer.k_dim, layer.v_dim
                owners = {o.index for o in group.layers if o.kv_of is None and (o.kv_heads, o.k_dim, o.v_dim) == mine}
                shared = f"kv_of of layer {layer.index}", layer.kv_of, {None, *owners}
                asked += [shared, ("kind", layer.kind, can.kinds)]
                asked += [("head dim", layer.k_dim, dims), ("head dim", layer.v_dim, dims)]
                asked += [("KV heads", layer.kv_heads, range(1, layer.q_heads + 1))]
        yield from dict.fromkeys(f"{what} {got!r} is not one of {ok}" for what, got, ok in asked if got not in ok)

    # -- the work: replace it ------------------------------------------------------------------------------------------

    def _append(self, layer: Layer, slots: Array, k: Array, v: Array) -> None:
        """Row i of k and v goes to slots[i], rounded to the KV dtype; -1 is not written."""
        kept = np.flatnonzero(slots >= 0)
        block, offset = np.divmod(slots[kept], layer.keys.shape[1])
        layer.keys[block, offset] = k[kept]
        layer.values[block, offset] = v[kept]

    def _attend_row(self, layer: Layer, row: Row, q: Array, out: Array) -> None:
        """Each query of a row alone; the last one stands at position context - 1."""
        start, stop, context, blocks = row
        keys, values = self._read(layer, blocks, context)
        for j in range(start, stop):
            first, end = self._visible(layer.spec, context - stop + j, context)
            out[j] = 0
            if first < end:
                weights = self._weights(layer, self._scores(layer.spec, q[j].astype(np.float32), keys[first:end]))
                # einsum adds in one order, whoever shares the batch; a matrix product does not promise that.
                out[j] = np.einsum("hn,nhd->hd", weights, values[first:end])

    def _read(self, layer: Layer, blocks: Array, context: int) -> tuple[Array, Array]:
        """Keys and values as they are stored, those that each query head reads: float32 [context, q_heads, dim]."""
        column, offset = np.divmod(np.arange(context)[:, None], layer.keys.shape[1])
        heads = np.arange(layer.spec.q_heads) * layer.spec.kv_heads // layer.spec.q_heads
        where = blocks[column], offset, heads
        return layer.keys[where].astype(np.float32), layer.values[where].astype(np.float32)

    def _visible(self, spec: api.LayerSpec, position: int, context: int) -> tuple[int, int]:
        """[first, end) of the keys that a query at `position` sees."""
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        return first, min(context, position + 1) if spec.causal else context

    def _scores(self, spec: api.LayerSpec, q: Array, keys: Array) -> Array:
        """[q_heads, keys] of q [q_heads, dim] and keys [keys, q_heads, dim]."""
        scores: Array = np.einsum("hd,nhd->hn", q, keys) * np.float32(spec.scale)
        return scores if spec.softcap is None else np.tanh(scores / spec.softcap) * spec.softcap

    def _weights(self, layer: Layer, scores: Array) -> Array:
        """The softmax of each head's scores; a sink is one more term of its denominator."""
        top = np.maximum(scores.max(1, keepdims=True), layer.sinks)
        weights: Array = np.exp(scores - top)
        return weights / (weights.sum(1, keepdims=True) + np.exp(layer.sinks - top))

    def _copy_block(self, src: TemplatePool, dst: TemplatePool, read: int, written: int) -> None:
        dst._blocks[written] = src._blocks[read]
