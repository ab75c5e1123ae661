"""Environment variables: pagedkv's own, misspelt ones, and those by which toolkits are found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pagedkv.diagnosis.findings import Finding
from pagedkv.diagnosis.known import Known
from pagedkv.environment import ENVIRONMENT, PREFIX, SECRETS, meant

UNKNOWN = "set, but pagedkv does not read it"
SECRET = "set"


def variables(environ: Mapping[str, str], known: Known) -> dict[str, str]:
    """Variable -> value, of those that are set. The value of a `PAGEDKV_*` that nobody reads may be a secret."""
    own = {name: _shown(name, value) for name, value in environ.items() if name.startswith(PREFIX)}
    others = {name: environ[name] for name in (*known.shown, *known.paths) if name in environ}
    return {**dict(sorted(own.items())), **others}


def _shown(name: str, value: str) -> str:
    if name in SECRETS:
        return SECRET
    return value if name in ENVIRONMENT else UNKNOWN


def variable_findings(facts: Mapping[str, str], known: Known) -> Iterator[Finding]:
    """Variables without effect, those that cost something, and folders that are not there."""
    for name, value in facts.items():
        if value == UNKNOWN and name not in ENVIRONMENT:
            yield _misspelt(name)
        if name in known.paths and value and not Path(value).exists():
            yield Finding(
                level="warning",
                about="environment",
                what=f"{name} names a folder that does not exist: {value}",
                why="what looks there finds nothing, and says so in words of its own",
                command=f"unset {name}",
            )
    if facts.get("PAGEDKV_CHECK", "").strip() not in ("", "0"):
        yield Finding(
            level="note",
            about="environment",
            what="PAGEDKV_CHECK is set",
            why="every call of the backend is checked against the contract, which makes it slower",
            command="unset PAGEDKV_CHECK",
        )


def _misspelt(name: str) -> Finding:
    close = meant(name)
    return Finding(
        level="warning",
        about="environment",
        what=f"{name} has no effect: pagedkv does not read it",
        why=f"it reads {', '.join(ENVIRONMENT)}" + (f"; {close} may be meant" if close else ""),
        command=f'export {close}="${name}"; unset {name}' if close else f"unset {name}",
    )
