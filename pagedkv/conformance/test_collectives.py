"""Two ranks, each in a process of its own, against numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pagedkv.conformance.kit import Kit
from pagedkv.conformance.rig import TORCH
from pagedkv.conformance.subject import Subject
from pagedkv.conformance.workers import SHAPES, SIZE, Results, given, run_pair

pytestmark = [
    pytest.mark.level("collectives"),
    pytest.mark.applies.with_args(lambda can: bool(can.collectives)),
]


@pytest.fixture(scope="module")
def pair(subject: Subject) -> Iterator[tuple[Results, Results]]:
    """The results of both ranks."""
    answers = run_pair(subject)
    if any(answer.unavailable for answer in answers):
        pytest.skip(f"this machine cannot run two ranks: {'; '.join(a.failure for a in answers if a.failure)}")
    for rank, answer in enumerate(answers):
        if answer.failure:
            pytest.fail(f"rank {rank} failed: {answer.failure}", pytrace=False)
    yield answers[0].results, answers[1].results


def _has(name: str) -> pytest.MarkDecorator:
    """The mark of a case that applies where this collective is declared."""
    return pytest.mark.applies.with_args(lambda can: name in can.collectives)


def _arrays(shape: str, dtype: str) -> list[Any]:
    """What each rank brings."""
    return [given(rank, shape, dtype).double().numpy() for rank in range(SIZE)]


def _dtypes(kit: Kit) -> list[str]:
    return [dtype for dtype in kit.can.dtypes if dtype in TORCH]


def _check(got: Any, wanted: Any, what: str) -> None:
    assert got.shape == wanted.shape, f"{what} has shape {got.shape}, expected {wanted.shape}"
    assert np.array_equal(got, wanted), f"{what} differs from the numbers expected by {np.abs(got - wanted).max():g}"


@pytest.mark.law("collectives: a worker loads exactly the backend that its parent chose (U81)")
def test_same_backend(subject: Subject, pair: tuple[Results, Results]) -> None:
    mine = subject.selected.identity
    for rank, results in enumerate(pair):
        assert results["identity"] == (mine.name, mine.distribution, mine.version), f"rank {rank} loaded another one"


@pytest.mark.law("collectives: a worker with another version than its parent's is refused, naming both (U81)")
def test_other_version(subject: Subject, pair: tuple[Results, Results]) -> None:
    for results in pair:
        refusal = results["refusal"]
        assert refusal.startswith("BackendLoadError"), f"the worker accepts another version: {refusal!r}"
        assert subject.selected.version in refusal and "0.0.0.dev999" in refusal, f"it names one version: {refusal}"


@pytest.mark.law("collectives: all_reduce gives every rank the sum")
@_has("all_reduce")
@pytest.mark.parametrize("shape", list(SHAPES))
def test_all_reduce(kit: Kit, pair: tuple[Results, Results], shape: str) -> None:
    for dtype in _dtypes(kit):
        wanted = np.sum(_arrays(shape, dtype), axis=0)
        for rank, results in enumerate(pair):
            _check(results[f"all_reduce/{dtype}/{shape}"], wanted, f"all_reduce of {dtype} on rank {rank}")


@pytest.mark.law("collectives: a result is used by the compute enqueued after it")
@_has("all_reduce")
def test_in_order(kit: Kit, pair: tuple[Results, Results]) -> None:
    wanted = 2 * SIZE * np.sum(_arrays("small", kit.can.dtypes[0]), axis=0)
    for results in pair:
        _check(results["all_reduce/twice"], wanted, "all_reduce of twice an all_reduce")


@pytest.mark.law("collectives: communicators of the same ranks do not mix up their calls")
@_has("all_reduce")
def test_two_communicators(kit: Kit, pair: tuple[Results, Results]) -> None:
    for results in pair:
        for got, shape in zip(results["all_reduce/two communicators"], ("small", "deep"), strict=True):
            _check(got, np.sum(_arrays(shape, kit.can.dtypes[0]), axis=0), "all_reduce beside another communicator's")


@pytest.mark.law("collectives: in a group of one each collective gives its argument")
@_has("all_reduce")
def test_group_of_one(kit: Kit, pair: tuple[Results, Results]) -> None:
    for results, small in zip(pair, _arrays("small", kit.can.dtypes[0]), strict=True):
        _check(results["all_reduce/alone"], small, "all_reduce in a group of one")


@pytest.mark.law("collectives: all_gather concatenates the ranks' tensors along dim, in the group's order")
@_has("all_gather")
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_all_gather(kit: Kit, pair: tuple[Results, Results], dim: int) -> None:
    for dtype in _dtypes(kit):
        wanted = np.concatenate(_arrays("deep", dtype), axis=dim)
        for rank, results in enumerate(pair):
            _check(results[f"all_gather/{dtype}/{dim}"], wanted, f"all_gather of {dtype} on rank {rank}")


@pytest.mark.law("collectives: all_gather in a group of one gives its argument")
@_has("all_gather")
def test_gather_alone(kit: Kit, pair: tuple[Results, Results]) -> None:
    for results, deep in zip(pair, _arrays("deep", kit.can.dtypes[0]), strict=True):
        _check(results["all_gather/alone"], deep, "all_gather in a group of one")


@pytest.mark.law("collectives: broadcast gives every rank the tensor of src")
@_has("broadcast")
@pytest.mark.parametrize("src", range(SIZE))
def test_broadcast(kit: Kit, pair: tuple[Results, Results], src: int) -> None:
    for dtype in _dtypes(kit):
        for rank, results in enumerate(pair):
            wanted = _arrays("small", dtype)[src]
            _check(results[f"broadcast/{dtype}/{src}"], wanted, f"broadcast of {dtype} on rank {rank}")


@pytest.mark.law("collectives: what comes after a barrier comes after every rank's work before it")
@_has("barrier")
def test_barrier(pair: tuple[Results, Results]) -> None:
    assert all(results["barrier/seen"] for results in pair), "a rank passed the barrier before the other had come"
