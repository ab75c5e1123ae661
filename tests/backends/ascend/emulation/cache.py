"""What writes to caches: npu_scatter_pa_kv_cache and _npu_reshape_and_cache. Emulation, as `operators` says."""

from __future__ import annotations

from typing import Any

import torch

from tests.backends.ascend.emulation.rules import need


def scatter(given: dict[str, Any]) -> None:
    """key, value (tokens, heads, dim) to slots of caches in ND or NZ order."""
    for name in ("compress_lens", "compress_seq_offsets", "seq_lens"):
        need(given[name] is None, f"{name} is documented, but not emulated")
    mode = given["cache_mode"]
    need(mode in ("Norm", "PA_NZ"), f"unknown cache_mode {mode}")
    slots = given["slot_mapping"]
    need(slots.dtype in (torch.int32, torch.int64), f"slot_mapping of {slots.dtype}: int32 or int64")
    _write(given, slots, nz=mode == "PA_NZ")


def reshape_and_cache(given: dict[str, Any]) -> None:
    """The same for caches in ND order, of the older library."""
    slots = given["slot_indices"]
    need(slots.dtype == torch.int32, f"slot_indices of {slots.dtype}: int32")
    _write(given, slots, nz=False)


def _write(given: dict[str, Any], slots: torch.Tensor, nz: bool) -> None:
    tensors = {name: given[name] for name in ("key", "value", "key_cache", "value_cache")}
    for name, tensor in (*tensors.items(), ("slots", slots)):
        need(tensor.is_contiguous(), f"{name} is not contiguous")
        need(name == "slots" or tensor.dtype == given["key"].dtype, f"{name} of {tensor.dtype}, unlike the key")
    key, value = tensors["key"], tensors["value"]
    need(key.dim() == 3 and value.dim() == 3, "keys and values of (tokens, heads, dim)")
    need(key.shape[:2] == value.shape[:2], f"key {tuple(key.shape)} unlike value {tuple(value.shape)}")
    need(slots.shape == key.shape[:1], f"{tuple(slots.shape)} slots for {len(key)} tokens")
    for new, cache in ((key, tensors["key_cache"]), (value, tensors["value_cache"])):
        need(cache.dim() == 4, f"a cache of {cache.dim()} dimensions: 4")
        flat = _nz(cache, new) if nz else _nd(cache, new)
        _check_slots(slots, cache.shape[0] * cache.shape[2 if nz else 1])
        flat(slots.long(), new)


def _check_slots(slots: torch.Tensor, room: int) -> None:
    if not len(slots):
        return
    need(int(slots.min()) >= 0, f"slot {int(slots.min())} is negative")
    need(int(slots.max()) < room, f"slot {int(slots.max())} of a cache with {room}")
    need(len(slots.unique()) == len(slots), "a slot is there twice")


def _nd(cache: torch.Tensor, new: torch.Tensor) -> Any:
    """Writes to (blocks, block size, heads, dim)."""
    need(cache.shape[2:] == new.shape[1:], f"cache {tuple(cache.shape)} in ND order for {tuple(new.shape)}")

    def write(slots: torch.Tensor, rows: torch.Tensor) -> None:
        cache.view(-1, *cache.shape[2:])[slots] = rows

    return write


def _nz(cache: torch.Tensor, new: torch.Tensor) -> Any:
    """Writes to (blocks, heads x dim / last, block size, last), last being 32 bytes."""
    columns, size, last = cache.shape[1:]
    need(last * cache.element_size() == 32, f"the last dimension of a cache in NZ order is 32 bytes, not {last}")
    need(columns * last == new[0].numel(), f"cache {tuple(cache.shape)} in NZ order for {tuple(new.shape)}")

    def write(slots: torch.Tensor, rows: torch.Tensor) -> None:
        cache[slots // size, :, slots % size] = rows.view(len(rows), columns, last)

    return write
