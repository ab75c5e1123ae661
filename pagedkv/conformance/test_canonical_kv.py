"""Blocks as bytes: built here independently from what was written, and read back anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import ContractViolation, LayerSpec
from pagedkv.api.extensions import canonical_fingerprint
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.lattice import PLAIN
from pagedkv.conformance.refusals import refuses
from pagedkv.conformance.rig import TORCH, Rig, Seq
from pagedkv.core.negotiation import accepts

pytestmark = [pytest.mark.level("canonical_kv"), pytest.mark.extension("canonical_kv")]

_INTEGERS = {4: (torch.int32, "<i4"), 2: (torch.int16, "<i2")}
"""Bytes of a number -> the integer that holds its bits, and the same in little-endian order."""


def _layers(kit: Kit) -> list[LayerSpec]:
    """Out of order, of different sizes, and one without bytes of its own where that is declared."""
    layers = [kit.layer(4), kit.layer(1, kv_heads=1)]
    return [*layers, kit.layer(2, kv_heads=1, kv_of=1)] if kit.has("kv_sharing") else layers


def _lengths(rig: Rig, tokens: int) -> list[int]:
    """How many tokens each block of a sequence holds."""
    size = rig.block_size
    return [min(size, tokens - start) for start in range(0, tokens, size)]


def _arrays(ids: Sequence[int], lengths: Sequence[int]) -> tuple[Any, Any]:
    return np.array(ids, np.int32), np.array(lengths, np.int32)


def _extension(rig: Rig) -> Any:
    return rig.backend.extension("canonical_kv")


def _export(rig: Rig, ids: Sequence[int], lengths: Sequence[int]) -> bytes:
    event, data = _extension(rig).export(rig.pool, rig.group_index, *_arrays(ids, lengths))
    event.join()
    assert data.dtype == np.uint8 and data.ndim == 1, f"export gives {data.dtype} {data.shape}, must be uint8 [n]"
    return bytes(data.tobytes())


def _import(rig: Rig, ids: Sequence[int], lengths: Sequence[int], data: bytes) -> None:
    """Import and let later compute wait; the array is overwritten at once, as `data` is read before the return."""
    given = np.frombuffer(data, np.uint8).copy()
    event = _extension(rig).import_(rig.pool, rig.group_index, *_arrays(ids, lengths), given)
    given[:] = 0xAA
    rig.backend.wait(event)


def _expected(rig: Rig, seq: Seq, tokens: int) -> bytes:
    """Fingerprint, then keys and values of each layer by ascending index, in the order (head, token, dim)."""
    parts = [canonical_fingerprint(rig.group)]
    for layer in sorted(rig.group.layers, key=lambda layer: layer.index):
        if layer.kv_of is None:
            parts += [_bytes(values[:tokens], rig.group.kv_dtype) for values in seq.qkv(layer)[1:]]
    return b"".join(parts)


def _bytes(values: torch.Tensor, kv_dtype: str) -> bytes:
    stored = values.to(TORCH[kv_dtype]).permute(1, 0, 2).contiguous()
    integer, order = _INTEGERS[stored.element_size()]
    return bytes(stored.view(integer).numpy().astype(order).tobytes())


def _difference(got: bytes, wanted: bytes) -> str:
    if len(got) != len(wanted):
        return f"{len(got)} bytes, expected {len(wanted)}: is padding exported, or a layer without bytes of its own?"
    first = next(i for i in range(len(got)) if got[i] != wanted[i])
    if first < 32:
        return "the first 32 bytes are not canonical_fingerprint(group)"
    return f"byte {first} of {len(got)} differs: the order is layer, keys then values, head, token, dim"


def _stores(kv_dtype: str) -> pytest.MarkDecorator:
    """The mark of a case that applies where this KV dtype is declared."""
    return pytest.mark.applies.with_args(lambda can: kv_dtype in can.kv_dtypes)


@pytest.mark.law("canonical_kv: the exported bytes are those of the contract, partial last block included")
@pytest.mark.parametrize("kv_dtype", [pytest.param(name, marks=_stores(name)) for name in PLAIN])
def test_exported_bytes(kit: Kit, kv_dtype: str) -> None:
    rig = kit.rig(*_layers(kit), kv_dtype=kv_dtype)
    tokens = 2 * rig.block_size + 3
    seq = rig.sequence(tokens)
    rig.write(seq, 0, tokens)
    got, wanted = _export(rig, seq.blocks, _lengths(rig, tokens)), _expected(rig, seq, tokens)
    assert got == wanted, _difference(got, wanted)


@pytest.mark.law("canonical_kv: the ids' order is the tokens' order, and any length per block is possible")
def test_chosen_blocks(kit: Kit) -> None:
    rig = kit.rig(*_layers(kit))
    seq = rig.sequence(3 * rig.block_size)
    rig.write(seq, 0, seq.length)
    size, swapped = rig.block_size, [seq.blocks[2], seq.blocks[0]]
    picked = [*range(2 * size, 2 * size + 1), *range(size)]
    other = Seq(rig, len(picked), swapped)
    for layer in rig.group.layers:
        q, k, v = seq.qkv(layer)
        other.give(layer, q[picked], k[picked], v[picked])
    got, wanted = _export(rig, swapped, [1, size]), _expected(rig, other, len(picked))
    assert got == wanted, _difference(got, wanted)


@pytest.mark.law("canonical_kv: an export starts after the compute enqueued before it")
def test_export_sees_what_was_enqueued(kit: Kit) -> None:
    rig = kit.rig(*_layers(kit))
    seq = rig.sequence(rig.block_size)
    for _ in range(3):
        rig.fill(seq.blocks, 2.0)
    rig.write(seq, 0, seq.length)
    got = _export(rig, seq.blocks, [seq.length])
    assert got == _expected(rig, seq, seq.length), "the export holds older bytes: it did not wait for the append"


@pytest.mark.law("canonical_kv: what was exported is read the same after an import elsewhere")
@pytest.mark.parametrize("where", ["same pool", "other block size"])
def test_import_elsewhere(kit: Kit, where: str) -> None:
    source = kit.rig(*_layers(kit))
    target = source if where == "same pool" else kit.rig(*_layers(kit), block_size=_other_size(kit))
    seq = source.sequence(2 * source.block_size + 3)
    source.write(seq, 0, seq.length)
    data = _export(source, seq.blocks, _lengths(source, seq.length))
    moved = seq.moved(target.sequence(seq.length).blocks)
    _import(target, moved.blocks, _lengths(target, seq.length), data)
    for layer in target.group.layers:
        row = (moved, seq.length, 2)
        kit.check(target, target.step(row, layer=layer.index, write=False), source.expected(row, layer=layer.index))


@pytest.mark.law("canonical_kv: the data may be overwritten once import_ returns")
def test_data_overwritten(kit: Kit) -> None:
    rig = kit.rig(*_layers(kit))
    old, new = (rig.sequence(rig.block_size) for _ in range(2))
    for seq in (old, new):
        rig.write(seq, 0, seq.length)
    data = np.frombuffer(_export(rig, new.blocks, [new.length]), np.uint8).copy()
    event = _extension(rig).import_(rig.pool, rig.group_index, *_arrays(old.blocks, [old.length]), data)
    data[:] = 0xAA
    rig.backend.wait(event)
    got, wanted = _export(rig, old.blocks, [old.length]), _expected(rig, new, new.length)
    assert got == wanted, f"the import read its data after it had returned: {_difference(got, wanted)}"


def _other_size(kit: Kit) -> int:
    """Another accepted block size, the same one if there is no other."""
    return next((n for n in range(1, 257) if n != kit.block_size and accepts(kit.can.block_sizes, n)), kit.block_size)


@pytest.mark.law("canonical_kv: an import changes the slots it names and no other")
def test_import_leaves_others(kit: Kit) -> None:
    rig = kit.rig(*_layers(kit))
    size = rig.block_size
    old, neighbour, new = (rig.sequence(size) for _ in range(3))
    for seq in (old, neighbour, new):
        rig.write(seq, 0, size)
    tokens = max(1, size - 1)
    _import(rig, old.blocks, [tokens], _export(rig, new.blocks, [tokens]))
    mixed = Seq(rig, size, old.blocks)
    for layer in rig.group.layers:
        parts = [torch.cat([n[:tokens], o[tokens:]]) for n, o in zip(new.qkv(layer), old.qkv(layer), strict=True)]
        mixed.give(layer, *parts)
    got, wanted = _export(rig, old.blocks, [size]), _expected(rig, mixed, size)
    assert got == wanted, f"slots of the block past the imported tokens changed: {_difference(got, wanted)}"
    assert _export(rig, neighbour.blocks, [size]) == _expected(rig, neighbour, size), "another block changed"


def _damaged(data: bytes) -> dict[str, bytes]:
    return {
        "another fingerprint": bytes([data[0] ^ 1]) + data[1:],
        "a byte too few": data[:-1],
        "a byte too many": data + b"\0",
        "nothing": b"",
    }


@pytest.mark.law("canonical_kv: bytes with another fingerprint or size are a ContractViolation, and nothing is written")
@pytest.mark.parametrize("what", list(_damaged(bytes(40))))
def test_foreign_bytes(kit: Kit, what: str) -> None:
    rig = kit.rig(*_layers(kit))
    size = rig.block_size
    old, new = rig.sequence(size), rig.sequence(size)
    for seq in (old, new):
        rig.write(seq, 0, size)
    data = _damaged(_export(rig, new.blocks, [size]))[what]
    with refuses(ContractViolation, f"an import of {what}"):
        _import(rig, old.blocks, [size], data)
    rig.backend.synchronize()
    assert _export(rig, old.blocks, [size]) == _expected(rig, old, size), "the refused import wrote all the same"


@pytest.mark.law("canonical_kv: ids and lengths that cannot be are a ContractViolation")
@pytest.mark.parametrize("what", ["import into the null block", "an id out of range", "a length beyond the block"])
def test_wrong_ids(kit: Kit, what: str) -> None:
    rig = kit.rig(*_layers(kit))
    seq = rig.sequence(rig.block_size)
    rig.write(seq, 0, seq.length)
    data, size = _export(rig, seq.blocks, [seq.length]), seq.length
    with refuses(ContractViolation, what):
        if what == "import into the null block":
            _import(rig, [0], [size], data)
        elif what == "an id out of range":
            _export(rig, [rig.spec.num_blocks], [size])
        else:
            _export(rig, seq.blocks, [size + 1])
