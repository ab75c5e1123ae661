"""Pools: what they cost, what memory says, ids that move between groups, and pools beside one another."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest

from pagedkv.api import GroupSpec, Limits, MemoryInfo, OutOfDeviceMemory, PoolSpec
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.rig import TORCH, Rig, Row

pytestmark = pytest.mark.level("core")

MIB = 1 << 20
MEASURED = 40 * MIB
"""Bytes of the pool that is measured: so many that the system gives and takes them as whole pages, yet soon touched."""
SLACK = 6 * MIB
"""What else may come and go in the process or on the device meanwhile."""


def two_groups(kit: Kit, second_heads: int = 1) -> tuple[GroupSpec, GroupSpec]:
    """Two layers of two KV heads, and one layer of other heads."""
    first = GroupSpec(layers=(kit.layer(0), kit.layer(1)), block_size=kit.block_size, kv_dtype=kit.kv_dtype)
    second = dataclasses.replace(first, layers=(kit.layer(2, kv_heads=second_heads),))
    return first, second


def raw_bytes(spec: PoolSpec) -> int:
    """Bytes of the keys and values of one block, of the group that needs most."""

    def of(group: GroupSpec) -> int:
        numbers = sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in group.layers if layer.kv_of is None)
        return group.block_size * numbers * TORCH[group.kv_dtype].itemsize

    return max(of(group) for group in spec.groups)


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.law("pool_cost: pure, positive, and the same whatever num_blocks is")
def test_cost_is_pure(kit: Kit) -> None:
    spec = kit.spec(groups=two_groups(kit))
    cost = kit.backend.pool_cost(spec)
    again = [kit.backend.pool_cost(dataclasses.replace(spec, num_blocks=blocks)) for blocks in (1, 48, 2**20)]
    assert again == [cost] * 3, f"pool_cost depends on num_blocks, or on earlier calls: {cost} became {again}"
    assert cost.per_block > 0 and cost.fixed >= 0, f"{cost}: per_block must be positive and fixed not negative"


@pytest.mark.law("pool_cost: a block costs no less than its keys and values in the declared KV dtype")
@pytest.mark.parametrize("placement", [pytest.param(p, marks=pytest.mark.placement(p)) for p in ("device", "host")])
def test_cost_covers_the_bytes(kit: Kit, placement: str) -> None:
    for heads in (1, 6):
        spec = kit.spec(groups=two_groups(kit, heads), placement=placement)
        cost, least = kit.backend.pool_cost(spec), raw_bytes(spec)
        assert cost.per_block >= least, (
            f"per_block {cost.per_block} is less than the {least} bytes of the largest group"
        )


@pytest.mark.law("pool_cost: more layers and larger blocks cost more")
def test_cost_grows(kit: Kit) -> None:
    one, two = (kit.backend.pool_cost(kit.spec(*layers)) for layers in ([kit.layer(0)], [kit.layer(0), kit.layer(1)]))
    assert two.per_block > one.per_block, "a second layer costs nothing"


# -- memory ------------------------------------------------------------------------------------------------------------


def _in_order(memory: MemoryInfo) -> None:
    known = [value for value in (memory.free, memory.total, memory.reclaimable) if value is not None]
    assert all(value >= 0 for value in known), f"{memory}: bytes are not negative"
    if memory.total is not None:
        assert all(value <= memory.total for value in known), f"{memory}: more is free than there is"


@pytest.mark.law("memory: never more than there is")
def test_memory_does_not_overstate(kit: Kit) -> None:
    memory, machine = kit.backend.memory(), psutil.virtual_memory()
    _in_order(memory)
    if memory.unified:
        assert (memory.total or 0) <= machine.total, f"total {memory.total} is more than the machine's {machine.total}"
        most = machine.available + max(machine.total // 20, 256 * MIB)  # other processes come and go
        assert (memory.free or 0) <= most, f"free {memory.free} is more than the machine's {machine.available}"
    probed = kit.subject.device.total
    if probed is not None and memory.total is not None:
        assert memory.total <= probed, f"total {memory.total} is more than the {probed} that probe() found"


def _counted(memory: MemoryInfo) -> bool:
    """Whether free memory is this device's own and known, so that a pool shows in it."""
    return memory.free is not None and not memory.unified


@contextlib.contextmanager
def _touched_pool(kit: Kit, size_bytes: int) -> Iterator[tuple[Rig, int]]:
    """(a pool of about so many bytes with every block touched, what it may cost)."""
    size = kit.can.preferred_block_size
    limits = Limits(rows=2, tokens=2 * size, context=2 * size)  # so that little of the cost is working memory
    spec = kit.spec(*(kit.layer(i, kv_heads=8) for i in range(2)), block_size=size, limits=limits)
    cost = kit.backend.pool_cost(spec)
    spec = dataclasses.replace(spec, num_blocks=max(4, size_bytes // cost.per_block))
    rig = Rig(kit.backend, spec)
    try:
        for part in np.array_split(np.arange(1, spec.num_blocks), 8):
            rig.clear([int(block) for block in part])
        rig.write(seq := rig.sequence(size + 1), 0, size)
        rig.step((seq, size + 1, 1))
        rig.backend.synchronize()
        yield rig, cost.fixed + cost.per_block * spec.num_blocks
    finally:
        rig.close()


def _meters(kit: Kit) -> dict[str, Callable[[], int]]:
    """Name -> bytes taken now: the process's resident ones, and the device's own count; empty where nobody knows."""
    meters: dict[str, Callable[[], int]] = {}
    host, memory = kit.backend.torch_device == "cpu", kit.backend.memory()
    if host:
        process = psutil.Process()
        meters["resident bytes"] = lambda: int(process.memory_info().rss)
    if _counted(memory) or (not host and memory.free is not None):
        meters["memory()"] = lambda: -(kit.backend.memory().free or 0)
    return meters


@pytest.mark.law("pool_cost: a pool never takes more than fixed + blocks * per_block")
def test_pool_stays_within_its_cost(kit: Kit) -> None:
    with _touched_pool(kit, MIB):
        pass  # whatever is loaded and kept at a first use
    meters = _meters(kit)
    gc.collect()
    before = {name: taken() for name, taken in meters.items()}
    with _touched_pool(kit, MEASURED) as (_, allowed):
        measured = {name: taken() - before[name] for name, taken in meters.items()}
    kit.report("pool_bytes", {"allowed": allowed} | measured)
    for name, taken in measured.items():
        assert taken <= allowed + SLACK, f"the pool takes {taken} bytes by {name}, pool_cost allows {allowed}"


@pytest.mark.law("memory: what a pool takes is no longer free")
def test_memory_counts_pools(kit: Kit) -> None:
    before = kit.backend.memory()
    with _touched_pool(kit, MEASURED) as (rig, _):
        during = kit.backend.memory()
        _in_order(during)
        if before.free is None or during.free is None or not _counted(before):
            return
        least = rig.spec.num_blocks * raw_bytes(rig.spec)
        gone = before.free - during.free
        assert gone >= least - SLACK, f"free memory fell by {gone} for a pool of at least {least} bytes"


@pytest.mark.law(
    "alloc_pool: what cannot fit is OutOfDeviceMemory with requested above free, and the instance works on"
)
def test_far_too_much(kit: Kit) -> None:
    spec = kit.spec(*(kit.layer(i, kv_heads=32) for i in range(64)), num_blocks=2**31 - 1)
    with pytest.raises(OutOfDeviceMemory) as raised:
        kit.backend.alloc_pool(spec).close()
    requested, free = raised.value.requested, raised.value.free
    assert requested is not None, "OutOfDeviceMemory without `requested`: say how many bytes were asked for"
    assert free is None or requested > free, f"{requested} bytes were requested and {free} are free: that fits"
    rig = kit.rig()
    rows = [(rig.sequence(3), 3, 3)]
    kit.check(rig, rig.step(*rows), rig.expected(*rows), mistake="the instance is broken after OutOfDeviceMemory")


# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.law("null block: zero from the start, in every layer of every group")
@pytest.mark.parametrize("group", [0, 1])
def test_null_block_of_a_new_pool(kit: Kit, group: int) -> None:
    rig = kit.rig(groups=two_groups(kit), poison=False).of_group(group)
    size = rig.block_size
    seq = rig.sequence(2 * size, [0, 0])
    for layer in rig.group.layers:
        out = rig.read(seq, layer.index)
        assert (out == 0).all(), f"layer {layer.index}: block 0 is not zero after alloc_pool"


def _work(rig: Rig, blocks: list[int]) -> list[Row]:
    length = len(blocks) * rig.block_size - 1
    seq = rig.sequence(length, blocks)
    rig.write(seq, 0, length - 1)
    return [(seq, length, 1)]


def _takes_turns(kit: Kit, clear: bool) -> None:
    """Ids go from group to group and back; each owner's results are right, and its neighbour's bytes stay."""
    rig = kit.rig(groups=two_groups(kit))
    views = [rig, rig.of_group(1)]
    neighbour = _work(views[0], [4, 6]) if not clear else _after_clear(views[0], [4, 6])
    for turn in (0, 1, 0, 1):
        view = views[turn]
        rows = _after_clear(view, [5, 3, 7]) if clear else _work(view, [5, 3, 7])
        for layer in view.group.layers:
            out, wanted = view.step(*rows, layer=layer.index), view.expected(*rows, layer=layer.index)
            kit.check(view, out, wanted, mistake="a block kept something of its owner in another group")
    for layer in views[0].group.layers:
        out, wanted = views[0].step(*neighbour, layer=layer.index), views[0].expected(*neighbour, layer=layer.index)
        kit.check(views[0], out, wanted, mistake="an id's bytes reach into another id's")


def _after_clear(rig: Rig, blocks: list[int]) -> list[Row]:
    rig.clear(blocks)
    return _work(rig, blocks)


@pytest.mark.law("ids: a block that was cleared may go to another group, and the next owner reads its own bytes")
def test_ids_move_between_groups(kit: Kit) -> None:
    _takes_turns(kit, clear=True)


@pytest.mark.needs("nan_safe")
@pytest.mark.law("ids: a block may go to another group as it is (nan_safe)")
def test_ids_move_as_they_are(kit: Kit) -> None:
    _takes_turns(kit, clear=False)


@pytest.mark.law("ids: two groups use one id space at once, each its own ids")
def test_two_groups_at_once(kit: Kit) -> None:
    rig = kit.rig(groups=two_groups(kit))
    views = [rig, rig.of_group(1)]
    rows = [_after_clear(views[0], [1, 4]), _after_clear(views[1], [2, 3])]
    for _ in range(2):
        for view, own in zip(views, rows, strict=True):
            for layer in view.group.layers:
                out, wanted = view.step(*own, layer=layer.index), view.expected(*own, layer=layer.index)
                kit.check(view, out, wanted, mistake="a group wrote into blocks of another")


@pytest.mark.law("ids: every block but 0 can be used, the last one too")
def test_every_block(kit: Kit) -> None:
    rig = kit.rig(num_blocks=7)
    rows = [(seq := rig.sequence(rig.block_size), seq.length, seq.length) for _ in range(6)]
    for row in rows:
        rig.step(row)
    kit.check(rig, rig.step(*rows, write=False), rig.expected(*rows), mistake="two ids share bytes")


# -- several pools -----------------------------------------------------------------------------------------------------


@pytest.mark.law("pools: two at once are independent, and one outlives the other")
def test_two_pools_at_once(kit: Kit) -> None:
    one, other = kit.rig(), kit.rig(kit.layer(0, kv_heads=1), seed=1)
    rows = [_work(rig, [1, 2, 3]) for rig in (one, other)]
    plans = [rig.plan(*own) for rig, own in zip((one, other), rows, strict=True)]
    for rig, plan, own in zip((one, other), plans, rows, strict=True):
        out = rig.attend(plan, own, rig.layer())
        kit.check(rig, out, rig.expected(*own), mistake="pools share bytes, or a plan scratch of another pool")
    one.pool.close()
    kit.check(other, other.step(*rows[1]), other.expected(*rows[1]), mistake="closing a pool reached another")


@pytest.mark.law("pools: close is idempotent, and a pool's place can be taken by the next")
def test_close_and_again(kit: Kit) -> None:
    for seed in range(3):
        rig = kit.rig(seed=seed)
        rows = _work(rig, [3, 1])
        kit.check(rig, rig.step(*rows), rig.expected(*rows), mistake="a new pool is not as good as the first")
        rig.pool.close()
        rig.pool.close()


@pytest.mark.law("pools: a pool says its spec, blocks and placement")
@pytest.mark.parametrize("placement", [pytest.param(p, marks=pytest.mark.placement(p)) for p in ("device", "host")])
def test_pool_says_what_it_is(kit: Kit, placement: str) -> None:
    rig = kit.rig(placement=placement, num_blocks=5)
    pool = rig.pool
    assert (pool.spec, pool.num_blocks, pool.placement) == (rig.spec, 5, placement)


@pytest.mark.law("instances: two of one process are independent, and one outlives the other")
def test_two_instances(kit: Kit) -> None:
    first, second = kit.create(), kit.create()
    rigs = [kit.rig(backend=first), kit.rig(backend=second, seed=1)]
    rows = [_work(rig, [2, 1]) for rig in rigs]
    for rig, own in zip(rigs, rows, strict=True):
        kit.check(rig, rig.step(*own), rig.expected(*own), mistake="instances share a cache")
    rigs[0].close()
    first.close()
    kit.check(rigs[1], rigs[1].step(*rows[1]), rigs[1].expected(*rows[1]), mistake="closing one reached another")
