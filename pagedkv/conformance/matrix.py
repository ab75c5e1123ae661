"""The support matrix: what certified backends declare and which levels they reach, as Markdown.

python -m pagedkv.conformance.matrix docs/certificates/*.json > docs/support.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from pagedkv.api import Capabilities
from pagedkv.api.errors import ConfigError, PagedKVError
from pagedkv.conformance.certificate import LEVELS, Certificate, read_all
from pagedkv.conformance.report import counted, table
from pagedkv.plugins.probing import capabilities_from_json

HEAD = """\
# What each backend supports

Made by `make support` from the certificates in [certificates/](certificates/): each is the result of one run of the
conformance kit on the machine it names. `make certify` makes the certificates of the backends that come with this
repository anew. Nothing here is written by hand, and a backend without a certificate has no column. What a run was not
made on stands in its note, and a level that it reached so is marked with an asterisk."""

YES, NO = "yes", "-"

Row = tuple[str, ...]


def matrix(certificates: Sequence[Certificate]) -> str:
    """The page. Raises `ConfigError` for a certificate of a run that left cases out."""
    if not certificates:
        raise ConfigError("no certificates are given; make some with `pagedkv certify NAME --json FILE`")
    for made in certificates:
        if not made.complete:
            raise ConfigError(f"the certificate of {made.backend} is of a run that left cases out: run the whole kit")
    able = [capabilities_from_json(made.capabilities) for made in certificates]
    sections = {
        "Certificates": _certificates(certificates),
        "Levels": [(level, *(_verdict(made, level) for made in certificates)) for level in LEVELS],
        "Sizes and types": _sizes(able),
        "Features": _each(able, lambda can: can.features),
        "Extensions": _extensions(able),
        "Collectives": _each(able, lambda can: can.collectives),
    }
    columns = ("", *(made.backend for made in certificates))
    bodies = [f"## {name}\n\n{table(columns, rows)}" for name, rows in sections.items() if rows]
    return "\n\n".join([HEAD, *bodies, *_exclusions(certificates, able)]) + "\n"


def _verdict(made: Certificate, level: str) -> str:
    verdict = made.verdict(level)
    return f"{verdict}*" if made.note and verdict == "reached" else verdict


def _certificates(certificates: Sequence[Certificate]) -> list[Row]:
    def row(name: str, value: Callable[[Certificate], str]) -> Row:
        return (name, *(value(made) for made in certificates))

    notes = [row("note", lambda made: made.note or NO)] if any(made.note for made in certificates) else []
    return [
        *notes,
        row("distribution", lambda made: f"{made.distribution} {made.version}"),
        row("contract", lambda made: "{}.{}".format(*made.api)),
        row("result", counted),
        row("device", lambda made: made.device),
        row("machine", lambda made: f"{made.machine.get('processor')}, {made.machine.get('machine')}"),
        row("kit", lambda made: f"pagedkv {made.pagedkv}"),
        row("day", lambda made: made.date),
    ]


def _sizes(able: Sequence[Capabilities]) -> list[Row]:
    values: dict[str, Callable[[Capabilities], str]] = {
        "dtypes": lambda can: ", ".join(can.dtypes),
        "KV dtypes": lambda can: ", ".join(can.kv_dtypes),
        "block sizes": lambda can: alternatives(can.block_sizes),
        "preferred block size": lambda can: str(can.preferred_block_size),
        "head dims": lambda can: alternatives(can.head_dims),
        "query heads of a KV head": lambda can: f"at most {can.max_group}" if can.max_group else "any number",
        "kinds of attention": lambda can: ", ".join(sorted(can.kinds)),
        "placements": lambda can: ", ".join(sorted(can.placements)),
        "weight formats": lambda can: ", ".join(sorted(can.weight_formats)) or NO,
        "copies beside compute": lambda can: YES if can.async_copy else NO,
    }
    return [(name, *(value(can) for can in able)) for name, value in values.items()]


def alternatives(declared: Iterable[Any]) -> str:
    """Accepted sizes in words: sets of values, and multiples with their bounds."""
    return ", or ".join(_alternative(one) for one in declared)


def _alternative(one: Any) -> str:
    if isinstance(one, frozenset):
        return ", ".join(str(size) for size in sorted(one))
    multiple, least, most = one
    return f"{least} to {most}" + (f" in steps of {multiple}" if multiple != 1 else "")


def _each(able: Sequence[Capabilities], names: Callable[[Capabilities], Iterable[str]]) -> list[Row]:
    """One row for each name that any of them has."""
    own = [set(names(can)) for can in able]
    return [(name, *(YES if name in mine else NO for mine in own)) for name in sorted(set().union(*own))]


def _extensions(able: Sequence[Capabilities]) -> list[Row]:
    names = sorted({name for can in able for name in can.extensions})
    rows = [(name, *(_version(can, name) for can in able)) for name in names]
    graphs = tuple(can.graph for can in able)
    return [*rows, ("graphs of batches", *graphs)] if set(graphs) != {"none"} else rows


def _version(can: Capabilities, extension: str) -> str:
    return "{}.{}".format(*can.extensions[extension]) if extension in can.extensions else NO


def _exclusions(certificates: Sequence[Certificate], able: Sequence[Capabilities]) -> list[str]:
    """What a backend declares and yet excludes in combination."""
    rows = [
        (made.backend, pattern_text(pattern), reason)
        for made, can in zip(certificates, able, strict=True)
        for pattern, reason in can.exclusions
    ]
    return [f"## Combinations left out\n\n{table(('backend', 'combination', 'why'), rows)}"] if rows else []


def pattern_text(pattern: Any) -> str:
    """An exclusion's pattern in words."""
    return ", ".join(f"{name} {_pattern_value(value)}" for name, value in pattern.items())


def _pattern_value(value: Any) -> str:
    if isinstance(value, frozenset):
        return " or ".join(sorted(map(str, value)))
    return _alternative(value) if isinstance(value, tuple) else str(value)


def main(arguments: Sequence[str]) -> int:
    """Print the matrix of these files; 2 and the reason when it cannot be made."""
    try:
        click.echo(matrix(read_all([Path(name) for name in arguments])), nl=False)
    except PagedKVError as error:
        click.echo(f"error: {error}", err=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
