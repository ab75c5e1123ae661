"""Ranks that try to meet and cannot, each in a process of its own: the double, with gloo in hccl's place.

A module that loads nothing at its top, so that a rank which ends before it meets anyone costs no more than Python.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv_ascend.backend import AscendBackend

LIMIT = 2
"""Seconds of HCCL_CONNECT_TIMEOUT in every rank."""
PATIENCE = 60.0
"""Seconds until a test takes a rank for stuck: an interpreter imports torch on a slow machine meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What a rank tries. Pickled, so small and plain. `wrong`: the rank whose network interface is not there."""

    act: str
    rendezvous: str
    wrong: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How it ended: the kind and text of the error, what a later call raised, and seconds from the start of the act."""

    kind: str = ""
    text: str = ""
    later: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A process, its end of the pipe, and how its meetings ended, by name."""

    process: Any
    pipe: Connection
    answers: dict[str, Ended] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Two ranks that went through every meeting; `left`: exit status of one that ended before it met anyone."""

    ranks: list[Rank]
    left: int | None


def run() -> Ran:
    """A wrong interface in rank 0; each rank alone, as the other has ended before; then rank 1 dies after a sum."""
    ranks = [_start(_rank, rank) for rank in range(2)]
    gone = _start(_leave, 0)
    try:
        gone.process.join(PATIENCE)
        _all(ranks, "wrong", [Meeting(act="meet", rendezvous=_place(), wrong=0)] * 2)
        _all(ranks, "alone", [Meeting(act="meet", rendezvous=_place()) for _ in ranks])
        _all(ranks, "part", [Meeting(act="part", rendezvous=_place())] * 2)
        for rank in ranks:
            _ask(rank, None)
            rank.process.join(PATIENCE)
    finally:
        for rank in (*ranks, gone):
            rank.process.kill()
            rank.process.join()
    return Ran(ranks=ranks, left=gone.process.exitcode)


def _start(target: Any, rank: int) -> Rank:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=target, args=(rank, theirs), daemon=True)
    process.start()
    theirs.close()  # or the end of a rank that dies would never be seen
    return Rank(process=process, pipe=mine)


def _all(ranks: Sequence[Rank], name: str, tried: Sequence[Meeting]) -> None:
    """Each rank in its meeting, at the same time."""
    asked = [rank for rank, meeting in zip(ranks, tried, strict=True) if _ask(rank, meeting)]
    for rank in asked:
        _gather(rank, name)


def _ask(rank: Rank, meeting: Meeting | None) -> bool:
    """Whether the rank was there to hear it."""
    try:
        rank.pipe.send(meeting)
    except OSError:
        return False
    return True


def _gather(rank: Rank, name: str) -> None:
    try:
        if rank.pipe.poll(PATIENCE):
            rank.answers[name] = rank.pipe.recv()
    except (EOFError, OSError):  # it died, which the test looks at
        rank.process.join(PATIENCE)


def _place() -> str:
    """A free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


# -- inside a rank -----------------------------------------------------------------------------------------------------


def _leave(rank: int, pipe: Connection) -> None:
    os._exit(3)


def _rank(rank: int, pipe: Connection) -> None:
    os.environ.update({"HCCL_CONNECT_TIMEOUT": str(LIMIT), "HCCL_IF_IP": "127.0.0.1"})
    import torch

    torch.set_num_threads(1)
    while (meeting := pipe.recv()) is not None:
        pipe.send(_try(rank, meeting))


def _try(rank: int, meeting: Meeting) -> Ended:
    from pagedkv.api import World
    from pagedkv.api.errors import PagedKVError
    from pagedkv_ascend import environment
    from tests.backends.ascend.double import double

    _interface("nonet0" if rank == meeting.wrong else None)
    world = World(rank=rank, size=2, rendezvous=meeting.rendezvous)
    backend = double(world=world, note=environment.collectives_note(rank))
    began = time.monotonic()
    try:
        _ACTS[meeting.act](rank, backend)
    except PagedKVError as error:
        seconds = time.monotonic() - began
        return Ended(kind=type(error).__name__, text=str(error), later=_later(backend), seconds=seconds)
    finally:
        backend.close()
    return Ended(seconds=time.monotonic() - began)


def _interface(name: str | None) -> None:
    """Set the variable that a rank's network goes by, and gloo's own, as gloo stands in for hccl."""
    for variable in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if name is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = name


def _later(backend: AscendBackend) -> str:
    from pagedkv.api.errors import PagedKVError

    try:
        backend.memory()
    except PagedKVError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _meet(rank: int, backend: AscendBackend) -> None:
    backend.communicator((0, 1))


def _part(rank: int, backend: AscendBackend) -> None:
    """Meet, add, then rank 1 dies and rank 0 waits for it in a sum."""
    import torch

    both = backend.communicator((0, 1))
    if both.all_reduce(torch.ones(2)).tolist() != [2.0, 2.0]:
        raise RuntimeError("the ranks did not add")
    if rank == 1:
        os._exit(4)
    both.all_reduce(torch.ones(2))


_ACTS: Mapping[str, Any] = {"meet": _meet, "part": _part}
