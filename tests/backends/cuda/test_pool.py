"""Pools of the CUDA backend: exact costs, the layout of a block, and what memory allows."""

from __future__ import annotations

import pytest
import torch

from pagedkv.api import ContractViolation, GroupSpec, LayerSpec, Limits, MemoryInfo, OutOfDeviceMemory, PoolSpec
from pagedkv_cuda import pool as module
from pagedkv_cuda import runtime as runtime_module
from pagedkv_cuda.pool import row_bytes
from pagedkv_cuda.runtime import HostRuntime
from tests.backends.cuda.double import double

GIB = 1 << 30


def layer(index=0, **changes):
    fields = {"q_heads": 4, "kv_heads": 2, "k_dim": 64, "v_dim": 64, "scale": 0.125}
    return LayerSpec(index=index, **(fields | changes))


def spec(*layers, block_size=16, kv_dtype="fp16", **changes):
    group = GroupSpec(layers=layers or (layer(),), block_size=block_size, kv_dtype=kv_dtype)
    limits = Limits(rows=4, tokens=32, context=128)
    return PoolSpec(**({"groups": (group,), "num_blocks": 8, "dtype": "fp32", "limits": limits} | changes))


# -- cost and layout ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "nbytes"),
    [
        (spec(), 2 * 16 * 2 * 64 * 2),  # keys and values x tokens x heads x dim x bytes
        (spec(layer(0), layer(1)), 2 * 2 * 16 * 2 * 64 * 2),
        (spec(layer(0), layer(1, kv_of=0)), 2 * 16 * 2 * 64 * 2),
        (spec(layer(k_dim=72, v_dim=8), kv_dtype="fp32"), 16 * 2 * (72 + 8) * 4),
        (spec(layer(kv_heads=1, q_heads=1, k_dim=9, v_dim=9), block_size=3), 2 * 128),  # 54 bytes, padded
    ],
)
def test_u84_a_block_costs_what_its_numbers_take(made, nbytes):
    assert row_bytes(made) == nbytes == double().pool_cost(made).per_block


def test_the_larger_group_sets_the_block():
    small, large = (GroupSpec(layers=layers, block_size=16, kv_dtype="fp16") for layers in ([layer(0)], [layer(1)] * 3))
    assert row_bytes(spec(groups=(small, large))) == 3 * row_bytes(spec())


@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_pool_holds_what_it_costs(placement):
    backend, made = double(), spec(placement=placement)
    pool, cost = backend.alloc_pool(made), backend.pool_cost(made)
    blocks = made.num_blocks + (placement == "device")  # the block for what is not kept, in `fixed`
    assert pool.rows.nbytes == blocks * cost.per_block
    assert pool.rows.untyped_storage().nbytes() <= cost.fixed + made.num_blocks * cost.per_block
    assert pool.rows.data_ptr() % module.ALIGN == 0
    pool.close()
    pool.close()


def test_no_byte_of_a_row_belongs_to_two_parts():
    pool = double().alloc_pool(spec(layer(0, v_dim=24), layer(1, kv_heads=1, q_heads=4, k_dim=40)))
    pool.rows.zero_()
    parts = [part for one in pool.layers.values() for part in (one.keys, one.values)]
    for part in parts:
        part.add_(1)
    assert all(bool((part == 1).all()) for part in parts)
    written = sum(part[3].numel() * part.element_size() for part in parts)
    assert int((pool.rows.view(torch.int16)[3] != 0).sum()) * 2 == written


def test_host_pools_hold_blocks_only():
    backend = double()
    pool = backend.alloc_pool(spec(placement="host"))
    with pytest.raises(ContractViolation, match="placement 'device'"):
        pool.group(0)


# -- memory ------------------------------------------------------------------------------------------------------------


class Told(HostRuntime):
    """A device that says what its memory is."""

    def __init__(self, free, total, reclaimable=0):
        self.told = MemoryInfo(free=free, total=total, reclaimable=reclaimable)

    def memory(self):
        return self.told


def test_a_pool_that_does_not_fit_names_sizes_and_a_way_out():
    backend = double(runtime=Told(1 << 20, 80 * GIB))
    wanted = backend.pool_cost(spec())
    with pytest.raises(OutOfDeviceMemory, match="processes that nvidia-smi lists") as raised:
        backend.alloc_pool(spec())
    backend._runtime.holders = lambda: "process 4242 (9.0 GiB)"
    with pytest.raises(OutOfDeviceMemory, match=r"the rest is held by process 4242 \(9.0 GiB\)"):
        backend.alloc_pool(spec())
    assert raised.value.free == 1 << 20
    assert raised.value.requested == wanted.fixed + 8 * wanted.per_block


@pytest.mark.parametrize(
    ("free", "reclaimable", "fraction", "reserved", "budget"),
    [
        (80, 0, 0.9, 10, 62),
        (40, 0, 0.9, 10, 22),  # another process holds half: counted once
        (40, 5, 0.9, 10, 27),  # what torch keeps of freed tensors can be had
        (4, 0, 0.9, 10, 0),  # never negative
        (80, 0, None, 10, 62),
    ],
)
def test_u113_other_processes_are_counted_once(free, reclaimable, fraction, reserved, budget):
    backend = double(runtime=Told(free * GIB, 80 * GIB, reclaimable * GIB))
    assert backend.kv_budget(fraction, reserved * GIB) == budget * GIB


def test_memory_that_cannot_be_pinned_is_explained():
    plain = runtime_module.why_not_pinned(1 << 30, "out of memory", wsl=False)
    under_windows = runtime_module.why_not_pinned(1 << 30, "out of memory", wsl=True)
    assert "ulimit -l" in plain and "lower swap_space" in plain
    assert ".wslconfig" in under_windows and "WSL2" in under_windows


class Registry:
    """CUDA's runtime as far as registering host memory goes: `codes` of the calls to come, `last`: the error kept."""

    def __init__(self, *codes):
        self.codes, self.registered, self.last = list(codes), {}, 0

    def cudart(self):
        return self

    def _answer(self):
        code = self.codes.pop(0) if self.codes else 0
        self.last = code or self.last
        return code

    def cudaHostRegister(self, address, nbytes, flags):
        code = self._answer()
        if code == 0:
            self.registered[address] = nbytes
        return code

    def cudaHostUnregister(self, address):
        code = self._answer()
        if code == 0:
            del self.registered[address]
        return code

    def launch(self, *args, **kwargs):
        """What the next kernel finds: the error that nobody took up."""
        code, self.last = self.last, 0
        if code:
            raise RuntimeError("CUDA error: out of memory")
        return torch.ones(1)


@pytest.fixture
def registry(monkeypatch):
    made = Registry()
    monkeypatch.setattr(runtime_module, "_cuda", made)
    monkeypatch.setattr(runtime_module.torch, "zeros", made.launch)
    return made


def test_host_memory_is_pinned_to_the_byte_and_given_back(registry):
    memory = runtime_module.PinnedMemory(12345, "cuda:0")
    assert registry.registered == {memory.tensor.data_ptr(): 12345}
    memory.close()
    memory.close()
    assert registry.registered == {} and memory.tensor.numel() == 0


@pytest.mark.parametrize(("wsl", "words"), [(False, "ulimit -l"), (True, "under WSL2 only about half")])
def test_pinning_that_fails_is_out_of_memory_and_leaves_nothing_behind(registry, monkeypatch, wsl, words):
    monkeypatch.setattr(runtime_module.devices, "is_wsl", lambda: wsl)
    registry.codes = [2]
    with pytest.raises(OutOfDeviceMemory, match="12345 bytes of host memory could not be pinned") as raised:
        runtime_module.PinnedMemory(12345, "cuda:0")
    assert raised.value.requested == 12345 and words in str(raised.value)
    assert registry.registered == {} and registry.last == 0, "the next launch finds no error"
    assert runtime_module.PinnedMemory(12345, "cuda:0").tensor.nbytes == 12345


def test_unpinning_that_fails_is_told_and_leaves_no_error(registry, caplog):
    memory = runtime_module.PinnedMemory(12345, "cuda:0")
    registry.codes = [1]
    memory.close()
    assert "12345 bytes of host memory could not be unpinned (1)" in caplog.text and registry.last == 0
    memory.close()
    assert caplog.text.count("could not be unpinned") == 1


def test_a_pool_whose_host_memory_cannot_be_pinned_leaves_the_instance_usable(registry):
    class Pinning(HostRuntime):
        def host_memory(self, nbytes):
            return runtime_module.PinnedMemory(nbytes, "cuda:0")

    backend = double(runtime=Pinning())
    registry.codes = [2]
    with pytest.raises(OutOfDeviceMemory, match="could not be pinned"):
        backend.alloc_pool(spec(placement="host"))
    pool = backend.alloc_pool(spec(placement="host"))
    assert list(registry.registered.values()) == [pool.rows.untyped_storage().nbytes()]
    backend.close()
    assert registry.registered == {}
