"""Checks that every backend makes of what it is asked for, in the same words: optional, for backends that want them.

    reasons_against   a pool spec against what was declared: every reason, one sentence each
    check_batch       a batch against the pool's limits, blocks and block size: `ContractViolation`
    checked_pairs     the pairs of `copy_blocks`: `ContractViolation`, or a copy of them
    check_parameters  the values of `bind`: every reason

Standard library and numpy; what needs torch stands in `pagedkv.api.torch_checks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from pagedkv.api.backend import Pool
from pagedkv.api.errors import ContractViolation
from pagedkv.api.records import (
    Batch,
    Capabilities,
    GroupSpec,
    Int64,
    LayerSpec,
    Limits,
    PoolSpec,
    Sizes,
    needs,
)

PARAMETERS = ("sinks", "alibi")
"""What a layer may need by `bind`, float32 [q_heads]; its spec has a field of the same name."""
SCALES = ("k_scale", "v_scale")
"""What a cache with scales of a tensor takes by `bind`, a number or [kv_heads]."""


# -- what a pool may be ------------------------------------------------------------------------------------------------


def reasons_against(spec: PoolSpec, can: Capabilities) -> list[str]:
    """Everything in `spec` that `can` does not declare, one sentence each."""
    found = [*_of_pool(spec, can)]
    for number, group in enumerate(spec.groups):
        found += [f"group {number}: {reason}" for reason in _of_group(group, spec, can)]
    seen = Counter(layer.index for group in spec.groups for layer in group.layers)
    found += [f"layer index {index} stands {count} times in the pool" for index, count in seen.items() if count > 1]
    return found


def check_size(spec: PoolSpec) -> None:
    """`ContractViolation` for a pool without block 0, or with negative limits."""
    limits = spec.limits
    if spec.num_blocks < 1 or min(limits.rows, limits.tokens, limits.context, limits.plans) < 0:
        raise ContractViolation("a pool has at least block 0, and limits are not negative", law="pool spec")


def _of_pool(spec: PoolSpec, can: Capabilities) -> Iterator[str]:
    yield from _one_of("dtype", spec.dtype, can.dtypes)
    yield from _one_of("placement", spec.placement, sorted(can.placements))
    wanted = spec.features.union(*(needs(layer) for group in spec.groups for layer in group.layers))
    for feature in sorted(wanted - can.features):
        yield from excluded({"feature": feature}, can)
        yield from _one_of("feature", feature, sorted(can.features))


def _of_group(group: GroupSpec, spec: PoolSpec, can: Capabilities) -> Iterator[str]:
    yield from _one_of("KV dtype", group.kv_dtype, can.kv_dtypes)
    yield from _within("block size", group.block_size, can.block_sizes)
    yield from excluded({"dtype": spec.dtype, "kv_dtype": group.kv_dtype, "block_size": group.block_size}, can)
    owners = {layer.index: layer for layer in group.layers if layer.kv_of is None}
    for layer in group.layers:
        yield from (f"layer {layer.index}: {reason}" for reason in _of_layer(layer, owners, can))


def _of_layer(layer: LayerSpec, owners: Mapping[int, LayerSpec], can: Capabilities) -> Iterator[str]:
    yield from _one_of("kind", layer.kind, sorted(can.kinds))
    yield from _within("k_dim", layer.k_dim, can.head_dims)
    yield from _within("v_dim", layer.v_dim, can.head_dims)
    if layer.kv_heads < 1 or layer.q_heads < layer.kv_heads:
        yield f"{layer.q_heads} query heads cannot share {layer.kv_heads} KV heads"
    elif can.max_group is not None and -(-layer.q_heads // layer.kv_heads) > can.max_group:
        yield f"{layer.q_heads} query heads on {layer.kv_heads} KV heads: at most {can.max_group} share one"
    if layer.window is not None and layer.window < 1:
        yield f"window {layer.window} is not positive"
    if layer.softcap is not None and not layer.softcap > 0:
        yield f"softcap {layer.softcap} is not positive"
    if layer.kv_of is not None:
        owner = owners.get(layer.kv_of)
        if owner is None:
            yield f"kv_of {layer.kv_of} is no layer of this group with a cache of its own"
        elif (owner.kv_heads, owner.k_dim, owner.v_dim) != (layer.kv_heads, layer.k_dim, layer.v_dim):
            yield f"kv_of {layer.kv_of} has other KV heads or dims"


def excluded(given: Mapping[str, Any], can: Capabilities) -> Iterator[str]:
    """The reasons of exclusions that speak of nothing but what is given."""
    for pattern, reason in can.exclusions:
        if pattern.keys() <= given.keys() and all(_matches(given[key], value) for key, value in pattern.items()):
            yield reason


def _one_of(name: str, value: str, accepted: Iterable[str]) -> list[str]:
    return [] if value in accepted else [f"{name} {value!r} is not one of {', '.join(accepted)}"]


def _matches(value: Any, pattern: Any) -> bool:
    if isinstance(pattern, tuple):
        return _accepts(pattern, value)
    return value in pattern if isinstance(pattern, (set, frozenset)) else bool(value == pattern)


def _within(name: str, value: int, alternatives: tuple[Sizes, ...]) -> list[str]:
    if any(_accepts(allowed, value) for allowed in alternatives):
        return []
    return [f"{name} {value} is not within {' or '.join(map(_spell, alternatives))}"]


def _accepts(allowed: Any, size: int) -> bool:
    if isinstance(allowed, (set, frozenset)):
        return size in allowed
    return bool(allowed[1] <= size <= allowed[2] and size % allowed[0] == 0)


def _spell(allowed: Sizes) -> str:
    if isinstance(allowed, frozenset):
        return ", ".join(map(str, sorted(allowed)))
    return f"{allowed[1]}..{allowed[2]} in steps of {allowed[0]}"


# -- batches -----------------------------------------------------------------------------------------------------------


def undeclared(batch: Batch, can: Capabilities) -> list[str]:
    """The reasons against a batch that uses what was not declared."""
    return [f"the batch uses {name!r}, which was not declared" for name in sorted(set(needs(batch)) - can.features)]


def check_limits(batch: Batch, limits: Limits) -> None:
    """`ContractViolation` where a batch is larger than what was announced."""
    longest = int(batch.ctx_len[: batch.num_seqs].max(initial=0))
    given = {
        "rows": (batch.num_seqs, limits.rows),
        "tokens": (batch.num_tokens, limits.tokens),
        "context": (longest, limits.context),
    }
    for name, (value, limit) in given.items():
        if value > limit:
            raise ContractViolation(f"the batch has {name} {value}, the limit is {limit}", law="limits")


def check_batch(batch: Batch, block_size: int, num_blocks: int) -> None:
    """`ContractViolation` for arrays that do not describe one batch of such a pool."""
    count = batch.num_seqs
    starts, contexts, rows = batch.cu_q[: count + 1], batch.ctx_len[:count], batch.rows[:count]
    if len(starts) != count + 1 or starts[0] != 0 or starts[-1] != batch.num_tokens or (np.diff(starts) < 0).any():
        raise ContractViolation("cu_q must rise from 0 to num_tokens over num_seqs + 1 entries", law="batch")
    if min(len(contexts), len(rows)) < count or (contexts < 0).any():
        raise ContractViolation("ctx_len and rows have one entry of at least 0 for each sequence", law="batch")
    if not 0 <= rows.min(initial=0) <= rows.max(initial=0) < len(batch.block_table):
        raise ContractViolation(f"rows names a row outside 0..{len(batch.block_table) - 1}", law="batch")
    _check_table(batch, -(-int(contexts.max(initial=0)) // block_size), num_blocks)
    if batch.slots is not None:
        _check_slots(batch.slots, block_size, num_blocks * block_size)


def _check_table(batch: Batch, columns: int, num_blocks: int) -> None:
    if columns > batch.block_table.shape[1]:
        raise ContractViolation(
            f"a context needs {columns} blocks and the block table has {batch.block_table.shape[1]} columns",
            law="batch",
        )
    named = batch.block_table[batch.rows[: batch.num_seqs], :columns]
    if named.size and not 0 <= named.min() <= named.max() < num_blocks:
        raise ContractViolation(f"the block table names a block outside 0..{num_blocks - 1}", law="batch")


def _check_slots(slots: Any, block_size: int, end: int) -> None:
    used = slots[slots != -1]
    if used.size and not block_size <= used.min() <= used.max() < end:
        raise ContractViolation(
            f"slots must be -1 or {block_size}..{end - 1}, as block 0 is never written; got {used.min()}..{used.max()}",
            law="slots",
        )


# -- copies and parameters ---------------------------------------------------------------------------------------------


def checked_pairs(pairs: Any, source: Pool, target: Pool) -> Int64:
    """A copy of `copy_blocks`' pairs, int64 [N, 2], or `ContractViolation` with what is wrong."""
    if source.spec.groups != target.spec.groups:
        raise ContractViolation("blocks are copied between pools of equal groups only", law="copy_blocks")
    array: Int64 = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    sources, targets = array[:, 0], array[:, 1]
    problem = None
    if array.size and not (sources.min() >= 0 and sources.max() < source.num_blocks):
        problem = f"a source outside 0..{source.num_blocks - 1}"
    elif array.size and not (targets.min() > 0 and targets.max() < target.num_blocks):
        problem = f"a destination outside 1..{target.num_blocks - 1} (block 0 is never written)"
    elif len(np.unique(targets)) != len(targets):
        problem = "a destination twice"
    elif source is target and np.intersect1d(sources, targets).size:
        problem = "an id on both sides within one pool"
    if problem is not None:
        raise ContractViolation(f"copy_blocks got {problem}", law="copy_blocks")
    return array


def reasons_against_parameters(layer: LayerSpec, kv_dtype: str, params: Mapping[str, Any]) -> list[str]:
    """Everything wrong with what `bind` was given for a layer of a cache of `kv_dtype`."""
    found = []
    for name, values in params.items():
        shapes = _parameter_shapes(layer, kv_dtype, name)
        if not shapes:
            found.append(f"layer {layer.index} takes no {name!r} with a cache of {kv_dtype}")
        elif np.shape(values) not in shapes:
            found.append(f"{name!r} must have shape {' or '.join(map(str, shapes))}, got {np.shape(values)}")
        elif name in SCALES and not all(0 < value < np.inf for value in np.ravel(values)):
            found.append(f"{name!r} must be finite and above 0")
    return found


def _parameter_shapes(layer: LayerSpec, kv_dtype: str, name: str) -> list[tuple[int, ...]]:
    """The shapes of such a value; none where the layer takes none."""
    if name in PARAMETERS:
        return [(layer.q_heads,)] if getattr(layer, name) else []
    bound = name in SCALES and kv_dtype.endswith("/tensor") and layer.kv_of is None
    return [(), (layer.kv_heads,)] if bound else []
