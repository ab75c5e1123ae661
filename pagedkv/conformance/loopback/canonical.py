"""Extension "canonical_kv": the tokens of blocks as bytes in the contract's order, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.api import ContractViolation, Event, Pool
from pagedkv.api.extensions import canonical_fingerprint
from pagedkv.api.records import Int32
from pagedkv.conformance.loopback.pool import Array, LoopbackPool

if TYPE_CHECKING:
    from pagedkv.conformance.loopback.backend import LoopbackBackend

FINGERPRINT_BYTES = 32


class LoopbackCanonicalKV:
    """The extension's object. Work runs on the copy queue, as late as copies do."""

    def __init__(self, backend: LoopbackBackend) -> None:
        self._backend = backend

    def export(self, pool: Pool, group: int, ids: Int32, lengths: Int32) -> tuple[Event, Any]:
        self._backend._begin()
        mine, where = self._where(pool, group, ids, lengths, first=0)
        size = FINGERPRINT_BYTES + sum(part.nbytes for part in _parts(mine, group, where))
        return self._backend._delayed((size,), np.dtype(np.uint8), lambda: self._bytes(mine, group, where))

    def import_(self, pool: Pool, group: int, ids: Int32, lengths: Int32, data: Any) -> Event:
        self._backend._begin()
        mine, where = self._where(pool, group, ids, lengths, first=1)
        given = _read(data)
        self._check(given, mine, group, where)
        return self._backend._queues.copy(lambda: self._write(mine, group, where, given[FINGERPRINT_BYTES:]))

    def _bytes(self, pool: LoopbackPool, group: int, where: _Where) -> Array:
        """Fingerprint, then each part, little endian."""
        parts = [_little(part).reshape(-1).view(np.uint8) for part in _parts(pool, group, where)]
        fingerprint = np.frombuffer(canonical_fingerprint(pool.spec.groups[group]), np.uint8)
        return np.concatenate([fingerprint, *parts])

    def _write(self, pool: LoopbackPool, group: int, where: _Where, data: Array) -> None:
        start = 0
        for cache in _caches(pool, group):
            if cache.ndim == 1:  # bound scales, found equal before
                start += cache.nbytes
                continue
            shape = (cache.shape[2], len(where[0]), cache.shape[3])
            size = cache.dtype.itemsize * int(np.prod(shape))
            part = data[start : start + size].view(cache.dtype.newbyteorder("<")).reshape(shape)
            cache[where] = part.transpose(1, 0, 2)
            start += size

    def _check(self, given: Array, pool: LoopbackPool, group: int, where: _Where) -> None:
        size = FINGERPRINT_BYTES + sum(part.nbytes for part in _parts(pool, group, where))
        if len(given) != size:
            raise ContractViolation(f"these tokens take {size} bytes, got {len(given)}", law="canonical_kv")
        if given[:FINGERPRINT_BYTES].tobytes() != canonical_fingerprint(pool.spec.groups[group]):
            raise ContractViolation("the bytes come from other layers or another KV dtype", law="canonical_kv")
        self._check_scales(given[FINGERPRINT_BYTES:], pool, group, where)

    def _check_scales(self, given: Array, pool: LoopbackPool, group: int, where: _Where) -> None:
        """Codes under other bound scales are other numbers."""
        start, bound = 0, _bound_scales(pool, group)
        for part in _parts(pool, group, where):
            mine = part.ndim == 1 and _little(next(bound)).tobytes()
            if mine and given[start : start + part.nbytes].tobytes() != mine:
                raise ContractViolation("the bytes come from layers with other scales bound", law="canonical_kv")
            start += part.nbytes

    def _where(self, pool: Pool, group: int, ids: Int32, lengths: Int32, *, first: int) -> tuple[LoopbackPool, _Where]:
        """The pool, and (block, offset) of each token; ids from `first` on, distinct where they are written."""
        mine = self._backend._mine(pool)
        if not 0 <= group < len(mine.spec.groups):
            raise ContractViolation(f"the pool has groups 0..{len(mine.spec.groups) - 1}, not {group}", law="group")
        blocks, counts = np.array(ids, np.int64), np.array(lengths, np.int64)
        size = mine.spec.groups[group].block_size
        if blocks.shape != counts.shape or counts.min(initial=0) < 0 or counts.max(initial=0) > size:
            raise ContractViolation(f"lengths has a number of 0..{size} for each id", law="canonical_kv")
        if not first <= blocks.min(initial=first) <= blocks.max(initial=first) < max(first + 1, mine.num_blocks):
            raise ContractViolation(f"ids must be {first}..{mine.num_blocks - 1}", law="canonical_kv")
        if first and len(np.unique(blocks)) != len(blocks):
            raise ContractViolation("an id to write stands twice", law="canonical_kv")
        offsets = [np.arange(count) for count in counts]
        return mine, (np.repeat(blocks, counts), np.concatenate([np.zeros(0, np.int64), *offsets]))


_Where = tuple[Array, Array]
"""(block, offset) of each token."""


def _caches(pool: LoopbackPool, group: int) -> Iterator[Array]:
    """Keys, values and scales of each layer that owns bytes, by ascending index.

    What lies in the blocks is [num_blocks, block_size, kv_heads, dim], with dim 1 for scales; bound scales are
    [kv_heads].
    """
    for index in sorted(layer.index for layer in pool.spec.groups[group].layers if layer.kv_of is None):
        layer = pool._layer(index)
        yield from (layer.keys, layer.values)
        for scale in (layer.k_scale, layer.v_scale):
            if scale is not None:
                yield scale if scale.ndim == 1 else scale[..., None]


def _bound_scales(pool: LoopbackPool, group: int) -> Iterator[Array]:
    """Those of keys and values of each layer that owns bytes, as bound last, by ascending index: [kv_heads]."""
    for index in sorted(layer.index for layer in pool.spec.groups[group].layers if layer.kv_of is None):
        layer = pool._layer(index)
        for name in ("k_scale", "v_scale"):
            yield np.broadcast_to(layer.bound.get(name, np.float32(1)), layer.spec.kv_heads)


def _parts(pool: LoopbackPool, group: int, where: _Where) -> Iterator[Array]:
    """Each cache's tokens as [kv_heads, tokens, dim], and bound scales."""
    return (cache if cache.ndim == 1 else cache[where].transpose(1, 0, 2) for cache in _caches(pool, group))


def _read(data: Any) -> Array:
    """A copy of any buffer's bytes."""
    try:
        return np.array(np.frombuffer(data, np.uint8))
    except (TypeError, ValueError, BufferError) as error:
        raise ContractViolation(
            f"data must be what export gave, contiguous bytes: {error}", law="canonical_kv"
        ) from None


def _little(part: Array) -> Array:
    return np.ascontiguousarray(part, part.dtype.newbyteorder("<"))
