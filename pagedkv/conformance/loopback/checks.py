"""What may be asked: every reason against a pool, and the laws that each call's arguments keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from pagedkv.api import Batch, Capabilities, ContractViolation, GroupSpec, LayerSpec, PoolSpec, needs
from pagedkv.conformance.loopback.pool import SCALED_BY_TENSOR, TORCH, Layer, LoopbackPool

SCALES = ("k_scale", "v_scale")

# -- pools -------------------------------------------------------------------------------------------------------------


def reasons_against(spec: PoolSpec, can: Capabilities) -> list[str]:
    """Everything in `spec` that `can` does not declare, one sentence each."""
    found = [*_of_pool(spec, can)]
    for number, group in enumerate(spec.groups):
        found += [f"group {number}: {reason}" for reason in _of_group(group, can)]
    counts = Counter(layer.index for group in spec.groups for layer in group.layers)
    found += [f"layer index {index} stands {count} times in the pool" for index, count in counts.items() if count > 1]
    return found


def _one_of(name: str, value: str, accepted: Iterable[str]) -> list[str]:
    return [] if value in accepted else [f"{name} {value!r} is not one of {', '.join(accepted)}"]


def _within(name: str, value: int, alternatives: Iterable[Any]) -> list[str]:
    for allowed in alternatives:
        if isinstance(allowed, frozenset):
            fits = value in allowed
        else:
            fits = allowed[1] <= value <= allowed[2] and value % allowed[0] == 0
        if fits:
            return []
    return [f"{name} {value} is accepted by none of {list(alternatives)}"]


def _of_pool(spec: PoolSpec, can: Capabilities) -> Iterator[str]:
    yield from _one_of("dtype", spec.dtype, can.dtypes)
    yield from _one_of("placement", spec.placement, sorted(can.placements))
    wanted = spec.features.union(*(needs(layer) for group in spec.groups for layer in group.layers))
    for feature in sorted(wanted):
        yield from _one_of("feature", feature, sorted(can.features))


def _of_group(group: GroupSpec, can: Capabilities) -> Iterator[str]:
    yield from _one_of("KV dtype", group.kv_dtype, can.kv_dtypes)
    yield from _within("block size", group.block_size, can.block_sizes)
    owners = {layer.index: layer for layer in group.layers if layer.kv_of is None}
    for layer in group.layers:
        yield from (f"layer {layer.index}: {reason}" for reason in _of_layer(layer, owners, can))


def _of_layer(layer: LayerSpec, owners: Mapping[int, LayerSpec], can: Capabilities) -> Iterator[str]:
    yield from _one_of("kind", layer.kind, sorted(can.kinds))
    yield from _within("k_dim", layer.k_dim, can.head_dims)
    yield from _within("v_dim", layer.v_dim, can.head_dims)
    if layer.kv_heads < 1 or layer.q_heads < layer.kv_heads:
        yield f"{layer.q_heads} query heads cannot share {layer.kv_heads} KV heads"
    if layer.window is not None and layer.window < 1:
        yield f"window {layer.window} is not positive"
    if layer.softcap is not None and not layer.softcap > 0:
        yield f"softcap {layer.softcap} is not positive"
    if layer.kv_of is not None and layer.kv_of not in owners:
        yield f"kv_of {layer.kv_of} is no layer of this group with a cache of its own"
    elif layer.kv_of is not None and _heads(owners[layer.kv_of]) != _heads(layer):
        yield f"kv_of {layer.kv_of} has other KV heads or dims"


def _heads(layer: LayerSpec) -> tuple[int, int, int]:
    return layer.kv_heads, layer.k_dim, layer.v_dim


def check_pool_spec(spec: PoolSpec) -> None:
    """`ContractViolation` for a pool without a null block or with negative limits."""
    limits = spec.limits
    if spec.num_blocks < 1 or min(limits.rows, limits.tokens, limits.context, limits.plans) < 0:
        raise ContractViolation("a pool has at least block 0, and limits are not negative", law="pool spec")


# -- batches -----------------------------------------------------------------------------------------------------------


def check_limits(batch: Batch, rows: int, tokens: int, context: int) -> None:
    """`ContractViolation` where a batch is larger than what was announced."""
    longest = int(batch.ctx_len[: batch.num_seqs].max(initial=0))
    given = {"rows": (batch.num_seqs, rows), "tokens": (batch.num_tokens, tokens), "context": (longest, context)}
    for name, (value, limit) in given.items():
        if value > limit:
            raise ContractViolation(f"the batch has {name} {value}, the limit is {limit}", law="limits")


def check_batch(batch: Batch, pool: LoopbackPool, block_size: int) -> None:
    """`ContractViolation` for arrays that do not describe one batch of this pool."""
    count = batch.num_seqs
    starts, contexts, rows = batch.cu_q[: count + 1], batch.ctx_len[:count], batch.rows[:count]
    counts = np.diff(starts)
    if len(starts) != count + 1 or starts[0] != 0 or starts[-1] != batch.num_tokens or (counts < 0).any():
        raise ContractViolation("cu_q must rise from 0 to num_tokens over num_seqs + 1 entries", law="batch")
    if min(len(contexts), len(rows)) < count or (contexts < 0).any():
        raise ContractViolation("ctx_len and rows have one entry of at least 0 for each sequence", law="batch")
    if counts.max(initial=0) > batch.max_q or contexts.max(initial=0) > batch.max_ctx:
        raise ContractViolation(f"max_q={batch.max_q} and max_ctx={batch.max_ctx} are upper bounds", law="batch")
    if not 0 <= rows.min(initial=0) <= rows.max(initial=0) < len(batch.block_table):
        raise ContractViolation(f"rows names a row outside 0..{len(batch.block_table) - 1}", law="batch")
    _check_table(batch, -(-int(contexts.max(initial=0)) // block_size), pool.num_blocks)
    if batch.slots is not None:
        _check_slots(batch.slots, block_size, pool.num_blocks * block_size)


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
    if len(np.unique(used)) != len(used):
        raise ContractViolation("a slot stands twice in slots", law="slots")


# -- attend ------------------------------------------------------------------------------------------------------------


def check_attend(layer: Layer, dtype: str, tokens: int, rows: int, q: Any, k: Any, v: Any, out: Any) -> None:
    """Everything about `attend`'s tensors, before anything is written. `rows` counts those of k and v."""
    spec, kind = layer.spec, TORCH[dtype]
    if (k is None) != (v is None) or (q is None) != (out is None):
        raise ContractViolation("k and v come together, and so do q and out", law="attend forms")
    if k is not None:
        if spec.kv_of is not None:
            raise ContractViolation(f"layer {spec.index} reads layer {spec.kv_of}'s cache: k = v = None", law="kv_of")
        _check_tensor("k", k, (rows, spec.kv_heads, spec.k_dim), kind)
        _check_tensor("v", v, (rows, spec.kv_heads, spec.v_dim), kind)
    if q is not None:
        _check_tensor("q", q, (tokens, spec.q_heads, spec.k_dim), kind)
        _check_tensor("out", out, (tokens, spec.q_heads, spec.v_dim), kind)
        if not out.is_contiguous():
            raise ContractViolation("out must be contiguous", law="attend tensors")
        if layer.unbound():
            raise ContractViolation(f"bind {layer.unbound()} of layer {spec.index} before attend", law="bind")


def check_lse(lse: Any, tokens: int, heads: int, q: Any) -> None:
    """The tensor that takes the log of each denominator."""
    if q is None:
        raise ContractViolation("lse comes with q and out", law="attend forms")
    _check_tensor("lse", lse, (tokens, heads), torch.float32)


def _check_tensor(name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = tuple(tensor.shape)
    fits = len(given) == len(shape) and given[:1] >= shape[:1] and given[1:] == shape[1:] and tensor.dtype == dtype
    if not fits:
        wanted = ", ".join(map(str, shape[1:]))
        raise ContractViolation(
            f"{name} must be {dtype} [>= {shape[0]}, {wanted}], got {tensor.dtype} {list(given)}", law="attend tensors"
        )
    if not tensor[:1].is_contiguous():
        raise ContractViolation(f"each token's [heads, dim] of {name} must be contiguous", law="attend tensors")


# -- the rest ----------------------------------------------------------------------------------------------------------


def check_pairs(pairs: Any, src: LoopbackPool, dst: LoopbackPool) -> None:
    """`ContractViolation` with what is wrong about pairs [N, 2] of blocks to copy."""
    sources, targets = pairs[:, 0], pairs[:, 1]
    problem = None
    if sources.size and not 0 <= sources.min() <= sources.max() < src.num_blocks:
        problem = f"a source outside 0..{src.num_blocks - 1}"
    elif targets.size and not 1 <= targets.min() <= targets.max() < dst.num_blocks:
        problem = f"a destination outside 1..{dst.num_blocks - 1} (block 0 is never written)"
    elif len(np.unique(targets)) != len(targets):
        problem = "a destination twice"
    elif src is dst and np.intersect1d(sources, targets).size:
        problem = "an id on both sides within one pool"
    if problem is not None:
        raise ContractViolation(f"copy_blocks got {problem}", law="copy_blocks")


def reasons_against_params(layer: Layer, params: Mapping[str, Any]) -> list[str]:
    """What is wrong with values to bind."""
    found = []
    for name, values in params.items():
        shapes = _param_shapes(layer, name)
        if not shapes:
            found.append(f"layer {layer.spec.index} takes no {name!r}")
        elif np.shape(values) not in shapes:
            found.append(f"{name!r} must have shape {' or '.join(map(str, shapes))}, got {np.shape(values)}")
        elif name in SCALES and not (np.isfinite(values).all() and (np.asarray(values) > 0).all()):
            found.append(f"{name!r} must be finite and above 0")
    return found


def _param_shapes(layer: Layer, name: str) -> list[tuple[int, ...]]:
    """The shapes of such a value; none where the layer takes none."""
    spec = layer.spec
    if name in ("sinks", "alibi"):
        return [(spec.q_heads,)] if getattr(spec, name) else []
    bound = name in SCALES and layer.kv_dtype in SCALED_BY_TENSOR and spec.kv_of is None
    return [(), (spec.kv_heads,)] if bound else []
