"""Extension "canonical_kv": blocks as bytes in the order of the contract, from and to the head-major planes.

    fingerprint | layer 0: keys [kv_heads, tokens, k_dim]  values [kv_heads, tokens, v_dim] | layer 1: ...

A layer's planes hold the same order already, so that a layer is one gather of slots and the cut of its padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api import ContractViolation, Event, Pool
from pagedkv.api.extensions import canonical_fingerprint
from pagedkv.api.torch import DTYPES
from pagedkv_cpu import attention
from pagedkv_cpu.pool import CpuPool, Layer

LAW = "canonical_kv"
HEADER = 32
"""Bytes of the fingerprint; a multiple of every item's, so that what follows can be viewed in place."""


class Canonical:
    """The extension's object. `mine` gives a pool of this instance, or raises."""

    def __init__(self, mine: Callable[[Pool], CpuPool]) -> None:
        self._mine = mine

    def export(self, pool: Pool, group: int, ids: Any, lengths: Any) -> tuple[Event, npt.NDArray[np.uint8]]:
        """The first lengths[i] tokens of each block ids[i], in order; block 0 gives zeros. Done when it returns."""
        mine = self._mine(pool)
        slots = _slots(mine, group, ids, lengths, first=0)
        data = torch.empty(HEADER + len(slots) * _token_bytes(mine, group), dtype=torch.uint8)
        data.numpy()[:HEADER] = _fingerprint(mine, group)
        for cache, part in _parts(mine, group, data, len(slots)):
            part.copy_(cache.index_select(1, slots)[:, :, : part.shape[2]])
        return Event(), data.numpy()

    def import_(self, pool: Pool, group: int, ids: Any, lengths: Any, data: Any) -> Event:
        """Write what `export` gave, of this or another backend, into distinct blocks. Done when it returns."""
        mine = self._mine(pool)
        slots = _slots(mine, group, ids, lengths, first=1)
        if len(np.unique(np.asarray(ids))) != len(ids):
            raise ContractViolation("import_ got a block twice: what it should hold is not defined", law=LAW)
        given = _checked(mine, group, data, HEADER + len(slots) * _token_bytes(mine, group))
        for cache, part in _parts(mine, group, given, len(slots)):
            attention.write(cache, slots, part.transpose(0, 1))
        return Event()


def _owners(pool: CpuPool, group: int) -> list[Layer]:
    """The layers that own bytes, by ascending index."""
    indices = sorted(layer.index for layer in pool.group(group).layers if layer.kv_of is None)
    return [pool.layer(index) for index in indices]


def _token_bytes(pool: CpuPool, group: int) -> int:
    """Bytes of one token in all layers."""
    item = DTYPES[pool.group(group).kv_dtype].itemsize
    return item * sum(layer.spec.kv_heads * (layer.spec.k_dim + layer.spec.v_dim) for layer in _owners(pool, group))


def _fingerprint(pool: CpuPool, group: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(canonical_fingerprint(pool.group(group)), np.uint8)


def _parts(pool: CpuPool, group: int, data: torch.Tensor, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(cache [kv_heads, slots, width], its part of `data` [kv_heads, tokens, dim]) of all keys and values, in order."""
    numbers = data[HEADER:].view(DTYPES[pool.group(group).kv_dtype])
    start = 0
    for layer in _owners(pool, group):
        for cache, dim in ((layer.keys, layer.spec.k_dim), (layer.values, layer.spec.v_dim)):
            end = start + layer.spec.kv_heads * tokens * dim
            yield cache, numbers[start:end].view(layer.spec.kv_heads, tokens, dim)
            start = end


def _slots(pool: CpuPool, group: int, ids: Any, lengths: Any, *, first: int) -> torch.Tensor:
    """int64 slots of the tokens, in order; `ContractViolation` for an id below `first` or a length past its block."""
    size, last = pool.group(group).block_size, pool.num_blocks - 1
    blocks, counts = np.asarray(ids, np.int64), np.asarray(lengths, np.int64)
    if blocks.ndim != 1 or blocks.shape != counts.shape:
        raise ContractViolation(f"ids and lengths are [n] each, got {blocks.shape} and {counts.shape}", law=LAW)
    if blocks.size and not first <= blocks.min() <= blocks.max() <= last:
        raise ContractViolation(f"ids must be {first}..{last}, got {blocks.min()}..{blocks.max()}", law=LAW)
    if counts.size and not 0 <= counts.min() <= counts.max() <= size:
        raise ContractViolation(f"lengths must be 0..{size}, got {counts.min()}..{counts.max()}", law=LAW)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return torch.from_numpy(np.repeat(blocks * size, counts) + offsets)


def _checked(pool: CpuPool, group: int, data: Any, size: int) -> torch.Tensor:
    """A copy of the bytes, which may lie anywhere and be read-only; `ContractViolation` unless they belong here."""
    try:
        given = np.frombuffer(data, np.uint8)
    except (ValueError, TypeError) as error:
        raise ContractViolation(f"import_ takes bytes or a contiguous uint8 array ({error})", law=LAW) from error
    if not np.array_equal(given[:HEADER], _fingerprint(pool, group)):
        raise ContractViolation(
            "these bytes were exported from other layers, KV heads or KV dtype than this group's: export them from a "
            "group like it",
            law=LAW,
        )
    if len(given) != size:
        raise ContractViolation(f"these ids and lengths take {size} bytes, got {len(given)}", law=LAW)
    return torch.from_numpy(given.copy())
