"""What the vendor's documents refuse of npu_fused_infer_attention_score and its _v2, raised as the device would.

Written from the pages of both operators in the documents of Ascend/op-plugin and the docstrings in the wheel of
torch-npu 2.13.0 (Atlas A2 and A3), and from nothing else: no line of this knows who calls. What is documented but not
emulated (rope inputs, quantized inputs, shared prefixes, padding on the left, layouts that change) is refused too.

One sentence is not enforced: that a cache has no fewer blocks than all sequences together use. Read by the letter it
rules out that sequences share blocks; the vendor's own checker (paged_attention_checker.cpp of hicann/ops-transformer
at 05b365c) does not look at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

INT_MAX = 2147483647
LAYOUTS = {"BSH": 3, "BSND": 4, "BNSD": 4, "TND": 3}
"""Dimensions of the query in each layout that is emulated."""
OTHER_LAYOUTS = ("BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD", "NTD_TND")
MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)
SIDE = 2048
"""Rows and columns of the mask of sparse modes 2, 3 and 4."""


def refuse(rule: str) -> None:
    """What torch-npu raises when the device's library refuses a call."""
    raise RuntimeError(f"emulated operator: NPU function error: call failed, error code is 161002: {rule}")


def need(true: bool, rule: str) -> None:
    """Refuse the call unless the rule holds."""
    if not true:
        refuse(rule)


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call in the words of neither version. Lengths as they were given."""

    version: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    heads: int
    kv_heads: int
    scale: float
    layout: str
    q_lengths: Sequence[int] | None
    kv_lengths: Sequence[int] | None
    table: torch.Tensor | None
    block_size: int
    mask: torch.Tensor | None
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    inner_precise: int
    lse: bool

    @property
    def paged(self) -> bool:
        return self.table is not None

    @property
    def batch(self) -> int:
        return len(self.q_lengths or ()) if self.layout == "TND" else self.query.shape[0]

    @property
    def queries(self) -> int:
        """Q_S; for TND, where each sequence has its own, the most of one."""
        if self.layout == "TND":
            return max(differences(self.q_lengths or ()), default=0)
        return self.query.shape[2 if self.layout == "BNSD" else 1]

    @property
    def dim(self) -> int:
        return self.query.shape[2] // self.heads if self.layout == "BSH" else self.query.shape[-1]

    @property
    def keys(self) -> int:
        """KV_S: what a sequence's keys have room for."""
        if self.table is not None:
            return self.table.shape[1] * self.block_size
        return self.key.shape[{"BSH": 1, "BSND": 1, "BNSD": 2, "TND": 0}[self.layout]]


def differences(cumulative: Sequence[int]) -> list[int]:
    """Lengths behind their running sum."""
    return [int(now) - int(before) for before, now in zip((0, *cumulative), cumulative, strict=False)]


def per_sequence(lengths: Sequence[int] | None, batch: int, default: int) -> list[int]:
    """A length for each sequence: one for all, the first ones of as many or more, or the default."""
    if lengths is None:
        return [default] * batch
    need(len(lengths) in (1, batch) or len(lengths) >= batch, f"{len(lengths)} lengths for a batch of {batch}")
    given = [int(length) for length in lengths]
    return given * batch if len(given) == 1 else given[:batch]


def check(call: Call) -> None:
    """Raise for everything that the documents refuse."""
    _layout(call)
    _types(call)
    _heads(call)
    if call.layout == "TND":
        _tnd(call)
        return
    need(call.batch <= 65536, f"a batch of {call.batch}, at most 65536")
    if call.paged:
        _paged(call)
    else:
        _dense(call)
    _lengths(call)
    _precision(call)
    _masked(call)


def _layout(call: Call) -> None:
    need(call.layout not in OTHER_LAYOUTS, f"input_layout {call.layout} is documented, but not emulated")
    need(call.layout in LAYOUTS, f"unknown input_layout {call.layout}")
    need(call.query.dim() == LAYOUTS[call.layout], f"a query of {call.query.dim()} dimensions in {call.layout}")


def _types(call: Call) -> None:
    tensors = {"query": call.query, "key": call.key, "value": call.value, "atten_mask": call.mask}
    for name, tensor in tensors.items():
        need(tensor is None or tensor.is_contiguous(), f"{name} is not contiguous")
    need(call.query.dtype in (torch.float16, torch.bfloat16), f"query of {call.query.dtype}: float16 or bfloat16")
    need(call.key.dtype != torch.int8, "int8 keys need their scales")
    for name, tensor in (("key", call.key), ("value", call.value)):
        need(tensor.dtype == call.query.dtype, f"{name} of {tensor.dtype}, query of {call.query.dtype}")
        need(tensor.numel() <= INT_MAX, f"{name} has {tensor.numel()} elements, which do not fit int32")
    if call.layout != "TND":
        need(call.key.shape == call.value.shape, f"key {tuple(call.key.shape)} unlike value {tuple(call.value.shape)}")


def _heads(call: Call) -> None:
    need(1 <= call.heads <= 256 and 1 <= call.kv_heads <= 256, f"{call.heads} heads on {call.kv_heads}: 1 to 256")
    need(call.heads % call.kv_heads == 0, f"{call.heads} heads cannot share {call.kv_heads} evenly")
    need(call.heads // call.kv_heads <= 64, f"{call.heads} heads on {call.kv_heads}: at most 64 to one")
    if call.layout == "BSH":
        need(call.query.shape[2] % call.heads == 0, f"H {call.query.shape[2]} is no multiple of {call.heads} heads")
    else:
        at = 2 if call.layout == "BSND" else 1
        need(call.query.shape[at] == call.heads, f"num_heads is {call.heads}, the query has {call.query.shape[at]}")
    need(call.dim % 16 == 0 and 16 <= call.dim <= 512, f"head dim {call.dim}: multiples of 16 up to 512")


# -- keys and values ---------------------------------------------------------------------------------------------------


def _dense(call: Call) -> None:
    """Keys and values in the layout of the query."""
    need(call.block_size == 0, "a block_size without a block_table")
    shapes = {
        "BSH": (call.batch, call.keys, call.kv_heads * call.dim),
        "BSND": (call.batch, call.keys, call.kv_heads, call.dim),
        "BNSD": (call.batch, call.kv_heads, call.keys, call.dim),
    }
    need(tuple(call.key.shape) == shapes[call.layout], f"key {tuple(call.key.shape)}, not {shapes[call.layout]}")


def _paged(call: Call) -> None:
    """Keys and values in blocks, through the table."""
    table, size = call.table, call.block_size
    if table is None:
        return
    if call.queries == 1:
        need(size % 16 == 0 and 16 <= size <= 512, f"block_size {size}: multiples of 16 up to 512 for one query token")
    else:
        need(size % 128 == 0 and 128 <= size <= 512, f"block_size {size}: 128 to 512 in steps of 128 where Q_S > 1")
    need(call.kv_lengths is not None, "the lengths of keys must be given with a block_table")
    need(table.dtype == torch.int32 and table.is_contiguous(), f"a block_table of {table.dtype}: contiguous int32")
    need(table.dim() == 2 and table.shape[0] == call.batch, f"block_table {tuple(table.shape)}: ({call.batch}, blocks)")
    most = max(per_sequence(call.kv_lengths, call.batch, 0), default=0)
    need(table.shape[1] * size >= most, f"{table.shape[1]} columns of {size} tokens for {most} keys")
    _cache(call)


def _cache(call: Call) -> None:
    """(blocks, size, H), and for BNSD also (blocks, heads, size, D)."""
    shape, size, wide = tuple(call.key.shape), call.block_size, call.kv_heads * call.dim
    if len(shape) == 4 and call.layout == "BNSD":
        need(shape[1:] == (call.kv_heads, size, call.dim), f"cache {shape}: (blocks, {call.kv_heads}, {size}, D)")
        return
    need(len(shape) == 3, f"a cache of {len(shape)} dimensions: {call.layout} takes (blocks, block_size, H)")
    need(shape[1:] == (size, wide), f"cache {shape}: (blocks, {size}, {wide})")
    need(wide <= 65535, f"KV heads x head dim of a cache (blocks, block_size, H) are {wide}, at most 65535")


def _lengths(call: Call) -> None:
    kv = per_sequence(call.kv_lengths, call.batch, call.keys)
    need(min(kv, default=0) >= 0, "a negative length of keys")
    need(max(kv, default=0) <= call.keys, f"{max(kv, default=0)} keys of a sequence, with room for {call.keys}")
    if call.queries == 1:
        need(max(kv, default=0) <= 262144, f"{max(kv, default=0)} keys, at most 262144 where Q_S is 1")
        return
    q = per_sequence(call.q_lengths, call.batch, call.queries)
    need(min(q, default=0) >= 0, "a negative length of queries")
    need(max(q, default=0) <= call.queries, f"{max(q, default=0)} queries of a sequence, Q_S is {call.queries}")
    most = max(call.queries, max(kv, default=0) if call.paged else call.keys)
    need(most <= 20971520, f"S {most}, at most 20971520")


def _precision(call: Call) -> None:
    allowed = (0, 1) if call.queries == 1 else (0, 1, 2, 3)
    need(call.inner_precise in allowed, f"inner_precise {call.inner_precise}: one of {allowed}")


# -- masks -------------------------------------------------------------------------------------------------------------


def _masked(call: Call) -> None:
    mask = call.mask
    if mask is not None:
        need(mask.dtype in MASK_DTYPES, f"atten_mask of {mask.dtype}: bool, int8 or uint8")
    if call.queries == 1:
        if mask is not None:
            _one_query_mask(call, tuple(mask.shape))
        return
    need(0 <= call.sparse_mode <= 4, f"sparse_mode {call.sparse_mode}: 0 to 4, others are not implemented")
    if call.sparse_mode == 1:
        need(mask is not None, "sparse_mode 1 needs the whole atten_mask")
    if call.sparse_mode >= 2:
        _triangle(call)
    elif mask is not None:
        _whole_mask(call, tuple(mask.shape))


def _wide_enough(call: Call, columns: int) -> bool:
    """Whether a mask's last axis is KV_S, or that rounded up to 16 or 32, or covers every block that is used."""
    if call.paged:
        most = max(per_sequence(call.kv_lengths, call.batch, 0), default=0)
        return columns >= -(-most // call.block_size) * call.block_size
    return columns in {call.keys, -(-call.keys // 16) * 16, -(-call.keys // 32) * 32}


def _one_query_mask(call: Call, shape: tuple[int, ...]) -> None:
    leading = {(call.batch,), (call.batch, 1), (call.batch, 1, 1)}
    fits = shape[:-1] in leading and _wide_enough(call, shape[-1])
    need(fits, f"atten_mask {shape} where Q_S is 1: (B, KV_S), (B, 1, KV_S), (B, 1, 1, KV_S), KV_S {call.keys}")


def _whole_mask(call: Call, shape: tuple[int, ...]) -> None:
    rows = {call.queries, -(-call.queries // 16) * 16, -(-call.queries // 32) * 32}
    leading = shape[:-2] in {(), (call.batch,), (1,), (call.batch, 1), (1, 1)}
    fits = len(shape) >= 2 and leading and shape[-2] in rows and _wide_enough(call, shape[-1])
    need(fits, f"atten_mask {shape} in sparse_mode {call.sparse_mode}: (Q_S, KV_S) = ({call.queries}, {call.keys})")


def _triangle(call: Call) -> None:
    """2048 x 2048, ones above the diagonal: looked at where a mistake would show, as it is large."""
    mask = call.mask
    if mask is None:
        return refuse(f"sparse_mode {call.sparse_mode} needs an atten_mask")
    fits = tuple(mask.shape) in {(SIDE, SIDE), (1, SIDE, SIDE), (1, 1, SIDE, SIDE)}
    need(fits, f"atten_mask {tuple(mask.shape)} in sparse_mode {call.sparse_mode}: {SIDE} x {SIDE}")
    if mask.device.type == "meta":
        return None
    ones = mask.view(SIDE, SIDE).bool()
    right = ones.diagonal(1).all() and ones[0, 1:].all() and ones[:-1, -1].all()
    left = ones.diagonal().any() or ones[-1].any() or ones[:, 0].any()
    return need(bool(right) and not bool(left), "the atten_mask is not 1 above its diagonal and 0 below")


# -- TND ---------------------------------------------------------------------------------------------------------------


def _tnd(call: Call) -> None:
    """Sequences behind each other, without rope: the documents allow little of it."""
    need(not call.paged, "TND takes no page attention where the head dim is not 512")
    need(call.query.dtype == torch.bfloat16, "TND takes bfloat16 only")
    need(call.key.dim() == 3 and call.value.dim() == 3, "TND keys and values are (T, N, D)")
    need(max(len(call.query), len(call.key)) <= 1 << 20, "TND takes at most 1M tokens")
    _tnd_dims(call)
    _tnd_lengths(call)
    need(call.sparse_mode in (0, 3), f"sparse_mode {call.sparse_mode}: TND takes 0 without a mask and 3 with one")
    if call.sparse_mode == 3:
        _triangle(call)
        strict = all(q < kv for q, kv in zip(*_tnd_pairs(call), strict=True))
        need(strict, "TND in sparse_mode 3 wants fewer queries than keys in every sequence")
    else:
        need(call.mask is None, "TND takes no mask in sparse_mode 0")


def _tnd_dims(call: Call) -> None:
    dims = (call.dim, call.key.shape[2], call.value.shape[2])
    allowed = {(192, 192, 128), (192, 192, 192)} | ({(128, 128, 128)} if call.version == 2 else set())
    need(dims in allowed, f"head dims {dims}: TND takes {sorted(allowed)}")
    for name, tensor in (("key", call.key), ("value", call.value)):
        need(tensor.shape[1] == call.kv_heads, f"{name} has {tensor.shape[1]} heads, not {call.kv_heads}")
    need(call.version == 2 or call.heads == call.kv_heads, "TND takes as many KV heads as heads")
    need(len(call.key) == len(call.value), "TND keys and values are of unlike T")


def _tnd_lengths(call: Call) -> None:
    """Both given, running sums, of as many sequences, up to T."""
    need(call.q_lengths is not None and call.kv_lengths is not None, "TND needs the lengths of queries and keys")
    q, kv = _tnd_pairs(call)
    need(min((*q, *kv), default=0) >= 0, "TND lengths are running sums, which never fall")
    need(0 < len(q) <= 4096 and len(q) == len(kv), f"TND: {len(q)} and {len(kv)} lengths, 1 to 4096 and as many")
    need(sum(q) == len(call.query) and sum(kv) == len(call.key), "TND: the last length must be T")


def _tnd_pairs(call: Call) -> tuple[list[int], list[int]]:
    return differences(call.q_lengths or ()), differences(call.kv_lengths or ())
