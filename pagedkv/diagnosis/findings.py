"""What a person should know: how bad it is, what it is, why, and the command that mends it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["broken", "warning", "note"]
LEVELS: tuple[Level, ...] = ("broken", "warning", "note")

Verdict = Literal["fine", "warnings", "broken"]
EXIT_CODES: Mapping[Verdict, int] = {"fine": 0, "warnings": 1, "broken": 2}

_WORDS = r"(?:'[^']*'|[^\s;,()`:'\"]|:(?=//))+"
_COMMAND = re.compile(
    rf"(?:(?:sudo )?(?:pip|apt-get) (?:un)?install|docker run|export(?= [A-Z_]+=)|unset(?= [A-Z_]+\b)|source(?= [/~.]))"
    rf"(?: (?!or |and |then |in |instead)(?!or$|and$|then$|in$){_WORDS})+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing found. "broken": nothing can be used, or not what was asked for. A note changes no exit code.

    `about` is the topic, a key of the report. `command` mends it; only a note may have none.
    """

    level: Level
    about: str
    what: str
    why: str
    command: str = ""

    def record(self) -> dict[str, str]:
        """The finding as JSON values."""
        return asdict(self)


def verdict(findings: Iterable[Finding]) -> Verdict:
    """The worst of them in one word."""
    levels = {finding.level for finding in findings}
    if "broken" in levels:
        return "broken"
    return "warnings" if "warning" in levels else "fine"


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Broken before warnings before notes; the order within a level stays."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def command_in(text: str) -> str:
    """The first command that a sentence holds, between backticks or known by its first words; empty without one."""
    if quoted := re.search(r"`([^`]+)`", text):
        return quoted[1]
    found = _COMMAND.search(text)
    return found[0].rstrip(".") if found else ""
