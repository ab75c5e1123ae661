"""Blocks as canonical bytes: against bytes made in numpy, and from pool to pool without a changed bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import ContractViolation, GroupSpec, LayerSpec
from pagedkv.api.extensions import CANONICAL_KV_VERSION, canonical_fingerprint
from tests.backends.cpu.rig import TORCH, Rig, backend, layer_spec, pool_spec

TOKENS = 21
LAYERS = (
    layer_spec(4, k_dim=24, v_dim=5),  # padded values, out of order
    layer_spec(1),
    layer_spec(2, kv_of=1),  # owns no bytes
    layer_spec(7, q_heads=3, kv_heads=1, k_dim=9, v_dim=8),
)


class Cache:
    """A pool with one sequence in it: `keys` and `values` [TOKENS, heads, dim] of each layer that owns any."""

    def __init__(self, *, block_size: int = 4, kv_dtype: str = "fp32", seed: int = 0, made: Any = None) -> None:
        spec = pool_spec(*LAYERS, block_size=block_size, kv_dtype=kv_dtype, num_blocks=40)
        self.rig = Rig(spec, seed=seed, made=made)
        self.rig.pool._storage.fill_(255)  # NaN in every dtype, as an earlier owner might leave
        self.rig.pool._clear_null_block()
        self.extension = self.rig.backend.extension("canonical_kv")
        self.ids, self.lengths = self.blocks()

    def blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """Fresh ids for TOKENS tokens, and how many lie in each."""
        size = self.rig.group.block_size
        starts = np.arange(0, TOKENS, size)
        ids = np.array([self.rig.free.pop() for _ in starts], np.int32)
        return ids, np.minimum(TOKENS - starts, size).astype(np.int32)

    def slots(self, ids: np.ndarray) -> np.ndarray:
        size = self.rig.group.block_size
        position = np.arange(TOKENS)
        return ids[position // size].astype(np.int64) * size + position % size

    def append(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Write random keys and values; {layer: (k, v)} as given."""
        rig, given = self.rig, {}
        plan = rig.append_plan(self.slots(self.ids))
        for layer in owners():
            k, v = (rig.random(TOKENS, layer.kv_heads, dim) for dim in (layer.k_dim, layer.v_dim))
            k[3, 0, 0], v[5, 0, 1] = float("inf"), -0.0
            rig.backend.attend(plan, layer.index, None, k, v, None)
            given[layer.index] = (k, v)
        return given

    def export(self) -> np.ndarray:
        event, data = self.extension.export(self.rig.pool, 0, self.ids, self.lengths)
        assert event.done() and data.dtype == np.uint8 and data.ndim == 1
        return data


def owners() -> list[LayerSpec]:
    return [layer for layer in LAYERS if layer.kv_of is None]


def canonical(group: GroupSpec, given: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> bytes:
    """The bytes that the contract asks for, from what was appended: torch rounds, numpy turns and writes."""
    parts = [canonical_fingerprint(group)]
    for index in sorted(given):
        for rows in given[index]:
            stored = rows.to(TORCH[group.kv_dtype])
            plain = stored.view(torch.int32 if stored.dtype == torch.float32 else torch.int16).numpy()
            parts.append(plain.transpose(1, 0, 2).astype(plain.dtype.newbyteorder("<")).tobytes())
    return b"".join(parts)


def test_it_is_declared() -> None:
    made = backend()
    assert made.capabilities().extensions == {"canonical_kv": CANONICAL_KV_VERSION}
    assert made.extension("graph") is None
    made.close()
    with pytest.raises(ContractViolation, match="closed"):
        made.extension("canonical_kv")


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_export_gives_the_bytes_of_the_contract(kv_dtype: str, block_size: int) -> None:
    cache = Cache(kv_dtype=kv_dtype, block_size=block_size)
    given = cache.append()
    assert cache.export().tobytes() == canonical(cache.rig.group, given)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("source_size", "target_size"), [(4, 4), (4, 16), (16, 3), (1, 32)])
def test_bytes_travel_to_another_instance_and_back(kv_dtype: str, source_size: int, target_size: int) -> None:
    source = Cache(kv_dtype=kv_dtype, block_size=source_size)
    target = Cache(kv_dtype=kv_dtype, block_size=target_size, seed=1, made=backend())
    source.append()
    data = source.export()
    event = target.extension.import_(target.rig.pool, 0, target.ids, target.lengths, data.tobytes())
    kept = data.copy()
    data[:] = 0  # it was read before import_ returned
    assert event.done() and target.export().tobytes() == kept.tobytes()
    for layer in owners():
        theirs, ours = target.rig.pool.layer(layer.index), source.rig.pool.layer(layer.index)
        for cache, other in ((theirs.keys, ours.keys), (theirs.values, ours.values)):
            rows, expected = cache[:, target.slots(target.ids)], other[:, source.slots(source.ids)]
            assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8)), "padding included"


def test_attention_over_imported_blocks_is_that_over_appended_ones() -> None:
    rig = Rig(pool_spec(layer_spec(k_dim=5, v_dim=3)), seed=2)
    other = Rig(pool_spec(layer_spec(k_dim=5, v_dim=3), block_size=3), seed=3, made=backend())
    other.poison(float("nan"))
    seq, twin = rig.sequence(40), other.sequence(40)
    rig.write(seq, 0, 39)
    lengths = [min(16, 39 - start) for start in range(0, 39, 16)]
    _, data = rig.backend.extension("canonical_kv").export(rig.pool, 0, np.array(seq.blocks), np.array(lengths))
    other.backend.wait(
        other.backend.extension("canonical_kv").import_(
            other.pool, 0, np.array(twin.blocks[:13]), np.array([3] * 13), data
        )
    )
    twin.keys, twin.values, twin.queries = seq.keys, seq.values, seq.queries
    assert torch.equal(other.step((twin, 40, 1)), rig.step((seq, 40, 1)))


def test_import_writes_its_tokens_and_no_other_slot() -> None:
    source, target = Cache(), Cache(seed=1)
    source.append()
    data = source.export()
    nothing = np.zeros(0, np.int32)
    target.extension.import_(target.rig.pool, 0, nothing, nothing, data[:32])
    target.extension.import_(target.rig.pool, 0, target.ids, target.lengths, data)
    allowed = set(target.slots(target.ids).tolist())
    for layer in owners():
        found = target.rig.pool.layer(layer.index)
        for cache in (found.keys, found.values):
            blank = (cache.view(torch.uint8) == 255).all(2).all(0)
            assert {int(slot) for slot in torch.nonzero(~blank)} - set(range(4)) == allowed
            assert not cache[:, :4].any(), "the null block"


def test_the_null_block_exports_as_zeros_and_is_never_imported() -> None:
    cache = Cache()
    ids, lengths = np.zeros(2, np.int32), np.array([4, 1], np.int32)
    _, data = cache.extension.export(cache.rig.pool, 0, ids, lengths)
    numbers = 5 * sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in owners())
    assert len(data) == 32 + 4 * numbers and not data[32:].any()
    with pytest.raises(ContractViolation, match=r"ids must be 1\.\.39, got 0\.\.0"):
        cache.extension.import_(cache.rig.pool, 0, ids[:1], lengths[:1], data)


def test_a_host_pool_and_a_second_group_take_part() -> None:
    groups = (
        GroupSpec(layers=(layer_spec(0),), block_size=16, kv_dtype="fp32"),
        GroupSpec(layers=(layer_spec(1, kv_heads=1, k_dim=8),), block_size=4, kv_dtype="bf16"),
    )
    made = backend()
    device, host = (
        made.alloc_pool(pool_spec(groups=groups, num_blocks=8, placement=place)) for place in ("device", "host")
    )
    ids, lengths, extension = np.array([5, 2]), np.array([4, 2]), made.extension("canonical_kv")
    values = np.random.default_rng(0).integers(0, 120, 6 * (8 + 16) * 2).astype(np.uint8)
    data = np.concatenate([np.frombuffer(canonical_fingerprint(groups[1]), np.uint8), values])
    extension.import_(device, 1, ids, lengths, data)
    made.copy_blocks(device, host, np.array([[5, 1], [2, 7]], np.int32)).join()
    assert extension.export(host, 1, np.array([1, 7]), lengths)[1].tobytes() == data.tobytes()


def test_every_wrong_argument_is_a_violation_and_writes_nothing() -> None:
    cache, other = Cache(), Cache(kv_dtype="bf16")
    cache.append()
    data = cache.export()
    state = cache.rig.pool._storage.clone()
    pool, ids, lengths = cache.rig.pool, cache.ids, cache.lengths
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("exported from other layers", (pool, 0, ids, lengths, other.export())),
        ("exported from other layers", (pool, 0, ids, lengths, data[:31])),
        (f"take {len(data)} bytes, got {len(data) - 1}", (pool, 0, ids, lengths, data[:-1])),
        (f"got {len(data)}", (pool, 0, ids[:-1], lengths[:-1], data)),
        ("contiguous uint8 array", (pool, 0, ids, lengths, data[::2])),
        ("contiguous uint8 array", (pool, 0, ids, lengths, 5)),
        ("a block twice", (pool, 0, ids[[0, 0]], lengths[[0, 0]], data)),
        (r"lengths must be 0\.\.4, got -1\.\.4", (pool, 0, ids[:2], np.array([4, -1]), data)),
        (r"lengths must be 0\.\.4, got 4\.\.5", (pool, 0, ids[:2], np.array([4, 5]), data)),
        (r"\[n\] each", (pool, 0, ids, lengths[:-1], data)),
        (r"ids must be 1\.\.39", (pool, 0, np.array([40]), np.array([1]), data)),
        (r"groups 0\.\.0, not 1", (pool, 1, ids, lengths, data)),
        ("another backend instance", (Cache(made=backend()).rig.pool, 0, ids, lengths, data)),
    ]
    for message, arguments in calls:
        with pytest.raises(ContractViolation, match=message):
            cache.extension.import_(*arguments)
    for arguments in [(pool, 0, [-1], [1]), (pool, 0, [1], [9]), (pool, 0, [[1]], [[1]]), (pool, -1, ids, lengths)]:
        with pytest.raises(ContractViolation):
            cache.extension.export(*arguments)
    assert torch.equal(cache.rig.pool._storage, state)
