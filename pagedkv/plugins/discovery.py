"""Which backends the installed distributions offer, from package metadata alone: no plugin is imported."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from pagedkv.api.errors import BackendNotFound

GROUP = "pagedkv.backends"

_log = logging.getLogger("pagedkv.plugins")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One backend name in the metadata of the installed distributions.

    `target` is the entry point's value ("module:attribute"). `conflicts` are the other distributions that claim the
    name, as "distribution version (target)".
    """

    name: str
    distribution: str
    version: str
    target: str
    conflicts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"backend {self.name!r} ({self.distribution} {self.version})"


def discover() -> list[Found]:
    """Every backend that an installed distribution offers, by name; imports none of them.

    Identical (name, target) entries count once (an editable install may be listed twice); a name that is claimed with
    different targets is one entry with `conflicts`.
    """
    claims: dict[str, list[Found]] = {}
    for found in _entries():
        same_name = claims.setdefault(found.name.lower(), [])
        if all(other.target != found.target for other in same_name):
            same_name.append(found)
    return [_merged(claims[name]) for name in sorted(claims)]


def find(name: str) -> Found:
    """The backend called `name`, upper and lower case alike. Raises `BackendNotFound` with the names there are."""
    everything = discover()
    for found in everything:
        if found.name.lower() == name.strip().lower():
            return found
    raise not_found(name, [found.name for found in everything if not found.conflicts])


def _entries() -> Iterator[Found]:
    seen = set()
    for dist in importlib.metadata.distributions():
        try:
            entries = dist.entry_points.select(group=GROUP)
            name, version = (dist.metadata["Name"], dist.version) if entries else ("", "")
        except Exception as error:  # noqa: BLE001 - one damaged distribution must not hide the others
            _log.warning("the metadata of an installed distribution cannot be read, it is left out: %r", error)
            continue
        # Python imports from the first folder on the path that has a distribution; later ones are shadowed.
        key = canonical(str(name))
        if not entries or key in seen:
            continue
        seen.add(key)
        for entry in entries:
            yield Found(name=entry.name, distribution=str(name), version=str(version), target=entry.value)


def canonical(distribution: str) -> str:
    """The name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _merged(claims: Sequence[Found]) -> Found:
    first, *others = claims
    conflicts = tuple(f"{other.distribution} {other.version} ({other.target})" for other in others)
    return Found(
        name=first.name,
        distribution=first.distribution,
        version=first.version,
        target=first.target,
        conflicts=conflicts,
    )


def conflict_text(found: Found) -> str:
    """Who claims the name, and what to do about it."""
    mine = f"{found.distribution} {found.version} ({found.target})"
    return (
        f"backend name {found.name!r} is claimed more than once: {', '.join((mine, *found.conflicts))}; "
        "uninstall all but one of these distributions (pip uninstall NAME)"
    )


def not_found(name: str, known: Sequence[str]) -> BackendNotFound:
    """The error for an unknown name: the names there are, the closest of them, and how to get one that is known."""
    wanted = name.strip().lower()
    parts = [f"no installed backend is called {name!r}"]
    if close := difflib.get_close_matches(wanted, [k.lower() for k in known], n=1):
        parts.append(f"did you mean {close[0]!r}?")
    if hint := install_hints().get(wanted):
        parts.append(f"to get it: {hint}")
    parts.append(f"installed backends: {', '.join(map(repr, known)) or 'none, so install pagedkv again'}")
    return BackendNotFound("; ".join(parts), name=name, known=known)


@functools.cache
def install_hints() -> Mapping[str, str]:
    """What to run to get a backend that is not installed, by name (`pagedkv/install_hints.toml`)."""
    return read_hints((resources.files("pagedkv") / "install_hints.toml").read_text("utf-8"))


def read_hints(text: str) -> Mapping[str, str]:
    """The table `[backends]` of a hint file, its names in lower case."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return {name.lower(): str(hint) for name, hint in tomllib.loads(text).get("backends", {}).items()}
