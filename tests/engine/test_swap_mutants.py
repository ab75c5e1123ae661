"""Backends that break one law of copies each: whole engines that swap show every one of them.

The law's own cases in the kit are another matter (tests/conformance/mutants); here it is the answers that differ, or
the engine that stops. Device memory holds NaN at first, so that what never arrived cannot be taken for something.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pagedkv.api import AttentionBackend, World
from pagedkv.conformance.loopback.descriptor import LoopbackDescriptor
from pagedkv.errors import EngineDead
from tests.conformance.mutants import copies
from tests.conformance.mutants.table import MUTANTS, Base, Mutant
from tests.helpers.swap_rig import answers, run, swapping, undisturbed

Wrong = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """`spoil` breaks an instance, on whose copies `on` says when they run."""

    name: str
    on: str
    spoil: Callable[[Any], None]


BROKEN: list[Broken] = []


def broken(method: str, on: str = "late", part: str = "") -> Callable[[Wrong], Wrong]:
    """The decorated function replaces `method` of the backend or of its `part`, and gets the original first."""

    def add(wrong: Wrong) -> Wrong:
        spoil = functools.partial(_spoil, _replace(method, wrong, part))
        BROKEN.append(Broken(name=wrong.__name__, on=on, spoil=spoil))
        return wrong

    return add


def _replace(method: str, wrong: Wrong, part: str = "") -> Mutant:
    base = Base(backend="loopback", options={})
    return Mutant(name="", what=wrong.__doc__ or "", law="", cases=(), base=base, part=part, method=method, wrong=wrong)


def _spoil(mutant: Mutant, backend: Any) -> None:
    mutant.spoil(getattr(backend, mutant.part) if mutant.part else backend)


# -- the kit's own, as far as an engine can see them -------------------------------------------------------------------

for name, order in {
    "k_and_v_swapped": "late",
    "only_layer_0_is_copied": "late",
    "copied_through_half_precision": "early",
    "host_loses_a_layer": "late",
    "only_the_first_pair": "random1",
    "each_source_once": "early",
    "wait_does_nothing": "late",
}.items():
    (known,) = (one for one in MUTANTS if one.wrong is getattr(copies, name))
    BROKEN.append(Broken(name=name, on=order, spoil=functools.partial(_spoil, known)))


# -- which blocks ------------------------------------------------------------------------------------------------------


def _over_the_host(src: Any, dst: Any) -> bool:
    return src.placement != dst.placement


@broken("_run_copy")
def drops_the_last_pair(original: Any, self: Any, src: Any, dst: Any, pairs: Any) -> None:
    """Off by one: of many pairs between the pools the last stays behind."""
    original(self, src, dst, pairs[:-1] if _over_the_host(src, dst) else pairs)


@broken("_copy_pair", on="early")
def takes_the_next_block(original: Any, self: Any, src: Any, dst: Any, source: int, target: int) -> None:
    """The source's id is read as one more than it is."""
    wrong = (source + 1) % src.num_blocks if _over_the_host(src, dst) else source
    original(self, src, dst, wrong, target)


@broken("_copy_pair", on="random1")
def writes_a_neighbour(original: Any, self: Any, src: Any, dst: Any, source: int, target: int) -> None:
    """A copy to the device runs over its end, into the block behind."""
    original(self, src, dst, source, target)
    if _over_the_host(src, dst) and dst.placement == "device" and target + 1 < dst.num_blocks:
        dst._bytes[target + 1] = src._bytes[source]


@broken("_copy_pair")
def reads_from_the_target(original: Any, self: Any, src: Any, dst: Any, source: int, target: int) -> None:
    """A copy to another pool reads its sources there."""
    dst._bytes[target] = (dst if _over_the_host(src, dst) else src)._bytes[source % dst.num_blocks]


@broken("_run_copy")
def mixes_up_the_direction(original: Any, self: Any, src: Any, dst: Any, pairs: Any) -> None:
    """What should come from the host goes there."""
    if _over_the_host(src, dst) and dst.placement == "device":
        original(self, dst, src, np.ascontiguousarray(pairs[:, ::-1]))
    else:
        original(self, src, dst, pairs)


@broken("_run_copy", on="early")
def turns_the_order_of_the_targets_round(original: Any, self: Any, src: Any, dst: Any, pairs: Any) -> None:
    """Sources and targets are paired the wrong way round."""
    wrong = np.stack([pairs[:, 0], pairs[::-1, 1]], axis=1) if _over_the_host(src, dst) else pairs
    original(self, src, dst, wrong)


# -- which bytes -------------------------------------------------------------------------------------------------------


@broken("_copy_pair")
def loses_the_tail(original: Any, self: Any, src: Any, dst: Any, source: int, target: int) -> None:
    """The last token of a block stays behind."""
    kept = {index: (layer.keys[target, -1].copy(), layer.values[target, -1].copy()) for index, layer in _of(dst)}
    original(self, src, dst, source, target)
    if _over_the_host(src, dst):
        for index, layer in _of(dst):
            layer.keys[target, -1], layer.values[target, -1] = kept[index]


@broken("_copy_pair", on="random1")
def flips_one_bit(original: Any, self: Any, src: Any, dst: Any, source: int, target: int) -> None:
    """The sign of one number of a block is lost on its way out."""
    original(self, src, dst, source, target)
    if _over_the_host(src, dst) and dst.placement == "host":
        dst._bytes[target, 3] ^= 0x80


def _of(pool: Any) -> Any:
    return pool._layers.items()


# -- when --------------------------------------------------------------------------------------------------------------


def starts_before_compute_has_ended(backend: Any) -> None:
    """What is copied out is what lay there before the newest step."""

    def plan(original: Any, self: Any, pool: Any, group: int, batch: Any) -> Any:
        pool._before = pool._bytes.copy()
        return original(self, pool, group, batch)

    def copy(original: Any, self: Any, src: Any, dst: Any, source: int, target: int) -> None:
        dst._bytes[target] = (src._before if dst.placement == "host" else src._bytes)[source]

    _replace("plan", plan).spoil(backend)
    _replace("_copy_pair", copy).spoil(backend)


BROKEN.append(Broken(name="starts_before_compute_has_ended", on="early", spoil=starts_before_compute_has_ended))


@broken("_copy_pair", on="early")
def copies_stale_bytes(original: Any, self: Any, src: Any, dst: Any, source: int, target: int) -> None:
    """A source that was copied before is taken from where it was staged then."""
    staged = self.__dict__.setdefault("_staged", {})
    held = staged.setdefault((id(src), source), src._bytes[source].copy()) if _over_the_host(src, dst) else None
    dst._bytes[target] = src._bytes[source] if held is None else held


@broken("copy_blocks", on="early")
def never_begins_the_second_time(original: Any, self: Any, src: Any, dst: Any, pairs: Any, *, after: Any = None) -> Any:
    """From the second copy back on, the event of the first one is given out again."""
    first = self.__dict__.get("_first")
    if first is None or dst.placement == "host":
        first = original(self, src, dst, pairs, after=after)
        if _over_the_host(src, dst) and dst.placement == "device":
            self._first = first
    return first


def ends_too_early(way: str, backend: Any) -> None:
    """Events say that they are done when they are not, and what waits for such an event does not wait."""
    told: set[Any] = set()

    def done(original: Any, self: Any, work: Any) -> bool:
        told.add(work)
        return True

    def wait(original: Any, self: Any, event: Any) -> None:
        if event not in told:
            original(self, event)

    _replace(way, done).spoil(backend._queues)
    _replace("wait", wait).spoil(backend._queues)


BROKEN += [
    Broken(name=f"{way}_ends_too_early", on="late", spoil=functools.partial(ends_too_early, way))
    for way in ("poll", "join")
]


# -- the tests ---------------------------------------------------------------------------------------------------------


def _is_wrong(on: str) -> bool:
    """Whether answers differ where requests swap and branch and, with caching, start from what lies on the host."""
    for caching in (False, True):
        with swapping(on, enable_prefix_caching=caching) as llm:
            for _ in range(2 if caching else 1):
                if answers(run(llm)) != undisturbed("late"):
                    return True
            assert llm.metrics().blocks_fetched >= 1
    return False


@functools.cache
def _unbroken_is_right(on: str) -> bool:
    return not _is_wrong(on)


@pytest.mark.parametrize("one", BROKEN, ids=lambda one: one.name)
def test_an_engine_that_swaps_shows_what_is_broken(one: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _unbroken_is_right(one.on)
    create = LoopbackDescriptor.create

    def spoiled(self: LoopbackDescriptor, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        made = create(self, device, options, world)
        one.spoil(made)
        return made

    monkeypatch.setattr(LoopbackDescriptor, "create", spoiled)
    try:
        assert _is_wrong(one.on), "nobody would have noticed"
    except EngineDead:
        return  # it was noticed
