"""Installed versions against what is required, and against the pairs that are known to work together."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pagedkv.diagnosis.findings import Finding
from pagedkv.diagnosis.known import Known, Pair, known
from pagedkv.plugins.requirements import Unmet, installed_version, requirements, satisfies, unmet

NEEDED = ("torch", "numpy", "tokenizers", "safetensors", "huggingface-hub", "stevedore", "transformers")
"""Shown even where they are missing; the backends' own distributions come on top."""


def packages(distributions: Iterable[str]) -> dict[str, str]:
    """Package -> version, or "not installed"; those that are of interest only where they are there, only then."""
    versions = {name: installed_version(name) or "not installed" for name in (*NEEDED, *distributions)}
    others = {name: version for name in known().packages if (version := installed_version(name))}
    return {**versions, **{name: version for name, version in others.items() if name not in versions}}


def requirement_findings(distributions: Iterable[str]) -> Iterator[Finding]:
    """What pagedkv, torch and the backends require and do not find."""
    for distribution in dict.fromkeys(("pagedkv", *distributions)):
        yield from (_unmet(one) for one in unmet(distribution))
    # torch's own wheels leave out what a system brings, so that only a wrong version of it is worth a word.
    yield from (_unmet(one) for one in unmet("torch") if one.installed is not None)


def _unmet(one: Unmet) -> Finding:
    wanted = f"{one.package}{one.wanted}"
    ours = one.distribution == "pagedkv"
    return Finding(
        level="warning",
        about="packages",
        what=str(one),
        why="what needs it was made for these versions" if ours else "one of the two was installed after the other",
        command=f"pip install '{wanted}'" if ours or one.installed is None else f"pip install -U {one.distribution}",
    )


def pairs(versions: Mapping[str, str], known: Known) -> list[dict[str, Any]]:
    """What the table says of each pair of packages that is here: "tested", "declared", "unknown" or "wrong"."""
    here = {"python": platform.python_version(), **versions}
    rows = itertools.groupby(known.pairs, key=lambda pair: (pair.package, pair.beside))
    answers = (_judged(here, list(group)) for _, group in rows)
    return [answer for answer in answers if answer is not None]


def _judged(here: Mapping[str, str], rows: Sequence[Pair]) -> dict[str, Any] | None:
    package, beside = rows[0].package, rows[0].beside
    version, other = here.get(package), here.get(beside)
    if version is None or other is None or "not installed" in (version, other):
        return None
    concerned = [row for row in rows if satisfies(version, row.versions)]
    fitting = [row for row in concerned if satisfies(other, row.fits)]
    best = min(fitting, key=lambda row: row.state != "tested", default=None)
    state, source = (best.state, best.source) if best else _unlisted(here, rows)
    return {
        "package": package,
        "version": version,
        "beside": beside,
        "beside_version": other,
        "state": state,
        "source": source,
        "fits": " or ".join(row.fits for row in concerned),
        "known": " or ".join(dict.fromkeys(row.versions for row in rows)),
    }


def _unlisted(here: Mapping[str, str], rows: Sequence[Pair]) -> tuple[str, str]:
    """(state, source) of a pair in no row: one of the two may itself say that they fit."""
    for owner, other in ((rows[0].package, rows[0].beside), (rows[0].beside, rows[0].package)):
        declared = [one for one in requirements(owner) if one.name == other and one.specifier]
        if declared and all(satisfies(here[other], str(one.specifier)) for one in declared):
            return "declared", f"the metadata of the installed {owner}"
    return ("wrong" if any(row.strict for row in rows) else "unknown"), ""


def pair_findings(judged: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Pairs that are not known to work, and those that are known not to."""
    for pair in judged:
        if pair["state"] not in ("unknown", "wrong"):
            continue
        wrong = pair["state"] == "wrong"
        fits = pair["fits"].split(" or ")[0] if pair["fits"] else ""
        version = pair["version"] if fits else pair["known"]
        known_to = f"{pair['package']} {version} is known to work with {pair['beside']} {pair['fits']}".rstrip()
        yield Finding(
            level="warning" if wrong else "note",
            about="pairs",
            what=f"{pair['package']} {pair['version']} beside {pair['beside']} {pair['beside_version']}: "
            + ("they do not fit" if wrong else "nobody has tried them here"),
            why=known_to,
            command=_other_version(pair, fits),
        )


def _other_version(pair: Mapping[str, Any], fits: str) -> str:
    if pair["beside"] == "python":
        return "python3.11 -m venv .venv"
    known = pair["known"].split(" or ")[0]
    return f"pip install '{pair['beside']}{fits}'" if fits else f"pip install '{pair['package']}{known}'"


def conflict_findings(versions: Mapping[str, str], known: Known) -> Iterator[Finding]:
    """Packages that must not be installed together, and are."""
    for conflict in known.conflicts:
        if all(versions.get(name, "not installed") != "not installed" for name in conflict.packages):
            what = f"{' and '.join(conflict.packages)} are both installed"
            yield Finding(level="warning", about="packages", what=what, why=conflict.why, command=conflict.command)
