"""Two worker processes that load the backend as an engine's workers do, and run its collectives.

this process                    worker 0, worker 1 (spawned, never forked)
  Ask(identity, rendezvous) -->  plugins.reselect(identity), plugins.create(..., World(rank, 2, rendezvous))
                                 communicator((0, 1)), then every exercise in one order
  {name: array}             <--  results of both ranks
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedkv import plugins
from pagedkv.api import AttentionBackend, World
from pagedkv.api.errors import BackendUnavailable, PagedKVError
from pagedkv.conformance.rig import TORCH
from pagedkv.conformance.subject import Subject

SIZE = 2
TIMEOUT = 120.0
"""Seconds that a worker may take: two interpreters import a framework on a slow machine."""

SHAPES: Mapping[str, tuple[int, ...]] = {"small": (3, 4), "long": (5000,), "single": (1,), "deep": (2, 3, 4)}

Results = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a worker is told. Pickled, so small and plain."""

    rank: int
    rendezvous: str
    identity: plugins.Identity
    options: Mapping[str, Any]
    dtypes: tuple[str, ...]
    names: frozenset[str]
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A worker's results, or why there are none; `unavailable`: this machine cannot run two ranks of it."""

    results: Results = dataclasses.field(default_factory=dict)
    failure: str = ""
    unavailable: bool = False


def given(rank: int, shape: str, dtype: str) -> torch.Tensor:
    """What a rank brings: small whole numbers and quarters, whose sums are exact in every dtype."""
    rng = np.random.default_rng([rank, *map(ord, shape)])
    return torch.from_numpy(rng.integers(-16, 17, SHAPES[shape]) / 4).to(TORCH[dtype])


def run_pair(subject: Subject) -> tuple[Answer, Answer]:
    """Start two workers, one a device where there are several, and gather what they answer."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe(duplex=False) for _ in range(SIZE)]
        asks = _asks(subject, folder)
        workers = [
            context.Process(target=_worker, args=(ask, theirs), daemon=True)
            for ask, (_, theirs) in zip(asks, pairs, strict=True)
        ]
        try:
            for worker, (_, theirs) in zip(workers, pairs, strict=True):
                worker.start()
                theirs.close()  # or the end of a worker that dies would never be seen
            first, second = (_answer(mine) for mine, _ in pairs)
            return first, second
        finally:
            for worker in workers:
                _end(worker)


def _asks(subject: Subject, folder: str) -> list[Ask]:
    rendezvous = f"tcp://127.0.0.1:{_free_port()}"
    indices = [device.index for device in subject.descriptor.probe() if device.score or not device.reason]
    devices = indices[:SIZE] if len(indices) >= SIZE else [subject.device.index] * SIZE
    return [
        Ask(
            rank=rank,
            rendezvous=rendezvous,
            identity=dataclasses.replace(subject.selected.identity, device=device),
            options=subject.options,
            dtypes=tuple(d for d in subject.capabilities.dtypes if d in TORCH),
            names=subject.capabilities.collectives,
            folder=folder,
        )
        for rank, device in enumerate(devices)
    ]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _answer(connection: Connection) -> Answer:
    if not connection.poll(TIMEOUT):
        return Answer(failure=f"no answer within {TIMEOUT:g} s: the ranks wait for each other, or for nobody")
    try:
        found: Answer = connection.recv()
    except EOFError:
        return Answer(failure="the process ended without an answer")
    return found


def _end(worker: Any) -> None:
    if worker.pid is None:
        return
    worker.join(5)
    if worker.is_alive():
        worker.kill()
        worker.join()


# -- inside a worker ---------------------------------------------------------------------------------------------------


def _worker(ask: Ask, connection: Connection) -> None:
    """What a worker process runs; whatever goes wrong is its answer."""
    try:
        answer = Answer(results=_run(ask))
    except BackendUnavailable as error:
        answer = Answer(failure=str(error), unavailable=True)
    except Exception:  # noqa: BLE001 - reported by the parent, case by case
        answer = Answer(failure=traceback.format_exc())
    connection.send(answer)
    connection.close()


def _run(ask: Ask) -> Results:
    results: Results = {"refusal": _refusal(ask)}
    selected = plugins.reselect(ask.identity)
    results["identity"] = (selected.name, selected.distribution, selected.version)
    backend = plugins.create(selected, ask.options, World(rank=ask.rank, size=SIZE, rendezvous=ask.rendezvous))
    try:
        exercise = Exercise(backend, ask)
        for name in sorted(ask.names & EXERCISES.keys()):
            results |= {f"{name}/{part}": value for part, value in EXERCISES[name](exercise)}
        return results
    finally:
        backend.close()


def _refusal(ask: Ask) -> str:
    """What `reselect` says of another version than the parent's: its type and text; empty when it accepts it."""
    try:
        plugins.reselect(dataclasses.replace(ask.identity, version="0.0.0.dev999"))
    except PagedKVError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Exercise:
    """One rank's communicators, and its way from tensors to arrays."""

    def __init__(self, backend: AttentionBackend, ask: Ask) -> None:
        self.backend, self.rank, self.dtypes, self.folder = backend, ask.rank, ask.dtypes, Path(ask.folder)
        self.both, self.again = backend.communicator((0, 1)), backend.communicator((0, 1))
        self.alone = backend.communicator((ask.rank,))

    def given(self, shape: str, dtype: str) -> torch.Tensor:
        return given(self.rank, shape, dtype).to(self.backend.torch_device)

    def array(self, tensor: torch.Tensor) -> Any:
        event, array = self.backend.to_host(tensor.float())
        event.join()
        return np.array(array, np.float64)


def _all_reduce(x: Exercise) -> Iterator[tuple[str, Any]]:
    for dtype in x.dtypes:
        for shape in SHAPES:
            yield f"{dtype}/{shape}", x.array(x.both.all_reduce(x.given(shape, dtype)))
    dtype = x.dtypes[0]
    twice = x.both.all_reduce(x.both.all_reduce(x.given("small", dtype)) * 2)
    yield "twice", x.array(twice)
    first, second = x.both.all_reduce(x.given("small", dtype)), x.again.all_reduce(x.given("deep", dtype))
    yield "two communicators", (x.array(first), x.array(second))
    yield "alone", x.array(x.alone.all_reduce(x.given("small", dtype)))


def _all_gather(x: Exercise) -> Iterator[tuple[str, Any]]:
    for dtype in x.dtypes:
        for dim in (-1, 0, 1):
            yield f"{dtype}/{dim}", x.array(x.both.all_gather(x.given("deep", dtype), dim))
    yield "alone", x.array(x.alone.all_gather(x.given("deep", x.dtypes[0])))


def _broadcast(x: Exercise) -> Iterator[tuple[str, Any]]:
    for dtype in x.dtypes:
        for src in range(SIZE):
            yield f"{dtype}/{src}", x.array(x.both.broadcast(x.given("small", dtype), src))


def _barrier(x: Exercise) -> Iterator[tuple[str, Any]]:
    """Whether rank 0 sees what rank 1 did before the barrier, once its queue has passed it."""
    if x.rank == 1:
        (x.folder / "here").touch()
    x.both.barrier()
    x.backend.synchronize()
    yield "seen", (x.folder / "here").exists()


EXERCISES: Mapping[str, Callable[[Exercise], Iterator[tuple[str, Any]]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "barrier": _barrier,
}
"""Collective -> what both ranks run, in this order."""
