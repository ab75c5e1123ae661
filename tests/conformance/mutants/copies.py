"""Copies that lose bytes or come at the wrong time, and events that do not tell the truth."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.conformance.mutants.table import mutant

BITS = ("copy: keys and values of every layer of every group arrive", "test_copy.py::test_every_layer_and_both_halves")


def _caches(pool: Any, index: int) -> tuple[Any, Any]:
    layer = pool._layers[index]
    return layer.keys, layer.values


# -- bytes -------------------------------------------------------------------------------------------------------------


@mutant("_copy_pair", *BITS)
def k_and_v_swapped(original: Any, self: Any, src: Any, dst: Any, source: int, target: int) -> None:
    """Keys are copied to values and values to keys."""
    for index in src._layers:
        (keys, values), (other_keys, other_values) = _caches(src, index), _caches(dst, index)
        other_keys[target], other_values[target] = values[source].copy(), keys[source].copy()


@mutant("_copy_pair", *BITS)
def only_layer_0_is_copied(original: Any, self: Any, src: Any, dst: Any, source: int, target: int) -> None:
    """The other layers of a block stay behind."""
    for cache, other in zip(_caches(src, 0), _caches(dst, 0), strict=True):
        other[target] = cache[source]


@mutant("_copy_pair", *BITS)
def copied_through_half_precision(original: Any, self: Any, src: Any, dst: Any, source: int, target: int) -> None:
    """Numbers are converted to float16 and back on their way."""
    numbers = src._bytes[source].view(np.float32)
    with np.errstate(all="ignore"):
        dst._bytes[target] = numbers.astype(np.float16).astype(np.float32).view(np.uint8)


@mutant("_copy_pair", "copy: only the destinations change", "test_copy.py::test_only_destinations_change")
def copy_moves(original: Any, self: Any, src: Any, dst: Any, source: int, target: int) -> None:
    """The source is cleared once it was copied."""
    original(self, src, dst, source, target)
    src._bytes[source] = 0


@mutant("_copy_pair", "host pools: blocks come back bit for bit", "test_copy.py::test_round_trip_over_the_host")
def host_loses_a_layer(original: Any, self: Any, src: Any, dst: Any, source: int, target: int) -> None:
    """A copy to or from the host leaves out the second half of a block."""
    over_the_host = "host" in (src.placement, dst.placement)
    end = src._bytes.shape[1] // (2 if over_the_host else 1)
    dst._bytes[target, :end] = src._bytes[source, :end]


@mutant("_run_copy", "copy: many pairs in one call", "test_copy.py::test_many_pairs_in_any_order")
def only_the_first_pair(original: Any, self: Any, src: Any, dst: Any, pairs: Any) -> None:
    """The pairs behind the first are left out."""
    original(self, src, dst, pairs[:1])


@mutant("_run_copy", "copy: one source to several destinations", "test_copy.py::test_one_source_many_destinations")
def each_source_once(original: Any, self: Any, src: Any, dst: Any, pairs: Any) -> None:
    """A source that stands in several pairs is copied for one of them."""
    original(self, src, dst, pairs[np.unique(pairs[:, 0], return_index=True)[1]])


@mutant("_run_copy", "copy: copying block 0 clears a block", "test_copy.py::test_null_block_clears")
def block_0_is_not_copied(original: Any, self: Any, src: Any, dst: Any, pairs: Any) -> None:
    """Pairs from the null block are taken for padding."""
    original(self, src, dst, pairs[pairs[:, 0] > 0])


@mutant(
    "_run_copy",
    "copy between pools: bit for bit, an id may stand on both sides",
    "test_copy.py::test_between_two_pools",
)
def pools_are_mixed_up(original: Any, self: Any, src: Any, dst: Any, pairs: Any) -> None:
    """A copy to another pool reads its sources there."""
    original(self, dst, dst, pairs)


@mutant("_pairs", "copy: the array of pairs may be overwritten", "test_copy.py::test_pairs_overwritten")
def pairs_are_aliased(original: Any, self: Any, pairs: Any) -> Any:
    """The array of pairs is read when the copy runs."""
    return np.asarray(pairs).reshape(-1, 2)


# -- order -------------------------------------------------------------------------------------------------------------


@mutant(
    "copy_blocks",
    "copy order: after=event starts after the recorded",
    "test_copy.py::test_after_recorded_event",
    order="early",
)
def after_is_ignored(original: Any, self: Any, src: Any, dst: Any, pairs: Any, *, after: Any = None) -> Any:
    """A copy starts before the event that it was given."""
    return original(self, src, dst, pairs, after=None if after is None else _done())


@mutant(
    "copy_blocks",
    "copy order: after=None starts after all compute",
    "test_copy.py::test_after_compute_so_far",
    order="early",
)
def no_after_means_at_once(original: Any, self: Any, src: Any, dst: Any, pairs: Any, *, after: Any = None) -> Any:
    """A copy without `after` starts before the compute that was enqueued."""
    return original(self, src, dst, pairs, after=_done() if after is None else after)


def _done() -> Any:
    from pagedkv.api import Event

    return Event()


@mutant(
    "wait",
    "copy order: compute after wait(event) sees the copy",
    "test_copy.py::test_wait_orders_readers",
)
def wait_does_nothing(original: Any, self: Any, event: Any) -> None:
    """Later compute does not wait."""


# -- events ------------------------------------------------------------------------------------------------------------


@mutant(
    "poll",
    "events: a copy is visible to compute once its event says done",
    "test_copy.py::test_done_copy_is_visible",
    part="_queues",
)
def event_is_done_too_early(original: Any, self: Any, work: Any) -> bool:
    """Events are done from the start."""
    return True


@mutant(
    "join",
    "events: a copy is visible to compute once its event is joined",
    "test_copy.py::test_joined_copy_is_visible",
    part="_queues",
)
def join_returns_too_early(original: Any, self: Any, work: Any) -> None:
    """Joining an event does not wait for it."""


@mutant(
    "synchronize", "events: synchronize ends all work", "test_copy.py::test_synchronize_ends_everything", part="_queues"
)
def synchronize_forgets_copies(original: Any, self: Any) -> None:
    """Only compute is waited for."""
    self.finish(self.record())


@mutant("to_host", "events: to_host gives the values of all compute", "test_copy.py::test_to_host_follows_compute")
def to_host_is_done_too_early(original: Any, self: Any, tensor: Any) -> Any:
    """The array is said to be valid before it was filled."""
    return _done(), original(self, tensor)[1]
