"""What is known of packages, libraries and variables, as data: `known.toml`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Versions of two packages that work together. "tested": by this project; "declared": by their makers.

    `strict`: two versions that are in no row do not work together, instead of not having been tried.
    """

    package: str
    versions: str
    beside: str
    fits: str
    state: Literal["tested", "declared"]
    source: str
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Packages that must not be installed together."""

    packages: tuple[str, ...]
    why: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """What to do about a library file that cannot be opened, whose name begins like this."""

    begins: str
    why: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The file. `architectures` are dotted names that torch's build answers to; `paths` are variables with a folder."""

    packages: Sequence[str]
    pairs: Sequence[Pair]
    conflicts: Sequence[Conflict]
    libraries: Sequence[Library]
    architectures: Sequence[str]
    shown: Sequence[str]
    paths: Sequence[str]

    def library(self, file: str) -> Library | None:
        """What is known of a library file; the longest beginning wins."""
        fitting = [library for library in self.libraries if file.startswith(library.begins)]
        return max(fitting, key=lambda library: len(library.begins), default=None)


@functools.cache
def known() -> Known:
    """What the package brings."""
    return read_known((resources.files("pagedkv.diagnosis") / "known.toml").read_text("utf-8"))


def read_known(text: str) -> Known:
    """The tables of a file like `known.toml`."""
    values = _toml(text)
    conflicts = [{**one, "packages": tuple(one["packages"])} for one in values.get("conflict", [])]
    variables = values.get("variables", {})
    return Known(
        packages=values.get("packages", []),
        pairs=[Pair(**one) for one in values.get("pair", [])],
        conflicts=[Conflict(**one) for one in conflicts],
        libraries=[Library(**one) for one in values.get("library", [])],
        architectures=values.get("architectures", []),
        shown=variables.get("shown", []),
        paths=variables.get("paths", []),
    )


def _toml(text: str) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)
