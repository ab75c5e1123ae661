"""The defaults that a backend inherits, and the error tree."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from pagedkv import errors
from pagedkv.api import (
    AttentionBackend,
    Batch,
    Capabilities,
    Event,
    MemoryInfo,
    Plan,
    Pool,
    PoolCost,
    PoolSpec,
    UnsupportedError,
)


class Smallest(AttentionBackend):
    """A backend with the six required methods and nothing else."""

    def __init__(self, memory: MemoryInfo | None = None) -> None:
        self._answer = memory or MemoryInfo()

    def memory(self) -> MemoryInfo:
        return self._answer

    def capabilities(self) -> Capabilities:
        raise NotImplementedError

    def pool_cost(self, spec: PoolSpec) -> PoolCost:
        raise NotImplementedError

    def alloc_pool(self, spec: PoolSpec) -> Pool:
        raise NotImplementedError

    def plan(self, pool: Pool, group: int, batch: Batch) -> Plan:
        raise NotImplementedError

    def attend(
        self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        raise NotImplementedError

    def copy_blocks(self, src: Pool, dst: Pool, pairs: Any, *, after: Event | None = None) -> Event:
        raise NotImplementedError


def test_six_methods_are_required() -> None:
    assert AttentionBackend.__abstractmethods__ == {
        "capabilities",
        "pool_cost",
        "alloc_pool",
        "plan",
        "attend",
        "copy_blocks",
    }


@pytest.mark.parametrize(
    ("memory", "fraction", "reserved", "expected"),
    [
        (MemoryInfo(total=1000, free=800), 0.9, 100, 600),  # 900 - 200 used - 100
        (MemoryInfo(total=1000, free=500, reclaimable=300), 0.9, 100, 600),
        (MemoryInfo(total=1000, free=800), None, 0, 700),
        (MemoryInfo(total=1000, free=100), 0.5, 100, 0),
        (MemoryInfo(total=None, free=800), 0.9, 0, None),
        (MemoryInfo(total=1000, free=None), 0.9, 0, None),
        (MemoryInfo(total=1000, free=800, reclaimable=None), 0.9, 0, 700),
    ],
)
def test_the_budget_formula(memory: MemoryInfo, fraction: float | None, reserved: int, expected: int | None) -> None:
    assert Smallest(memory).kv_budget(fraction, reserved) == expected


def test_work_of_a_synchronous_backend_is_done() -> None:
    backend = Smallest()
    event = backend.record()
    assert event.done()
    event.join(timeout=0)
    backend.wait(event)
    backend.synchronize()
    backend.close()
    backend.close()


def test_what_was_not_declared_is_refused_and_named() -> None:
    backend = Smallest()
    with pytest.raises(UnsupportedError, match="sinks"):
        backend.bind(None, 0, {"sinks": [1.0]})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="collectives"):
        backend.communicator([0, 1])
    assert backend.op("linear", None) is None  # type: ignore[arg-type]
    assert backend.extension("graph") is None
    assert backend.torch_device == "cpu"


def test_unsupported_keeps_every_reason() -> None:
    error = UnsupportedError(["one", "two"])
    assert error.reasons == ("one", "two")
    assert str(error) == "one; two"
    assert UnsupportedError("alone").reasons == ("alone",)


def test_the_tree_has_one_root_and_is_re_exported_whole() -> None:
    from pagedkv.api import errors as tree

    classes = {name: c for name, c in vars(tree).items() if inspect.isclass(c) and issubclass(c, Exception)}
    assert all(issubclass(c, errors.PagedKVError) for c in classes.values())
    assert set(errors.__all__) == set(classes)
    for name in classes:
        assert name in (tree.__doc__ or ""), f"{name} is missing in the drawing"


def test_errors_carry_their_numbers() -> None:
    memory = errors.OutOfDeviceMemory(requested=10, free=4)
    assert (memory.requested, memory.free) == (10, 4)
    assert "10" in str(memory) and "4" in str(memory)
    long = errors.RequestTooLong("x", needed=3, available=2)
    assert (long.needed, long.available) == (3, 2)
    assert errors.RequestInvalid("x", field="top_p").field == "top_p"
    assert errors.ContractViolation("x", law="slots").law == "slots"
    assert errors.BackendNotFound("x", name="a", known=["b"]).known == ("b",)
