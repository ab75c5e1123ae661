"""What a checked instance hands out in place of the backend's own: pools, plans, events, collectives, ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagedkv.api import Communicator, Event, LayerSpec, Plan, Pool, PoolSpec
from pagedkv.api.extensions import GraphShape
from pagedkv.checking import tensors
from pagedkv.checking.batch import Reach
from pagedkv.checking.guard import Guard
from pagedkv.checking.order import Blocks, Moment, Order


class CheckedPool(Pool):
    """A pool of this instance, what was bound to its layers, and how many plans each group has had."""

    def __init__(self, inner: Pool, guard: Guard) -> None:
        self.spec: PoolSpec = inner.spec
        self.inner, self.guard = inner, guard
        self.blocks = Blocks(inner.spec.num_blocks)
        self.plans = [0] * len(inner.spec.groups)
        self.bound: dict[int, set[str]] = {}
        self.layers: dict[int, tuple[int, LayerSpec]] = {
            layer.index: (at, layer) for at, group in enumerate(inner.spec.groups) for layer in group.layers
        }
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it, or the backend, was closed."""
        return self._closed or self.guard.closed

    def close(self) -> None:
        if self.closed:
            return
        with self.guard.turn("close of a pool"):
            self._closed = True
            close_twice(self.inner, "a pool", self.guard)


class CheckedPlan(Plan):
    """A plan and the batch behind it. `shape` is a static plan's; its `reach` is None until the first refresh."""

    def __init__(
        self, inner: Any, pool: CheckedPool, group: int, reach: Reach | None, shape: GraphShape | None = None
    ) -> None:
        self.inner, self.pool, self.group, self.reach, self.shape = inner, pool, group, reach, shape
        self.kept: list[Any] = []
        if shape is None:
            pool.plans[group] += 1
        self._number = pool.plans[group]

    def check_alive(self) -> None:
        """Refuse a plan whose pool is closed, or that too many others have followed."""
        guard = self.pool.guard
        if self.pool.closed:
            raise guard.core("use after close", "a plan was used after its pool was closed")
        later, most = self.pool.plans[self.group] - self._number, self.pool.spec.limits.plans
        if self.shape is None and later >= most:
            raise guard.core("plans alive", f"{later} later plans of group {self.group} were made, limits.plans={most}")

    def ready(self) -> Reach:
        """What it reads and writes; refuses a static plan before its first refresh."""
        if self.reach is None:
            raise self.pool.guard.core("static plan", "a static plan was used before its first refresh")
        return self.reach


class CheckedEvent(Event):
    """An event of this instance: what it comes after, and what to look at once it has come."""

    def __init__(
        self, inner: Event, guard: Guard, order: Order, moment: Moment, at_end: Callable[[], None] | None = None
    ) -> None:
        self.inner, self.guard, self.moment = inner, guard, moment
        self._order, self._at_end = order, at_end
        self._ended = False

    def done(self) -> bool:
        # No turn: any thread may ask at any time.
        answer = self.guard.ask("done() of an event", self.inner.done, pure=True)
        if not isinstance(answer, bool):
            raise self.guard.backend("events", f"done() returned {answer!r}")
        if self._ended and not answer:
            raise self.guard.backend("events", "done() returned False after the event had ended")
        if answer:
            self._end()
        return answer

    def join(self, timeout: float | None = None) -> None:
        self.guard.not_in_capture("join() of an event")
        self.guard.ask("join() of an event", self.inner.join, timeout, pure=True)
        if timeout is None:
            self._end()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._order.end(self.moment)
        if self._at_end is not None:
            self._at_end()


class CheckedCommunicator:
    """Collectives of `size` ranks, their results' forms compared with what follows from the argument."""

    def __init__(self, inner: Communicator, size: int, guard: Guard) -> None:
        self._inner, self._size, self._guard = inner, size, guard

    def all_reduce(self, tensor: Any) -> Any:
        return self._same("all_reduce", self._inner.all_reduce, tensor)

    def broadcast(self, tensor: Any, src: int = 0) -> Any:
        return self._same("broadcast", self._inner.broadcast, tensor, src)

    def all_gather(self, tensor: Any, dim: int = -1) -> Any:
        shape = [int(size) for size in tensor.shape]
        shape[dim] *= self._size
        return self._ask("all_gather", self._inner.all_gather, tensor, dim, shape=shape)

    def barrier(self) -> None:
        with self._guard.turn("barrier"):
            self._guard.ask("barrier", self._inner.barrier)

    def _same(self, call: str, method: Callable[..., Any], tensor: Any, *args: Any) -> Any:
        return self._ask(call, method, tensor, *args, shape=[int(size) for size in tensor.shape])

    def _ask(self, call: str, method: Callable[..., Any], tensor: Any, *args: Any, shape: Sequence[int]) -> Any:
        wanted = f"{tensors.dtype_name(tensor)} {list(shape)}"
        with self._guard.turn(call):
            result = self._guard.ask(call, method, tensor, *args)
            if tensors.form(result) != wanted:
                raise self._guard.backend("collectives", f"{call} gave {tensors.form(result)}, must give {wanted}")
            return result


class CheckedOp:
    """An op of the backend: called with the backend's own plans in place of ours, otherwise as it is."""

    def __init__(self, inner: Callable[..., Any], name: str, guard: Guard) -> None:
        self._inner, self._guard = inner, guard
        self._call = f"op {name!r}"

    def __call__(self, *args: Any, **names: Any) -> Any:
        with self._guard.turn(self._call):
            own = {name: self._own(value) for name, value in names.items()}
            return self._guard.ask(self._call, self._inner, *map(self._own, args), **own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _own(self, value: Any) -> Any:
        if not isinstance(value, CheckedPlan):
            return value
        if value.pool.guard is not self._guard:
            raise self._guard.core("other instance", f"{self._call} got a plan of another instance")
        value.check_alive()
        return value.inner


def close_twice(inner: Any, what: str, guard: Guard) -> None:
    """Close for good, and once more: `close` is idempotent."""
    guard.ask(f"close of {what}", inner.close, pure=True)
    try:
        inner.close()
    except Exception as error:
        raise guard.backend("close", f"the second close of {what} raised {error!r}") from error
