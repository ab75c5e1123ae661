"""Copies between pools: bits, order, what runs beside compute, failures, and the thread that is gone after close."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import DeviceError, Event, GroupSpec
from pagedkv_cpu import copies
from pagedkv_cpu.backend import CpuBackend
from tests.backends.cpu.rig import Rig, backend, layer_spec, pool_spec

PATIENCE = 30.0


class Gate(Event):
    """An event that is done once it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def done(self) -> bool:
        return self.opened.is_set()

    def join(self, timeout: float | None = None) -> None:
        assert self.opened.wait(PATIENCE if timeout is None else timeout)


@pytest.fixture
def made() -> Iterator[CpuBackend]:
    one = backend()
    yield one
    one.close()


def spec(**changes: Any) -> Any:
    """Two groups whose layers differ in heads and dims; a block is 20 KiB of four kinds of planes."""
    groups = (
        GroupSpec(layers=(layer_spec(0), layer_spec(1, v_dim=40)), block_size=16, kv_dtype="fp32"),
        GroupSpec(layers=(layer_spec(2, kv_heads=1, k_dim=5),), block_size=32, kv_dtype="bf16"),
    )
    return pool_spec(groups=groups, **changes)


def filled(pool: Any, seed: int) -> dict[int, np.ndarray]:
    """Random bytes in every plane; a copy of them."""
    random = np.random.default_rng(seed)
    for planes in pool._planes.values():
        planes[:, 1:] = torch.from_numpy(random.integers(0, 256, planes[:, 1:].shape, np.uint8))
    return bytes_of(pool)


def bytes_of(pool: Any) -> dict[int, np.ndarray]:
    return {size: planes.numpy().copy() for size, planes in pool._planes.items()}


def copied(source: dict[int, np.ndarray], target: dict[int, np.ndarray], pairs: np.ndarray) -> dict[int, np.ndarray]:
    """What `target` holds after the copy, by numpy."""
    want = {size: planes.copy() for size, planes in target.items()}
    for size, planes in want.items():
        planes[:, pairs[:, 1]] = source[size][:, pairs[:, 0]]
    return want


def same(pool: Any, want: dict[int, np.ndarray]) -> bool:
    return all(np.array_equal(planes.numpy(), want[size]) for size, planes in pool._planes.items())


@pytest.mark.parametrize("count", [0, 1, 7, 63])
@pytest.mark.parametrize("chunk", [copies.CHUNK, 1024])
def test_every_byte_arrives_between_pools_and_within_one(made, monkeypatch, count, chunk):
    monkeypatch.setattr(copies, "CHUNK", chunk)
    here, there = made.alloc_pool(spec()), made.alloc_pool(spec(placement="host", num_blocks=70))
    source, target = filled(here, 1), filled(there, 2)
    random = np.random.default_rng(count)
    pairs = np.stack([random.integers(0, 64, count), random.permutation(69)[:count] + 1], 1).astype(np.int32)
    want = copied(source, target, pairs)
    event = made.copy_blocks(here, there, pairs)
    pairs[:] = 1
    made.wait(event)
    assert event.done() and same(there, want) and same(here, source)
    pairs = np.stack([np.arange(31), np.arange(31, 62)], 1)[: count // 2].astype(np.int32)
    want = copied(source, source, pairs)
    assert made.copy_blocks(here, here, pairs).done() and same(here, want)


def test_blocks_larger_than_a_chunk_arrive_whole(made):
    wide = pool_spec(layer_spec(0, kv_heads=1, k_dim=40), block_size=2048, num_blocks=4)
    here, there = made.alloc_pool(wide), made.alloc_pool(wide)
    assert max(here._planes) > copies.CHUNK and max(here._planes) % copies.CHUNK
    pairs = np.array([[1, 3], [2, 1], [0, 2]], np.int32)
    want = copied(filled(here, 1), filled(there, 2), pairs)
    made.copy_blocks(here, there, pairs).join()
    assert same(there, want)


def test_a_small_copy_is_done_at_once_and_starts_no_thread(made):
    before = threading.active_count()
    here, there = made.alloc_pool(spec()), made.alloc_pool(spec(placement="host"))
    want = copied(filled(here, 1), filled(there, 2), np.array([[1, 2]]))
    event = made.copy_blocks(here, there, np.array([[1, 2]], np.int32))
    assert event.done() and same(there, want) and threading.active_count() == before


def test_attention_runs_while_a_copy_is_under_way_and_wait_sees_it(made):
    rig = Rig(pool_spec(), made=made)
    seq, host = rig.sequence(40), made.alloc_pool(pool_spec(placement="host"))
    rig.write(seq, 0, 39)
    gate, pairs = Gate(), np.array([[block, i + 1] for i, block in enumerate(seq.blocks[:2])], np.int32)
    before = filled(host, 2)
    want = copied(bytes_of(rig.pool), before, pairs)
    out = made.copy_blocks(rig.pool, host, pairs, after=gate)
    moved = [rig.free.pop() for _ in pairs]
    back = made.copy_blocks(host, rig.pool, np.array([[1, moved[0]], [2, moved[1]]], np.int32), after=out)
    step = rig.step((seq, 40, 1))
    assert np.abs(step.double().numpy() - rig.expected(seq, 40, 1)).max() < 5e-6
    out.join(timeout=0.01)
    assert not out.done() and not back.done() and same(host, before)
    gate.opened.set()
    made.wait(back)
    assert out.done() and back.done() and same(host, want)
    again = rig.step((type(seq)(seq.keys, seq.values, seq.queries, [*moved, seq.blocks[2]]), 40, 1))
    assert torch.equal(again, step)


def test_copies_after_one_that_waits_keep_their_order_and_synchronize_ends_them(made):
    pools = [made.alloc_pool(pool_spec(placement="host")) for _ in range(3)]
    first = filled(pools[0], 1)
    gate, pairs = Gate(), np.array([[i, i] for i in range(1, 64)], np.int32)
    events = [made.copy_blocks(pools[0], pools[1], pairs, after=gate), made.copy_blocks(pools[1], pools[2], pairs)]
    assert not any(event.done() for event in events)
    threading.Timer(0.05, gate.opened.set).start()
    made.synchronize()
    assert all(event.done() for event in events) and same(pools[2], first)


def test_pool_and_backend_close_wait_for_copies_and_the_thread_is_gone():
    before = threading.active_count()
    made = backend()
    here, there = made.alloc_pool(pool_spec()), made.alloc_pool(pool_spec(placement="host"))
    want, planes = filled(here, 1), there._planes
    pairs = np.array([[i, i] for i in range(1, 64)], np.int32)
    gates = [Gate(), Gate()]
    event = made.copy_blocks(here, there, pairs, after=gates[0])
    threading.Timer(0.05, gates[0].opened.set).start()
    there.close()
    assert event.done() and all(np.array_equal(planes[size].numpy(), want[size]) for size in want)
    again = made.alloc_pool(pool_spec(placement="host"))
    event = made.copy_blocks(here, again, pairs, after=gates[1])
    threading.Timer(0.05, gates[1].opened.set).start()
    made.close()
    made.close()
    assert event.done() and not [t for t in threading.enumerate() if t.name.startswith("pagedkv-copies")]
    assert threading.active_count() <= before + 1  # the last timer may still be ending


def failing(planes: copies.Planes, pairs: np.ndarray) -> None:
    raise MemoryError("no room")


@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_failed_copy_is_a_device_error_of_its_event_and_of_every_call_but_close(made, monkeypatch, caplog, placement):
    here, there = made.alloc_pool(pool_spec()), made.alloc_pool(pool_spec(placement="host"))
    pairs, gate = np.array([[1, 2]], np.int32), Gate()
    first = made.copy_blocks(here, there, pairs, after=gate)
    monkeypatch.setattr(made._path, "copy", failing)
    if placement == "device":
        with pytest.raises(DeviceError, match="no room"):
            made.copy_blocks(here, here, pairs)
        gate.opened.set()
    else:
        second = made.copy_blocks(here, there, pairs)
        gate.opened.set()
        first.join(PATIENCE)
        for call in (second.join, second.done):
            with pytest.raises(DeviceError, match="no room"):
                call()
    assert "close this instance" in caplog.text
    for lost in (
        lambda: made.alloc_pool(pool_spec()),
        lambda: made.copy_blocks(here, there, pairs),
        lambda: made.wait(Event()),
        lambda: made.record(),
        lambda: made.synchronize(),
        lambda: made.op("linear", None),
    ):
        with pytest.raises(DeviceError, match="no room"):
            lost()


def test_a_process_that_never_closes_ends_after_its_copies():
    code = """
import time, numpy as np
from pagedkv.api import Event
from tests.backends.cpu import rig
class Later(Event):
    def done(self): return False
    def join(self, timeout=None): time.sleep(0.2)
made, spec = rig.backend(), rig.pool_spec(placement="host")
one, two = made.alloc_pool(spec), made.alloc_pool(spec)
event = made.copy_blocks(one, two, np.array([[1, 1]], np.int32), after=Later())
event._future.add_done_callback(lambda future: print("copied", future.exception()))
print("the end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "the end\ncopied None\n", done.stderr
