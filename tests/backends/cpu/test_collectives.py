"""The CPU backend's collectives between two spawned processes, which find the backend by name (U81)."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import plugins
from pagedkv.api import AttentionBackend, ContractViolation, OpSpec, World
from pagedkv.api.errors import ConfigError, DeviceError
from pagedkv.api.torch import OneRank
from pagedkv_cpu.backend import CpuBackend
from pagedkv_cpu.descriptor import CpuDescriptor
from tests.api.test_torch import free_port
from tests.backends.cpu.rig import backend

NAMES = frozenset({"all_reduce", "all_gather", "broadcast", "barrier"})
ROWS, WIDTH = 37, 24
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def activations(rank: int, dtype: str) -> torch.Tensor:
    """What a rank contributes: [ROWS, WIDTH], the same wherever it is made."""
    return torch.from_numpy(np.random.default_rng(rank).normal(size=(ROWS, WIDTH))).to(DTYPES[dtype])


def collect(group: Any, rank: int) -> dict[str, Any]:
    """Every collective's result on this rank, as numpy."""
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        mine = activations(rank, dtype)
        found[f"sum {dtype}"] = group.all_reduce(mine.clone()).double().numpy()
        found[f"columns {dtype}"] = group.all_gather(mine).double().numpy()
        found[f"rows {dtype}"] = group.all_gather(mine, dim=0).double().numpy()
        found[f"from 1 {dtype}"] = group.broadcast(mine.clone(), src=1).double().numpy()
    mine = activations(rank, "fp32")
    found["row by row"] = torch.cat([group.all_reduce(row.clone()) for row in mine.split(1)]).double().numpy()
    group.barrier()
    return found


def mourn(made: AttentionBackend, group: Any) -> list[str]:
    """What this rank is told once the other is killed: by the communicator, by the instance, and after its close."""
    said = []
    norm = OpSpec(dtype="fp32")
    for call in (lambda: group.all_reduce(torch.ones(3)), lambda: made.op("rms_norm", norm), group.barrier):
        try:
            call()
        except DeviceError as error:
            said.append(str(error))
    made.close()
    try:
        group.barrier()
    except ContractViolation as error:
        said.append(error.law)
    return said


def worker(rank: int, address: str, identity: plugins.Identity, channel: Connection) -> None:
    """One rank: the backend by its identity, all collectives, then one more, in which rank 1 does not join."""
    try:
        selected = plugins.reselect(identity)
        made = plugins.create(selected, {"threads": 1}, World(rank=rank, size=2, rendezvous=address))
        group = made.communicator([0, 1])
        found = collect(group, rank) | {"identity": selected.identity, "threads": torch.get_num_threads()}
        channel.send(found)
        if rank == 0:
            channel.send(mourn(made, group))
        else:
            channel.recv()  # until it is killed
    except Exception:
        channel.send(traceback.format_exc())


@pytest.fixture(scope="module")
def told() -> Mapping[str, Any]:
    """What both workers sent: {"ranks": [rank 0's, rank 1's], "mourning": rank 0's after rank 1 was killed}."""
    context = multiprocessing.get_context("spawn")
    address = f"tcp://127.0.0.1:{free_port()}"
    identity = plugins.select("cpu").identity
    pipes = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=worker, args=(rank, address, identity, pipes[rank][1]), daemon=True) for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        ranks = [receive(pipe[0]) for pipe in pipes]
        processes[1].kill()
        return {"ranks": ranks, "mourning": receive(pipes[0][0])}
    finally:
        for process in processes:
            process.kill()
            process.join()


def receive(pipe: Connection) -> Any:
    assert pipe.poll(120), "a worker is stuck"
    sent = pipe.recv()
    assert not isinstance(sent, str), sent
    return sent


def test_u81_spawned_workers_resolve_the_backend_by_name(told: Mapping[str, Any]) -> None:
    assert [rank["identity"] for rank in told["ranks"]] == [plugins.select("cpu").identity] * 2
    assert [rank["threads"] for rank in told["ranks"]] == [1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_u81_collectives_against_numpy(told: Mapping[str, Any], dtype: str) -> None:
    parts = [activations(rank, dtype).double().numpy() for rank in range(2)]
    exact = torch.from_numpy(parts[0] + parts[1]).to(DTYPES[dtype]).double().numpy()
    for found in told["ranks"]:
        # Two addends: one rounding in fp32. Narrower dtypes are added in fp32 and rounded again, which can differ
        # from rounding the exact sum once in the last bit, where that lies halfway.
        np.testing.assert_allclose(found[f"sum {dtype}"], exact, rtol=0 if dtype == "fp32" else 2.0**-7)
        np.testing.assert_array_equal(found[f"columns {dtype}"], np.concatenate(parts, axis=1))
        np.testing.assert_array_equal(found[f"rows {dtype}"], np.concatenate(parts, axis=0))
        np.testing.assert_array_equal(found[f"from 1 {dtype}"], parts[1])


def test_a_row_s_sum_does_not_depend_on_other_rows(told: Mapping[str, Any]) -> None:
    for found in told["ranks"]:
        np.testing.assert_array_equal(found["row by row"], found["sum fp32"])


def test_both_ranks_have_the_same_bits(told: Mapping[str, Any]) -> None:
    first, second = told["ranks"]
    for name in first.keys() - {"identity", "threads"}:
        np.testing.assert_array_equal(first[name], second[name])


def test_a_killed_rank_is_a_device_error_of_the_other_s_instance(told: Mapping[str, Any]) -> None:
    *errors, after_close = told["mourning"]
    assert len(errors) == 3 and len(set(errors)) == 1, "the instance and later calls say the same"
    assert "all_reduce among ranks [0, 1] failed" in errors[0] and "start all of them again" in errors[0]
    assert after_close == "use after close"


# -- alone -------------------------------------------------------------------------------------------------------------


def test_it_declares_what_it_does() -> None:
    made = backend()
    assert made.capabilities().collectives == NAMES
    group = made.communicator([0])
    assert isinstance(group, OneRank) and all(callable(getattr(group, name)) for name in NAMES)


def test_a_world_without_a_place_to_meet_says_what_to_set() -> None:
    made = CpuDescriptor().create(0, {"threads": 1}, World(rank=0, size=2))
    assert isinstance(made, CpuBackend)
    with pytest.raises(ConfigError, match=r"set World\.rendezvous"):
        made.communicator([0, 1])
    assert made.communicator([0]).all_gather(torch.ones(2)).tolist() == [1.0, 1.0]


def test_a_closed_backend_makes_none() -> None:
    made = backend()
    made.close()
    with pytest.raises(ContractViolation, match="closed"):
        made.communicator([0])
