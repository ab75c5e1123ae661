"""One loopback instance. Each step of each meaning is a method of its own, so that a test can replace just one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pagedkv.api import (
    AttentionBackend,
    Batch,
    Capabilities,
    Communicator,
    ContractViolation,
    DeviceError,
    Event,
    LayerSpec,
    MemoryInfo,
    OpSpec,
    Plan,
    Pool,
    PoolCost,
    PoolSpec,
    UnsupportedError,
    World,
    needs,
)
from pagedkv.api.records import Int32
from pagedkv.conformance.loopback import checks
from pagedkv.conformance.loopback.canonical import LoopbackCanonicalKV
from pagedkv.conformance.loopback.graph import LoopbackGraphs
from pagedkv.conformance.loopback.linear import Linear
from pagedkv.conformance.loopback.plans import LoopbackPlan, Staged
from pagedkv.conformance.loopback.pool import (
    INT8_LARGEST,
    POISON,
    SCALED_BY_TOKEN,
    Array,
    Floats,
    Layer,
    LoopbackPool,
    from_stored,
    pool_cost,
    to_stored,
)
from pagedkv.conformance.loopback.queues import Queues
from pagedkv.conformance.loopback.sampling import greedy, sample


class LoopbackBackend(AttentionBackend):
    """Attention in float64, one query at a time, over memory of its own. `memory` is in bytes."""

    def __init__(
        self,
        capabilities: Capabilities,
        world: World,
        *,
        memory: int = 1 << 30,
        order: str = "late",
        seed: int = 0,
        fail_at: int = 0,
    ) -> None:
        self._capabilities, self._world = capabilities, world
        self._memory_total = memory
        self._fail_at, self._attends = fail_at, 0
        self._queues = Queues(order, seed)
        self._pools: weakref.WeakSet[LoopbackPool] = weakref.WeakSet()
        self._communicators: list[Any] = []
        self._graphs = LoopbackGraphs(self)
        self._canonical = LoopbackCanonicalKV(self)
        self._closed = False

    # -- pure ----------------------------------------------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def pool_cost(self, spec: PoolSpec) -> PoolCost:
        self._refuse(self._reasons(spec))
        return pool_cost(spec)

    # -- memory --------------------------------------------------------------------------------------------------------

    def alloc_pool(self, spec: PoolSpec) -> Pool:
        self._begin("allocates no pool")
        self._refuse(self._reasons(spec))
        checks.check_pool_spec(spec)
        pool = LoopbackPool(spec, self, self._free() if spec.placement == "device" else None)
        self._pools.add(pool)
        return pool

    def memory(self) -> MemoryInfo:
        self._begin()
        return MemoryInfo.of(free=self._free(), total=self._memory_total, reclaimable=0, unified=False)

    def bind(self, pool: Pool, layer: int, params: Mapping[str, Any]) -> None:
        """Sinks and ALiBi slopes, each float32 [q_heads], and scales. The addresses stay, so recordings see them."""
        self._begin()
        found = self._mine(pool)._layer(layer)
        self._refuse(checks.reasons_against_params(found, params))
        for name, values in params.items():
            found.bound[name] = np.array(values, np.float32)
        for scale, name in ((found.k_scale, "k_scale"), (found.v_scale, "v_scale")):
            if scale is not None and name in params:
                self._bind_scale(scale, found.bound[name])

    def _bind_scale(self, scale: Array, values: Array) -> None:
        """In its turn: an append that was enqueued before divides by the scale from before."""
        self._queues.compute(lambda: np.copyto(scale, values))

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self, pool: Pool, group: int, batch: Batch) -> Plan:
        self._begin("plans nothing")
        mine = self._plannable(pool, group)
        limits = mine.spec.limits
        checks.check_limits(batch, limits.rows, limits.tokens, limits.context)
        plan = LoopbackPlan(mine, group, self._checked(mine, group, batch))
        self._retire(mine, group, plan)
        return plan

    def _plannable(self, pool: Pool, group: int) -> LoopbackPool:
        """The pool, open and on the device, with such a group."""
        mine = self._mine(pool)
        if mine.placement == "host":
            raise ContractViolation(
                "this pool has placement 'host' and holds blocks only; plan on a pool with placement 'device'",
                law="placement",
            )
        if not 0 <= group < len(mine.spec.groups):
            raise ContractViolation(f"the pool has groups 0..{len(mine.spec.groups) - 1}, not {group}", law="group")
        return mine

    def _checked(self, pool: LoopbackPool, group: int, batch: Batch) -> Staged:
        """The batch in own arrays, after every check."""
        undeclared = sorted(set(needs(batch)) - self._capabilities.features)
        self._refuse([f"the batch uses {name!r}, which was not declared" for name in undeclared])
        block_size = pool.spec.groups[group].block_size
        checks.check_batch(batch, pool, block_size)
        return self._stage(batch, block_size)

    def _stage(self, batch: Batch, block_size: int) -> Staged:
        """Copies of all that later calls read."""
        count = batch.num_seqs
        columns = -(-int(batch.ctx_len[:count].max(initial=0)) // block_size)
        slots = np.zeros(0, np.int64) if batch.slots is None else batch.slots
        return Staged(
            num_tokens=batch.num_tokens,
            starts=self._hold(batch.cu_q[: count + 1]),
            contexts=self._hold(batch.ctx_len[:count]),
            tables=self._hold(self._tables(batch)[:, :columns]),
            slots=self._hold(slots),
        )

    def _tables(self, batch: Batch) -> Int32:
        """The block tables of the batch's rows, in its order."""
        return batch.block_table[batch.rows[: batch.num_seqs]]

    def _hold(self, array: Array) -> Array:
        """An array that the core cannot reach."""
        return np.array(array)

    def _retire(self, pool: LoopbackPool, group: int, plan: LoopbackPlan) -> None:
        """Count `plan` among those alive; the oldest beyond `limits.plans` is over."""
        alive = pool._plans[group]
        alive.append(plan)
        while len(alive) > max(1, pool.spec.limits.plans):
            alive.popleft()._spent = True

    # -- attend --------------------------------------------------------------------------------------------------------

    def attend(
        self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Appends run later, with copies of their arguments; with `out` the call's work ends before it returns."""
        self._begin()
        mine = self._my_plan(plan)
        found, given = mine._pool._layer(layer), mine._next
        if found.group != mine._group:
            raise ContractViolation(f"layer {layer} is not in the plan's group {mine._group}", law="layer index")
        checks.check_attend(found, mine._pool.spec.dtype, given.num_tokens, len(given.slots), q, k, v, out)
        lse = self._lse_of(extra, found, given, q)
        self._count_attend()
        self._graphs.note(mine, layer, (q is not None, k is not None))
        if k is not None:
            self._append_later(mine, found, k, v)
        if q is not None:
            self._queues.finish(self._queues.compute(lambda: self._attend(mine, found, q, out, lse)))

    def _my_plan(self, plan: Any) -> LoopbackPlan:
        if not isinstance(plan, LoopbackPlan) or plan._pool not in self._pools:
            raise ContractViolation("attend takes a plan made by this backend", law="plan")
        plan._check()
        return plan

    def _lse_of(self, extra: Mapping[str, Any] | None, layer: Layer, staged: Staged, q: Any) -> Any:
        """The tensor in `extra` that takes the log of the denominators, or None."""
        given = dict(extra or {})
        lse = given.pop("lse", None) if "lse" in self._capabilities.features else None
        if given:
            raise UnsupportedError(f"attend takes no extra argument {', '.join(map(repr, sorted(given)))}")
        if lse is not None:
            checks.check_lse(lse, staged.num_tokens, layer.spec.q_heads, q)
        return lse

    def _count_attend(self) -> None:
        self._attends += 1
        if self._attends == self._fail_at:
            self._queues.fail(DeviceError(f"the device failed at attend {self._fail_at}, as option fail_at asks"))
            self._queues.check()

    def _append_later(self, plan: LoopbackPlan, layer: Layer, k: Any, v: Any) -> None:
        rows = len(plan._next.slots)
        keys, values = self._argument(k, rows), self._argument(v, rows)
        self._queues.compute(lambda: self._append(layer, plan._now.slots, keys, values))

    def _argument(self, tensor: Any, rows: int) -> Array:
        """A float32 copy of a tensor's first rows."""
        return np.array(tensor.detach()[:rows].float().numpy())

    def _append(self, layer: Layer, slots: Array, keys: Array, values: Array) -> None:
        """Write row i of keys, values [A, kv_heads, dim] to slots[i]."""
        kept = np.flatnonzero(slots >= 0)
        at = np.divmod(slots[kept], layer.keys.shape[1])
        for (cache, scale), rows in zip(layer.halves(), (keys[kept], values[kept]), strict=True):
            cache[at] = self._to_stored(self._scaled(rows, layer.kv_dtype, scale, at), layer.kv_dtype)

    def _scaled(self, rows: Array, kv_dtype: str, scale: Array | None, at: tuple[Array, Array]) -> Array:
        """Rows [A, kv_heads, dim] over their scales, which are made and stored here where each token has its own."""
        if scale is None:
            return rows
        used = scale
        if kv_dtype in SCALED_BY_TOKEN:
            used = scale[at] = self._token_scales(rows)
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is stored as such, not reported
            return np.asarray(rows / used[..., None], np.float32)

    def _token_scales(self, rows: Array) -> Array:
        """float32 [A, kv_heads]: the largest number of a token and head over that of int8, 1 where all are zero."""
        scales = np.abs(rows).max(-1) / np.float32(INT8_LARGEST)
        return np.where(scales == 0, np.float32(1), scales)

    def _to_stored(self, values: Array, kv_dtype: str) -> Array:
        return to_stored(values, kv_dtype)

    def _attend(self, plan: LoopbackPlan, layer: Layer, q: Any, out: Any, lse: Any) -> None:
        """Every row of the batch; rows of `out` past its tokens become zeros."""
        staged = plan._now
        queries = self._argument(q, staged.num_tokens).astype(np.float64)
        result = np.zeros((len(out), *out.shape[1:]))
        logs = np.full((staged.num_tokens, layer.spec.q_heads), -np.inf)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN that was stored is passed on, not reported
            for row in range(len(staged.contexts)):
                self._attend_row(layer, staged, row, queries, result, logs)
        out.copy_(torch.from_numpy(result))
        if lse is not None:
            lse[: staged.num_tokens].copy_(torch.from_numpy(logs))

    def _attend_row(self, layer: Layer, staged: Staged, row: int, q: Floats, out: Floats, logs: Floats) -> None:
        """One sequence's queries, each on its own."""
        start, end = int(staged.starts[row]), int(staged.starts[row + 1])
        if start == end:
            return
        context = int(staged.contexts[row])
        keys, values = self._gather(layer, staged.tables[row], context)
        for token in range(start, end):
            position = self._position(context, end - start, token - start)
            seen = self._visible(layer.spec, context, position)
            distances = np.arange(seen.start, seen.stop) - position
            out[token], logs[token] = self._attend_token(layer, q[token], keys[seen], values[seen], distances)
            out[token] += self._leak(keys, values, seen)

    def _position(self, context: int, count: int, number: int) -> int:
        """Where query `number` of a row with `count` of them stands."""
        return context - count + number

    def _visible(self, spec: LayerSpec, context: int, position: int) -> slice:
        """The positions of the keys that a query at `position` sees."""
        first = 0 if spec.window is None else max(0, position - spec.window + 1)
        end = min(context, position + 1) if spec.causal else context
        return slice(first, max(first, end))

    def _gather(self, layer: Layer, table: Int32, context: int) -> tuple[Floats, Floats]:
        """Keys and values of the blocks of a context, [tokens, kv_heads, dim]: whole blocks, as stored."""
        blocks = table[: -(-context // layer.keys.shape[1])]
        read = (self._read(cache, scale, layer.kv_dtype, blocks) for cache, scale in layer.halves())
        keys, values = (cache.reshape(-1, *cache.shape[2:]) for cache in read)
        return keys, values

    def _read(self, cache: Array, scale: Array | None, kv_dtype: str, blocks: Int32) -> Floats:
        """The numbers of blocks [n, block_size, kv_heads, dim]."""
        numbers = from_stored(cache[blocks], kv_dtype)
        if scale is None:
            return numbers
        used = scale[blocks] if kv_dtype in SCALED_BY_TOKEN else scale
        return numbers * used[..., None].astype(np.float64)

    def _attend_token(
        self, layer: Layer, q: Floats, keys: Floats, values: Floats, distances: Array
    ) -> tuple[Floats, Floats]:
        """One query q [q_heads, k_dim] over what it sees: (out [q_heads, v_dim], log of the denominator [q_heads])."""
        if not len(keys):  # the denominator is the sink's part alone
            return np.zeros((len(q), values.shape[2])), np.full(len(q), layer.bound.get("sinks", -np.inf))
        heads = self._kv_heads(layer.spec)
        scores = self._scores(layer, q, keys[:, heads], distances)
        top, weights, total = self._weights(layer, scores)
        return np.einsum("hn,nhd->hd", weights, values[:, heads]) / total[:, None], top + np.log(total)

    def _kv_heads(self, spec: LayerSpec) -> Array:
        """The KV head that each query head reads."""
        return np.arange(spec.q_heads) * spec.kv_heads // spec.q_heads

    def _scores(self, layer: Layer, q: Floats, keys: Floats, distances: Array) -> Floats:
        """Scores [q_heads, keys]; `distances` [keys] are key position - query position."""
        scores = self._softcapped(layer.spec, np.einsum("hd,nhd->hn", q, keys) * layer.spec.scale)
        return scores + self._bias(layer, distances)

    def _softcapped(self, spec: LayerSpec, scores: Floats) -> Floats:
        return scores if spec.softcap is None else spec.softcap * np.tanh(scores / spec.softcap)

    def _bias(self, layer: Layer, distances: Array) -> Floats | float:
        """ALiBi: slope x distance (Press et al., 2022)."""
        return layer.bound["alibi"].astype(np.float64)[:, None] * distances if layer.spec.alibi else 0.0

    def _weights(self, layer: Layer, scores: Floats) -> tuple[Floats, Floats, Floats]:
        """(top [q_heads], exp(scores - top), their sum with the sink's part)."""
        top = scores.max(axis=1)
        if layer.spec.sinks:
            top = np.maximum(top, layer.bound["sinks"])
        weights = np.exp(scores - top[:, None])
        return top, weights, weights.sum(axis=1) + self._sink(layer, top)

    def _sink(self, layer: Layer, top: Floats) -> Floats | float:
        """What a sink adds to the denominator."""
        return np.exp(layer.bound["sinks"] - top) if layer.spec.sinks else 0.0

    def _leak(self, keys: Floats, values: Floats, seen: slice) -> float:
        """What hidden slots add: nothing. Where nan_safe is undeclared, 0 x their contents, as masked kernels do."""
        if "nan_safe" in self._capabilities.features:
            return 0.0
        hidden = np.ones(len(keys), bool)
        hidden[seen] = False
        return 0.0 * float(keys[hidden].sum() + values[hidden].sum())

    # -- copies --------------------------------------------------------------------------------------------------------

    def copy_blocks(self, src: Pool, dst: Pool, pairs: Int32, *, after: Event | None = None) -> Event:
        self._begin()
        mine, other = self._mine(src), self._mine(dst)
        if mine.spec.groups != other.spec.groups:
            raise ContractViolation("blocks are copied between pools of equal groups only", law="copy_blocks")
        held = self._pairs(pairs)
        checks.check_pairs(held, mine, other)
        return self._queues.copy(lambda: self._run_copy(mine, other, held), after)

    def _pairs(self, pairs: Int32) -> Int32:
        """The pairs [N, 2] in an array that the core cannot reach."""
        return self._hold(np.asarray(pairs).reshape(-1, 2))

    def _run_copy(self, src: LoopbackPool, dst: LoopbackPool, pairs: Int32) -> None:
        for source, target in pairs.tolist():
            self._copy_pair(src, dst, source, target)

    def _copy_pair(self, src: LoopbackPool, dst: LoopbackPool, source: int, target: int) -> None:
        """Every byte of a block."""
        dst._bytes[target] = src._bytes[source]

    # -- time ----------------------------------------------------------------------------------------------------------

    def record(self) -> Event:
        self._begin()
        return self._queues.record()

    def wait(self, event: Event) -> None:
        self._begin("waits for nothing")
        self._queues.wait(event)

    def synchronize(self) -> None:
        self._begin("waits for nothing")
        self._queues.synchronize()

    def to_host(self, tensor: Any) -> tuple[Event, Any]:
        """(event, array). Until the event is done the array holds poison; bf16 comes as float32."""
        self._begin()
        values = np.array((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy())
        return self._delayed(values.shape, values.dtype, lambda: values)

    def _delayed(self, shape: tuple[int, ...], dtype: np.dtype[Any], make: Callable[[], Array]) -> tuple[Event, Array]:
        """(event, array): poison until the event, then what `make` gives when its turn on the copy queue comes."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        array = np.full(size, POISON, np.uint8).view(dtype).reshape(shape)
        return self._queues.copy(lambda: np.copyto(array, make())), array

    # -- everything else -----------------------------------------------------------------------------------------------

    def communicator(self, group: Sequence[int]) -> Communicator:
        self._begin()
        from pagedkv.api.torch import communicator

        made = communicator("gloo", self._world, group, ordered=True)
        self._communicators.append(made)
        return made

    def op(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        """`linear`, row by row, since its reference lets a row's bits depend on the other rows; `greedy`, `sample`."""
        self._begin()
        known: dict[str, Callable[..., Any]] = {"linear": Linear(), "greedy": greedy, "sample": sample}
        return None if spec.attributes or spec.features else known.get(name)

    def extension(self, name: str) -> Any | None:
        self._begin()
        known = {"graph": self._graphs, "canonical_kv": self._canonical}
        return known.get(name) if name in self._capabilities.extensions else None

    def close(self) -> None:
        if self._closed:
            return
        self._graphs.end()
        self._settle()
        for communicator in self._communicators:
            communicator.close()
        for pool in list(self._pools):
            pool.close()
        self._closed = True

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin(self, unrecordable: str = "") -> None:
        """What each call starts with. `unrecordable`: what a recorded function may not do, this call being one."""
        if self._closed:
            raise ContractViolation("this backend was closed; create a new one", law="use after close")
        for communicator in self._communicators:
            if communicator.failure is not None:
                self._queues.fail(communicator.failure)
        self._queues.check()
        if unrecordable and self._queues.recording:
            raise ContractViolation(f"a recorded function {unrecordable}; do it before or after", law="graph")

    def _mine(self, pool: Pool) -> LoopbackPool:
        if not isinstance(pool, LoopbackPool) or pool not in self._pools:
            raise ContractViolation("this pool belongs to another backend instance", law="pool")
        pool._check_open()
        return pool

    def _refuse(self, reasons: list[str]) -> None:
        if reasons:
            raise UnsupportedError(reasons)

    def _reasons(self, spec: PoolSpec) -> list[str]:
        return checks.reasons_against(spec, self._capabilities)

    def _free(self) -> int:
        """Bytes left for pools on the device and for graphs."""
        pools = sum(pool._nbytes for pool in self._pools if pool.placement == "device" and not pool._closed)
        return self._memory_total - pools - self._graphs.nbytes

    def _settle(self) -> None:
        """End what is enqueued, before memory goes; a device that failed ends nothing."""
        if self._queues.failure is None:
            self._queues.synchronize()
