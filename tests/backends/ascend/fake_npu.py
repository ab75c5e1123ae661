"""A stand-in for the module torch.npu: one device with streams, events, memory pools and recordings, on paper.

    streams   every piece of `work` knows what must have ended before it: `before` asks
    memory    `empty` takes tensors of "npu:0" from a pool, which keeps what they leave until the pool itself goes
    graphs    hold operators on tensors; those of a group of tasks are the last update's. A replay that would wait for
              an event that nobody has recorded is an error, as it would never end

Source of the names and of their order: torch-npu 2.13.0, and the pages of Ascend/op-plugin on graph_task_group_begin
and graph_task_update_begin. It shows how the backend calls them, nothing of what an NPU does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

from tests.helpers.delaying import Listening

REFUSED = (
    "NPU out of memory. Tried to allocate {} bytes (NPU 0; 64.00 GiB total capacity; 59.36 GiB already allocated; "
    "59.36 GiB current active; 0 bytes free; 60.01 GiB reserved in total by PyTorch)"
)


class Stream:
    """A queue of work. `known`: what has ended once its next piece starts."""

    def __init__(self, npu: FakeNpu, name: str) -> None:
        self.npu, self.name = npu, name
        self.known: frozenset[str] = frozenset()

    def wait_stream(self, other: Stream) -> None:
        self.known |= other.known

    def wait_event(self, event: Event) -> None:
        self.known |= event.known

    def run(self, work: str) -> None:
        """Enqueue a piece of work."""
        self.npu.ran[work] = (self.name, self.known)
        self.known |= {work}


class Event:
    """A place in a stream. Its work ends with `synchronize`, or once it was asked for `polls` times."""

    polls = 2

    def __init__(self, npu: FakeNpu) -> None:
        self.npu = npu
        self.known: frozenset[str] = frozenset()

    def record(self, stream: Stream) -> None:
        self.known = stream.known

    def query(self) -> bool:
        self.npu.look()
        self.polls -= 1
        return self.polls < 0

    def synchronize(self) -> None:
        self.npu.look()
        self.polls = 0


class ExternalEvent:
    """An event that a recording waits for and resets, and that somebody else records before each replay."""

    def __init__(self, npu: FakeNpu) -> None:
        self.npu, self.recorded = npu, False
        self.known: frozenset[str] = frozenset()

    def wait(self, stream: Stream) -> None:
        self.npu.said("event.wait", stream)
        self.npu.capturing().events.append(self)

    def reset(self, stream: Stream) -> None:
        self.npu.said("event.reset", stream)

    def record(self, stream: Stream) -> None:
        self.npu.said("event.record", stream)
        self.recorded, self.known = True, stream.known


Calls = list[Callable[[], None]]


class Group:
    """A group of tasks: the operators of its last update."""

    def __init__(self) -> None:
        self.calls: Calls = []

    def run(self) -> None:
        for call in self.calls:
            call()


class Graph:
    """A recording: operators, among them groups of tasks, and the events that it waits for."""

    def __init__(self, npu: FakeNpu) -> None:
        self.npu, self.open = npu, True
        self.calls: Calls = []
        self.events: list[ExternalEvent] = []
        npu.graphs.append(self)

    def replay(self) -> None:
        self.npu.said("replay", self.npu.current)
        for event in self.events:
            assert event.recorded, "a replay waits for an event that nobody records: it would never end"
            event.recorded = False
            self.npu.current.known |= event.known
        self.npu.current.run(f"replay {len(self.npu.ran)}")
        with torch.inference_mode():
            for call in self.calls:
                call()

    def reset(self) -> None:
        self.open, self.calls = False, []


class MemPool:
    """Memory of the device apart from the rest: bytes that tensors hold, and bytes that they have left."""

    def __init__(self, npu: FakeNpu) -> None:
        self.sizes = npu.pools.setdefault(f"pool {len(npu.pools)}", {"held": 0, "left": 0})
        weakref.finalize(self, npu.end, self.sizes)


class FakeNpu:
    """What torch.npu has. `said` gathers calls, `refuse_from` is the allocation, counted from 0, that is refused."""

    def __init__(self, total: int = 64 << 30) -> None:
        self.total, self.others = total, 0
        self.told: tuple[int, int] | None = None
        self.pools: dict[str, dict[str, int]] = {"common": {"held": 0, "left": 0}}
        self.allocations, self.refuse_from = 0, 1 << 60
        self.unpinnable: RuntimeError | None = None
        self.failure: RuntimeError | None = None
        self.peak = 0
        self.ran: dict[str, tuple[str, frozenset[str]]] = {}
        self.calls: list[tuple[str, str]] = []
        self.streams = 0
        self.graphs: list[Graph] = []
        self.graph_pools: list[Any] = []
        self.recorded: Graph | None = None
        self._listening: Listening | None = None
        self._group = Group()
        self.refused_capture: RuntimeError | None = None
        self.graph_bytes = 0
        self.capture_stream: Stream | None = None
        self.current = self.compute = Stream(self, "compute")
        self._pool = self.pools["common"]

    # -- streams and events --------------------------------------------------------------------------------------------

    def Stream(self, index: int = 0) -> Stream:
        self.streams += 1
        return Stream(self, f"stream {self.streams}")

    def Event(self) -> Event:
        return Event(self)

    def ExternalEvent(self) -> ExternalEvent:
        return ExternalEvent(self)

    def current_stream(self, index: int = 0) -> Stream:
        return self.current

    def device(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, index: int = 0) -> None:
        self.look()

    def work(self, name: str) -> None:
        """Enqueue a piece of work on the current stream."""
        self.current.run(name)

    def before(self, work: str) -> frozenset[str]:
        """What must have ended before this piece of work."""
        return self.ran[work][1]

    def look(self) -> None:
        """Ask the device how it is."""
        if self.failure is not None:
            raise self.failure

    def said(self, call: str, stream: Stream) -> None:
        self.calls.append((call, stream.name))

    # -- memory --------------------------------------------------------------------------------------------------------

    def MemPool(self) -> MemPool:
        return MemPool(self)

    @contextmanager
    def use_mem_pool(self, pool: MemPool) -> Iterator[None]:
        before, self._pool = self._pool, pool.sizes
        try:
            yield
        finally:
            self._pool = before

    def empty(self, real: Callable[..., torch.Tensor], *size: Any, device: Any = None, **more: Any) -> torch.Tensor:
        """torch.empty, with "npu:0" in the host's memory and on this device's account."""
        if more.pop("pin_memory", False) and self.unpinnable is not None:
            raise self.unpinnable
        tensor = real(*size, **more)
        if not str(device).startswith("npu"):
            return tensor if device is None else tensor.to(device)
        free, nbytes, sizes = self.mem_get_info(0)[0], tensor.untyped_storage().nbytes(), self._pool
        self.allocations += 1
        if self.allocations > self.refuse_from or nbytes > free:
            raise torch.OutOfMemoryError(REFUSED.format(nbytes))
        sizes["held"] += nbytes
        sizes["left"] = max(0, sizes["left"] - nbytes)
        self.peak = max(self.peak, self.memory_allocated(0))
        weakref.finalize(tensor.untyped_storage(), self.leave, sizes, nbytes)
        return tensor

    def leave(self, sizes: dict[str, int], nbytes: int) -> None:
        """A tensor goes; its bytes stay with its pool."""
        sizes["held"] -= nbytes
        sizes["left"] += nbytes

    def end(self, sizes: dict[str, int]) -> None:
        """A pool goes: what tensors have left goes back to the driver, what others leave later does not."""
        sizes["left"] = 0

    def empty_cache(self) -> None:
        self.pools["common"]["left"] = 0

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.told or (self.total - self.others - self.memory_reserved(index), self.total)

    def memory_allocated(self, index: int) -> int:
        return sum(sizes["held"] for sizes in self.pools.values())

    def memory_reserved(self, index: int) -> int:
        return self.memory_allocated(index) + sum(sizes["left"] for sizes in self.pools.values()) + self.graph_bytes

    def max_memory_allocated(self, index: int) -> int:
        return self.peak

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak = self.memory_allocated(index)

    # -- recordings ----------------------------------------------------------------------------------------------------

    def NPUGraph(self) -> Graph:
        return Graph(self)

    def graph_pool_handle(self) -> object:
        return object()

    @contextmanager
    def graph(self, graph: Graph, pool: Any = None) -> Iterator[None]:
        """As the vendor's: a capture that is refused at its end leaves its own stream the current one."""
        self.graph_pools.append(pool)
        self.empty_cache()
        before, self.recorded = self.current, graph
        self.current = self.capture_stream = self.capture_stream or self.Stream()
        self._listening = Listening(graph.calls)
        try:
            with self._listening:
                yield
        finally:
            self.recorded = self._listening = None
            if self.refused_capture is not None:
                raise self.refused_capture
            self.current = before
        self.graph_bytes += 1 << 20

    def capturing(self) -> Graph:
        assert self.recorded is not None, "this belongs into a recording"
        return self.recorded

    def graph_task_group_begin(self, stream: Stream) -> None:
        assert stream is self.current and self._listening is not None
        self.said("group_begin", stream)
        self._group = Group()
        self._listening.calls = self._group.calls

    def graph_task_group_end(self, stream: Stream) -> Group:
        assert self._listening is not None
        self.said("group_end", stream)
        self.capturing().calls.append(self._group.run)
        self._listening.calls = self.capturing().calls
        return self._group

    def graph_task_update_begin(self, stream: Stream, group: Group) -> None:
        assert stream is self.current and self._listening is None
        self.said("update_begin", stream)
        group.calls = []
        self._listening = Listening(group.calls)
        self._listening.__enter__()

    def graph_task_update_end(self, stream: Stream) -> None:
        assert self._listening is not None
        self._listening.__exit__(None, None, None)
        self._listening = None
        self.said("update_end", stream)


def install(monkeypatch: pytest.MonkeyPatch, total: int = 64 << 30) -> FakeNpu:
    """torch.npu for this test, and "npu:0" as a device of torch.empty and torch.zeros."""
    made = FakeNpu(total)
    empty = torch.empty
    monkeypatch.setattr(torch, "npu", made, raising=False)
    monkeypatch.setattr(torch, "empty", lambda *size, **more: made.empty(empty, *size, **more))
    monkeypatch.setattr(torch, "zeros", lambda *size, **more: torch.empty(*size, **more).zero_())
    return made
