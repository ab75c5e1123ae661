"""Collectives over torch.distributed, ranks as threads: values, order of sums, isolation, and every way to fail."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pagedkv.api import BackendUnavailable, ContractViolation, DeviceError, World
from pagedkv.api import torch as helpers
from pagedkv.api.errors import ConfigError
from pagedkv.api.torch import DTYPES, OneRank, communicator


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def worlds(size: int) -> list[World]:
    """One world for each rank of an engine that meets at a port of its own."""
    address = f"tcp://127.0.0.1:{free_port()}"
    return [World(rank=rank, size=size, rendezvous=address) for rank in range(size)]


def on_ranks(size: int, work: Callable[[World], Any], ranks: Sequence[World] | None = None) -> list[Any]:
    """What `work` returns, or raises, on each rank; a thread stands for a rank's process."""
    results: list[Any] = [None] * size

    def run(world: World) -> None:
        try:
            results[world.rank] = work(world)
        except Exception as error:
            results[world.rank] = error

    threads = [threading.Thread(target=run, args=(world,)) for world in ranks or worlds(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@contextlib.contextmanager
def joined(world: World, ranks: Sequence[int], backend: str = "gloo", **options: Any) -> Iterator[Any]:
    made = communicator(backend, world, ranks, **({"timeout": 20.0} | options))
    try:
        yield made
    finally:
        made.close()


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Eighths up to 16: sums of some of them are exact in float32, and rounded in bf16 and fp16."""
    eighths = np.random.default_rng(rank).integers(-128, 128, size=shape)
    return torch.from_numpy(eighths / 8).to(dtype)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_every_collective_against_numpy(ordered: bool) -> None:
    def work(world: World) -> dict[str, Any]:
        mine = numbers(world.rank, 5, 3)
        with joined(world, [0, 1, 2], ordered=ordered) as group:
            reduced = group.all_reduce(given := mine.clone())
            first = group.broadcast(mine.clone())
            last = group.broadcast(mine.clone(), src=2)
            group.barrier()
            gathered = {dim: group.all_gather(mine, dim) for dim in (0, 1, -2)} | {None: group.all_gather(mine)}
        return {"sum": reduced, "in place": reduced is given, "first": first, "last": last, "gathered": gathered}

    parts = [numbers(rank, 5, 3).numpy() for rank in range(3)]
    for got in on_ranks(3, work):
        np.testing.assert_array_equal(got["sum"].numpy(), np.sum(parts, axis=0, dtype=np.float64))
        assert got["in place"]
        np.testing.assert_array_equal(got["first"].numpy(), parts[0])
        np.testing.assert_array_equal(got["last"].numpy(), parts[2])
        for dim, gathered in got["gathered"].items():
            np.testing.assert_array_equal(gathered.numpy(), np.concatenate(parts, -1 if dim is None else dim))


@pytest.mark.parametrize("dtype", [*DTYPES, "fp64", "int64"])
def test_an_ordered_sum_of_any_dtype_is_rounded_once(dtype: str) -> None:
    kind = (DTYPES | {"fp64": torch.float64, "int64": torch.int64})[dtype]

    def work(world: World) -> torch.Tensor:
        with joined(world, [0, 1, 2], ordered=True) as group:
            return group.all_reduce(numbers(world.rank, 200, dtype=kind))

    exact = sum(numbers(rank, 200, dtype=kind).double() for rank in range(3))
    for got in on_ranks(3, work):
        assert got.dtype == kind and torch.equal(got, exact.to(kind))


@pytest.mark.parametrize("ordered", [False, True])
def test_slices_of_a_tensor_are_reduced_and_overwritten_in_place(ordered: bool) -> None:
    def work(world: World) -> list[torch.Tensor]:
        whole = numbers(world.rank, 4, 6)
        with joined(world, [0, 1], ordered=ordered) as group:
            group.all_reduce(whole[:, :2])
            group.broadcast(whole[:, 2:4], src=1)
            return [whole, group.all_gather(whole[:, 4:], 0)]

    a, b = (numbers(rank, 4, 6).numpy() for rank in range(2))
    for rank, (whole, gathered) in enumerate(on_ranks(2, work)):
        rest = (a, b)[rank][:, 4:]
        np.testing.assert_array_equal(whole.numpy(), np.concatenate([(a + b)[:, :2], b[:, 2:4], rest], 1))
        np.testing.assert_array_equal(gathered.numpy(), np.concatenate([a[:, 4:], b[:, 4:]], 0))


def test_an_ordered_sum_does_not_depend_on_the_number_of_rows() -> None:
    def work(world: World) -> list[bool]:
        mine = torch.randn(200, 64, generator=torch.Generator().manual_seed(world.rank))
        with joined(world, [0, 1, 2], ordered=True) as group:
            whole = group.all_reduce(mine.clone())
            return [torch.equal(group.all_reduce(mine[:rows].clone()), whole[:rows]) for rows in (1, 3, 7, 50, 199)]

    assert on_ranks(3, work) == [[True] * 5] * 3


def test_the_order_of_the_group_is_the_order_given() -> None:
    def work(world: World) -> tuple[list[float], float]:
        mine = torch.tensor([float(world.rank)])
        with joined(world, [1, 0]) as group:
            return group.all_gather(mine).tolist(), float(group.broadcast(mine.clone(), src=0))

    assert on_ranks(2, work) == [([1.0, 0.0], 1.0)] * 2


def test_groups_of_some_ranks_beside_the_group_of_all() -> None:
    def work(world: World) -> list[float]:
        mine = torch.tensor([2.0**world.rank])
        pair = [0, 2] if world.rank != 1 else [1]
        with joined(world, [0, 1, 2]) as everyone, joined(world, pair) as few:
            return [float(few.all_reduce(mine.clone())), float(everyone.all_reduce(mine.clone()))]

    assert on_ranks(3, work) == [[5.0, 7.0], [2.0, 7.0], [5.0, 7.0]]


def test_a_group_of_one_needs_no_place_to_meet_and_gives_its_arguments_back() -> None:
    group, mine = communicator("gloo", World(), [0]), numbers(0, 2, 2)
    assert isinstance(group, OneRank)
    assert group.all_reduce(mine) is mine and group.all_gather(mine, 0) is mine and group.broadcast(mine) is mine
    group.barrier()
    group.close()
    assert torch.equal(mine, numbers(0, 2, 2))


# -- several in one process --------------------------------------------------------------------------------------------


def test_engines_beside_each_other_and_one_after_another() -> None:
    first, second = worlds(2), worlds(2)

    def work(world: World) -> list[float]:
        sums = []
        other = second[1 - world.rank]  # the other engine numbers these workers the other way round
        for _ in range(2):
            with joined(world, [0, 1]) as one, joined(other, [0, 1]) as two:
                ten = torch.tensor([10.0 + other.rank])
                sums += [float(one.all_reduce(torch.ones(1))), float(two.broadcast(ten))]
        return sums

    assert on_ranks(2, work, first) == [[2.0, 10.0, 2.0, 10.0]] * 2
    assert not dist.is_initialized(), "the default process group belongs to others"
    assert not helpers._stores, "the last communicator takes its store along"


def test_two_equal_groups_do_not_hear_each_other() -> None:
    def work(world: World) -> tuple[float, float]:
        with joined(world, [0, 1]) as one, joined(world, [0, 1]) as two:
            results = {}
            order = ("one", "two") if world.rank == 0 else ("two", "one")
            group = {"one": one, "two": two}
            threads = [
                threading.Thread(
                    target=lambda n=name: results.update({n: float(group[n].all_reduce(torch.tensor([len(n) + 0.5])))})
                )
                for name in order
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return results["one"], results["two"]

    assert on_ranks(2, work) == [(7.0, 7.0)] * 2


def test_the_store_listens_at_the_given_address_only() -> None:
    def work(world: World) -> tuple[bool, bool]:
        with joined(world, [0, 1]) as group:
            port = int(world.rendezvous.rsplit(":", 1)[1])
            here, elsewhere = (reachable(host, port) for host in ("127.0.0.1", "127.0.0.2"))
            group.barrier()  # rank 0 hosts it until then
        return here, elsewhere

    assert on_ranks(2, work) == [(True, False)] * 2


def reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


# -- backends that other packages register -----------------------------------------------------------------------------


def plain(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def extended(options: Any, more: Any) -> Any:
    assert more is None and options.global_ranks_in_group == [1, 0] and options.group_id
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)


@pytest.mark.parametrize("create", [plain, extended])
def test_a_registered_backend_is_found_by_name(create: Callable[..., Any]) -> None:
    name = f"pagedkv_test_{create.__name__}"
    dist.Backend.register_backend(name, create, extended_api=create is extended, devices="cpu")

    def work(world: World) -> list[float]:
        with joined(world, [1, 0], backend=name) as group:
            return group.all_gather(torch.tensor([float(world.rank)])).tolist()

    assert on_ranks(2, work) == [[1.0, 0.0]] * 2


def test_an_unknown_backend_says_so_before_anyone_is_waited_for() -> None:
    with pytest.raises(BackendUnavailable, match=r"no backend 'carrier_pigeon'.*registers it"):
        communicator("carrier_pigeon", worlds(2)[0], [0, 1])


def test_a_torch_without_collectives_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match=r"built without torch\.distributed"):
        communicator("gloo", worlds(2)[0], [0, 1])


# -- failure -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 2], [1], [-1, 0]])
def test_a_group_that_makes_no_sense_is_refused(ranks: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"distinct ranks of 0\.\.1, this rank 0 among them"):
        communicator("gloo", worlds(2)[0], ranks)


@pytest.mark.parametrize(
    "rendezvous", ["", "127.0.0.1:80", "tcp://127.0.0.1", "tcp://:9", "tcp://a:b", "tcp://a:99999"]
)
def test_a_missing_or_misspelt_rendezvous_says_what_to_set(rendezvous: str) -> None:
    with pytest.raises(ConfigError, match=r"set World\.rendezvous to tcp://HOST:PORT"):
        communicator("gloo", World(rank=0, size=2, rendezvous=rendezvous), [0, 1])


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen at {address}.*free port"):
            communicator("gloo", World(rank=0, size=2, rendezvous=address), [0, 1])


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_never_come_end_the_wait(rank: int) -> None:
    with pytest.raises(BackendUnavailable, match=rf"rank {rank} did not meet ranks \[0, 1\].*within 1 s"):
        communicator("gloo", worlds(2)[rank], [0, 1], timeout=1)


def test_a_rank_that_falls_behind_is_a_device_error_and_stays_one() -> None:
    over = threading.Event()

    def work(world: World) -> list[str]:
        with joined(world, [0, 1], timeout=1.0) as group:
            if world.rank == 1:
                over.wait(30)
                return []
            said = []
            for call in (group.barrier, lambda: group.all_reduce(torch.ones(2))):
                with pytest.raises(DeviceError, match=r"barrier among ranks \[0, 1\] failed") as caught:
                    call()
                said.append(str(caught.value))
            over.set()
            return said

    said, _ = on_ranks(2, work)
    assert len(said) == 2 and said[0] == said[1]


def test_a_rank_that_left_is_a_device_error() -> None:
    def work(world: World) -> str:
        with joined(world, [0, 1], timeout=20.0) as group:
            group.barrier()
            if world.rank == 1:
                return "left"
            with pytest.raises(DeviceError, match="all_gather among ranks"):
                group.all_gather(torch.ones(1))
            return "noticed"

    assert on_ranks(2, work) == ["noticed", "left"]


def test_wrong_arguments_and_use_after_close_are_violations() -> None:
    def work(world: World) -> list[str]:
        with joined(world, [0, 1]) as group:
            wrong = [lambda: group.broadcast(torch.ones(1), src=2), lambda: group.all_gather(torch.ones(2, 2), 2)]
            laws = [violated(call) for call in wrong]
            after = float(group.all_reduce(torch.ones(1)))
        group.close()
        return [*laws, str(after), violated(group.barrier)]

    assert on_ranks(2, work) == [["collectives", "collectives", "2.0", "use after close"]] * 2


def violated(call: Callable[[], Any]) -> str:
    with pytest.raises(ContractViolation) as caught:
        call()
    return caught.value.law
