"""Helpers for backends that compute with torch: names of dtypes, and collectives over a torch.distributed backend.

Loads torch, so `pagedkv.api` never imports it; a backend does, inside `create`.

    rank 0 ── hosts the store at World.rendezvous ──┐
    rank r ── its own connection ───────────────────┤  one prefix per communicator: "ranks/turn"
                                                    └─ the process groups exchange their addresses there

Nothing here touches torch's default process group: several engines, and whoever else uses torch.distributed, live in
one process without knowing of each other. A torch built without torch.distributed serves for all but collectives.
"""

from __future__ import annotations

import logging
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from pagedkv.api.errors import BackendUnavailable, ConfigError, ContractViolation, DeviceError
from pagedkv.api.records import World

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

_log = logging.getLogger("pagedkv.api.torch")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The contract's names of dtypes."""
DEFAULT_TIMEOUT = 300.0
"""Seconds that a rank waits for the others before it takes them for dead."""
_RETRY = 0.05
"""Seconds between two looks whether rank 0 is there."""

_stores: weakref.WeakValueDictionary[str, TCPStore] = weakref.WeakValueDictionary()
"""The stores this process hosts, by rendezvous; each ends with the last communicator that holds it."""


def communicator(
    backend: str,
    world: World,
    ranks: Sequence[int],
    *,
    timeout: float = DEFAULT_TIMEOUT,
    ordered: bool = False,
    note: str = "",
) -> OneRank | TorchCommunicator:
    """Collectives among `ranks` over the torch.distributed backend of this name; all of them call this, in one order.

    `ranks` are world ranks, in the same order on every rank: a rank's place in it is its rank within the group.
    `timeout` (seconds) bounds the meeting and every collective; a backend with a queue of its own applies it as
    torch.distributed does. `ordered`: all_reduce adds the ranks' values one by one in the group's order, in float32 for
    narrower dtypes, so that an element's bits depend on its addends alone; the library's own order may follow the
    tensor's length. Rank 0 hosts the meeting place while one of its communicators is open. `note`: what every failure
    is told with, as this rank's device and the variables that shape its network.

    Raises `ConfigError` (ranks, rendezvous) and `BackendUnavailable` (no such backend here, or ranks that never came).
    """
    group = _checked_group(world, ranks)
    if len(group) == 1:
        return OneRank()
    make = _maker(backend)
    host, port = _address(world)
    stores = [_hosted(world, host, port)] if world.rank == 0 else []
    try:
        _reach(host, port, timeout)
        stores.append(_store(host, port, timeout=timedelta(seconds=timeout)))
        made = _join(make, stores[-1], world, group, timeout)
        return TorchCommunicator(made, group, stores, ordered, _noted(f"rank {world.rank}", timeout, note))
    except RuntimeError as error:
        raise BackendUnavailable(
            f"rank {world.rank} did not meet ranks {group} at {world.rendezvous} within {timeout:g} s: start every "
            "rank with this rendezvous, and create communicators in the same order on all of them "
            f"({error}){_noted('', None, note)}"
        ) from error


class OneRank:
    """The collectives of a group of one: each gives its argument back."""

    failure: DeviceError | None = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        return tensor

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return


class TorchCommunicator:
    """The collectives of one group of ranks. The first `failure` ends it: every later call but `close` raises it."""

    def __init__(
        self, group: Any, ranks: Sequence[int], stores: Sequence[TCPStore], ordered: bool, told: str = ""
    ) -> None:
        self.failure: DeviceError | None = None
        self._group: Any = group
        self._ranks = tuple(ranks)
        self._stores = tuple(stores)
        self._ordered, self._told = ordered, told

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the group, in place."""
        if self._ordered:
            return tensor.copy_(_sum(self._gathered("all_reduce", tensor)))
        flat = tensor.contiguous()
        self._wait("all_reduce", lambda group: group.allreduce([flat]))
        return _brought_back(flat, tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Every rank's tensor, all of one shape, concatenated along `dim` in the group's order."""
        if not -tensor.dim() <= dim < tensor.dim():
            raise ContractViolation(f"all_gather along dim {dim} of {list(tensor.shape)}", law="collectives")
        return torch.cat(self._gathered("all_gather", tensor), dim)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """The tensor of the group's rank `src`, in place."""
        if not 0 <= src < len(self._ranks):
            raise ContractViolation(f"broadcast from {src}, the group has 0..{len(self._ranks) - 1}", law="collectives")
        options = dist.BroadcastOptions()
        options.rootRank = src
        flat = tensor.contiguous()
        self._wait("broadcast", lambda group: group.broadcast([flat], options))
        return _brought_back(flat, tensor)

    def barrier(self) -> None:
        """Return once every rank has come here."""
        self._wait("barrier", lambda group: group.barrier())

    def close(self) -> None:
        """Give sockets and threads back. Idempotent."""
        group, self._group = self._group, None
        self._stores = ()
        if group is None:
            return
        try:
            group.shutdown() if self.failure is None else group.abort()
        except RuntimeError as error:  # a backend without the call ends with the object
            _log.info("closing the communicator among ranks %s: %s", list(self._ranks), error)

    def _gathered(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        flat = tensor.contiguous()
        parts = list(flat.new_empty((len(self._ranks), *flat.shape)).unbind(0))
        self._wait(name, lambda group: group.allgather([parts], [flat]))
        return parts

    def _wait(self, name: str, start: Callable[[Any], Any]) -> None:
        if self._group is None:
            raise ContractViolation("this communicator was closed; create a new one", law="use after close")
        if self.failure is not None:
            raise DeviceError(str(self.failure))
        try:
            start(self._group).wait()
        except RuntimeError as error:
            self.failure = DeviceError(
                f"{name} among ranks {list(self._ranks)} failed, a rank died or fell behind ({error}): "
                f"close this instance, see what the other ranks logged, and start all of them again{self._told}"
            )
            raise self.failure from error


def _noted(who: str, timeout: float | None, note: str) -> str:
    """What stands behind a failure: whose it is, how long it waited, and the backend's own note."""
    limit = "" if timeout is None else f"time limit {timeout:g} s"
    said = ", ".join(part for part in (who, limit, note) if part)
    return f"; {said}" if said else ""


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in order; the first part may be overwritten."""
    first = parts[0]
    total = first.float() if first.dtype in (torch.bfloat16, torch.float16) else first
    for part in parts[1:]:
        total += part
    return total


def _brought_back(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if flat is tensor else tensor.copy_(flat)


# -- where ranks meet --------------------------------------------------------------------------------------------------


def _checked_group(world: World, ranks: Sequence[int]) -> list[int]:
    group = [int(rank) for rank in ranks]
    if len(set(group)) != len(group) or not set(group) <= set(range(world.size)) or world.rank not in group:
        raise ConfigError(
            f"a group is distinct ranks of 0..{world.size - 1}, this rank {world.rank} among them; got {group}"
        )
    return group


def _address(world: World) -> tuple[str, int]:
    """(host, port) of the rendezvous."""
    advice = "set World.rendezvous to tcp://HOST:PORT, a free port of rank 0's machine, the same for every rank"
    if not world.rendezvous:
        raise ConfigError(f"{world.size} ranks need a place to meet: {advice}")
    try:
        parts = urlsplit(world.rendezvous)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"rendezvous {world.rendezvous!r}: {error}; {advice}") from error
    if parts.scheme != "tcp" or not host or not port:
        raise ConfigError(f"rendezvous {world.rendezvous!r} is no such address: {advice}")
    return host, port


def _hosted(world: World, host: str, port: int) -> TCPStore:
    """The store of this rendezvous, hosted here. It listens at this host's address only: anyone may write to it."""
    found = _stores.get(world.rendezvous)
    if found is None:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"rank 0 cannot listen at {world.rendezvous} ({error}): give an address of this machine and a free port"
            ) from error
        found = _store(host, port, is_master=True, master_listen_fd=listener.detach())
        _stores[world.rendezvous] = found
    return found


def _reach(host: str, port: int, timeout: float) -> None:
    """Return once somebody listens there; `RuntimeError` after so many seconds, which a store's own wait exceeds."""
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), max(_RETRY, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise RuntimeError(f"rank 0 does not listen there: {error}") from error
        time.sleep(_RETRY)


def _store(host: str, port: int, **more: Any) -> TCPStore:
    return dist.TCPStore(host, port, wait_for_workers=False, **more)  # type: ignore[attr-defined]


# -- process groups ----------------------------------------------------------------------------------------------------

Maker = Callable[["Store", int, list[int], str, timedelta], Any]
"""(store, rank within the group, ranks, name, timeout) -> process group."""


def _join(make: Maker, store: TCPStore, world: World, group: list[int], timeout: float) -> Any:
    """This rank's process group. The store counts its turns, so that equal groups made one after another differ."""
    name = "-".join(map(str, group))
    turn = store.add(f"{name}/turns of {world.rank}", 1)
    name = f"{name}/{turn}"
    private = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    return make(private, group.index(world.rank), group, name, timedelta(seconds=timeout))


def _maker(backend: str) -> Maker:
    """How to make a process group of this backend: torch's own class, or what a package registered under the name."""
    if not dist.is_available():
        raise BackendUnavailable("this torch is built without torch.distributed: install one that has it")
    own = [name for name in dir(dist) if name.lower() == f"processgroup{backend.lower()}"]
    if own:
        cls = getattr(dist, own[0])
        return lambda store, rank, group, name, timeout: cls(store, rank, len(group), timeout=timeout)
    plugin = dist.Backend._plugins.get(backend.upper())
    if plugin is None:
        raise BackendUnavailable(
            f"torch.distributed has no backend {backend!r}: install a torch that is built with it, or import the "
            "package that registers it"
        )
    if not plugin.extended_api:
        return lambda store, rank, group, name, timeout: plugin.creator_fn(store, rank, len(group), timeout)
    return lambda *arguments: plugin.creator_fn(_options(*arguments), None)


def _options(store: Store, rank: int, group: list[int], name: str, timeout: timedelta) -> Any:
    """What a backend registered with `extended_api` is made from."""
    options = dist.distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
    options.store = store
    options.group_rank = rank
    options.group_size = len(group)
    options.timeout = timeout
    options.group_id = name
    options.global_ranks_in_group = group
    return options
