"""What a backend declared, against what its descriptor offered and what the core sends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pagedkv.api import Capabilities
from pagedkv.api.records import Record, Sizes, needs

_SETS = ("dtypes", "kv_dtypes", "kinds", "features", "placements", "collectives", "weight_formats")
_LEVELS = ("none", "decode", "uniform", "any")


def undeclared(capabilities: Capabilities, record: Record, more: Iterable[str] = ()) -> list[str]:
    """The features that a record uses, and `more`, which the backend did not declare (law G1)."""
    return sorted({*needs(record), *more} - capabilities.features)


def exceeds(capabilities: Capabilities, offered: Capabilities) -> list[str]:
    """Everything that an instance declares beyond what its descriptor offered, one clause each.

    Hints (native dtypes, preferred block size) are not compared.
    """
    return [*_sets(capabilities, offered), *_sizes(capabilities, offered), *_rest(capabilities, offered)]


def _sets(mine: Capabilities, offered: Capabilities) -> Iterator[str]:
    for name in _SETS:
        more = sorted(set(getattr(mine, name)) - set(getattr(offered, name)))
        if more:
            yield f"{name} {', '.join(more)}"
    for name, version in mine.extensions.items():
        there = offered.extensions.get(name)
        if there is None or there[0] != version[0] or version > there:
            yield f"extension {name} {version}, offered {there}"


def _sizes(mine: Capabilities, offered: Capabilities) -> Iterator[str]:
    for name in ("block_sizes", "head_dims"):
        for sizes in getattr(mine, name):
            if not _within(sizes, getattr(offered, name)):
                yield f"{name} {_spell(sizes)}"


def _within(sizes: Sizes, offered: tuple[Sizes, ...]) -> bool:
    if sizes in offered:
        return True
    highest = max((max(other) if isinstance(other, frozenset) else other[2] for other in offered), default=0)
    if isinstance(sizes, frozenset):
        return all(_accepted(size, offered) for size in sizes)
    step, least, most = sizes
    first = -(-least // step) * step
    return most < first or (most <= highest and all(_accepted(size, offered) for size in range(first, most + 1, step)))


def _accepted(size: int, offered: tuple[Sizes, ...]) -> bool:
    for sizes in offered:
        if isinstance(sizes, frozenset):
            if size in sizes:
                return True
        elif sizes[1] <= size <= sizes[2] and size % sizes[0] == 0:
            return True
    return False


def _spell(sizes: Sizes) -> str:
    return ", ".join(map(str, sorted(sizes))) if isinstance(sizes, frozenset) else "{1}..{2} by {0}".format(*sizes)


def _rest(mine: Capabilities, offered: Capabilities) -> Iterator[str]:
    for name in ("max_group", "max_graphs"):
        value, most = getattr(mine, name), getattr(offered, name)
        if most is not None and (value is None or value > most):
            yield f"{name} {value}, offered {most}"
    if mine.graph != offered.graph and (
        mine.graph not in _LEVELS
        or offered.graph not in _LEVELS
        or _LEVELS.index(mine.graph) > _LEVELS.index(offered.graph)
    ):
        yield f"graph {mine.graph!r}, offered {offered.graph!r}"
    if mine.execution != offered.execution:
        yield f"execution {mine.execution!r}, offered {offered.execution!r}"
    if mine.async_copy and not offered.async_copy:
        yield "async_copy"
    patterns = [pattern for pattern, _ in mine.exclusions]
    for pattern, reason in offered.exclusions:
        if pattern not in patterns:
            yield f"a combination that was excluded ({reason})"
