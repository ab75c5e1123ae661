"""A certificate for people: the rows of its tables, and the whole as Markdown for an issue or a README."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from pagedkv.conformance.certificate import LEVELS, Case, Certificate, worst

LEVEL_COLUMNS = ("level", "verdict", "cases", "what it says")
LAW_COLUMNS = ("level", "law", "cases", "worst error", "verdict")
FIGURE_COLUMNS = ("section", "figure", "value")

_SELECTABLE = re.compile(r"[\w:+\-.\[\]\\/]+")
"""What pytest's -k reads as one word; a case's parameters may hold more."""

_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_|<>[]"})


def title(made: Certificate) -> str:
    """Backend and result in one line."""
    return f"{made.backend} ({made.distribution} {made.version}): {headline(made)}"


def headline(made: Certificate) -> str:
    """The result, how many cases it rests on, and the note."""
    return counted(made) + (f", {made.note}" if made.note else "")


def counted(made: Certificate) -> str:
    """The result, and how many cases it rests on."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes(made.cases).items() if count)
    partial = "" if made.complete else "; cases were left out, so no level is reached"
    return f"{made.result} ({counts or 'no case was run'}{partial})"


def outcomes(cases: Iterable[Case]) -> dict[str, int]:
    """How many passed, failed and were skipped."""
    found = [case.outcome for case in cases]
    return {outcome: found.count(outcome) for outcome in ("passed", "failed", "skipped")}


def identity(made: Certificate) -> list[tuple[str, str]]:
    """What was tested, where and when."""
    machine = made.machine
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "numpy", "torch") if name in machine)
    rows = [
        ("device", made.device),
        ("contract", "{}.{}".format(*made.api)),
        ("kit", f"pagedkv {made.pagedkv}"),
        ("options", ", ".join(f"{name}={value}" for name, value in made.options.items()) or "none"),
        ("machine", f"{machine.get('processor', '?')}, {machine.get('system', '?')} {machine.get('machine', '?')}"),
        ("versions", versions or "?"),
        ("day", made.date),
        *([("note", made.note)] if made.note else []),
    ]
    return rows + ([("checked", "yes: every call went through the law checker")] if machine.get("checked") else [])


def level_rows(made: Certificate) -> list[tuple[str, str, str, str]]:
    """One row a level."""
    cases = {level: sum(case.level == level for case in made.cases) for level in LEVELS}
    return [(level, verdict, str(cases[level]), LEVELS[level]) for level, verdict in made.levels().items()]


def law_rows(made: Certificate) -> list[tuple[str, str, str, str, str]]:
    """One row a law; the worst error is the one nearest to its tolerance."""
    return [
        (cases[0].level, law, str(len(cases)), _worst_error(cases), _law_verdict(cases))
        for law, cases in made.laws().items()
    ]


def _worst_error(cases: Sequence[Case]) -> str:
    found = worst(cases)
    return "" if found is None else f"{found[0]:.1e} of {found[1]:.0e}"


def _law_verdict(cases: Sequence[Case]) -> str:
    counts = outcomes(cases)
    bad = [f"{counts[outcome]} {outcome}" for outcome in ("failed", "skipped") if counts[outcome]]
    return ", ".join(bad) or "passed"


def figure_rows(made: Certificate) -> list[tuple[str, str, str]]:
    """One row a figure: what planning, copying, attention, loading cost here, and what else a section measured."""
    return [(section, name, figure(value)) for section, name, value in made.figures()]


def figure(value: Any) -> str:
    """A figure with four digits; several of them by name."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {figure(one)}" for name, one in value.items())
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e4 else _whole(value)


def _whole(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def bad_cases(made: Certificate, outcome: str) -> list[Case]:
    """The cases that failed, or were skipped."""
    return [case for case in made.cases if case.outcome == outcome]


def selection(case: Case) -> str:
    """The expression for `-k` that runs this case: alone, unless its parameters hold what -k cannot read."""
    return case.name if _SELECTABLE.fullmatch(case.name) else case.name.partition("[")[0]


# -- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(made: Certificate) -> str:
    """The whole certificate: identity, levels, what failed, laws, figures."""
    parts = [
        f"# Certificate: {_text(made.backend)} ({_text(made.distribution)} {_text(made.version)})",
        f"**{_text(headline(made))}**",
        table(("", ""), identity(made)),
        "## Levels",
        table(LEVEL_COLUMNS, level_rows(made)),
        *_failures(made),
        *_under_declared(made),
        "## Laws",
        table(LAW_COLUMNS, law_rows(made)),
        *_figures(made),
    ]
    return "\n\n".join(parts) + "\n"


def _failures(made: Certificate) -> list[str]:
    found = [*bad_cases(made, "failed"), *bad_cases(made, "skipped")]
    if not found:
        return []
    lines = (f"- {case.outcome}, {_text(case.law)}: {_text(case.message)} ({_text(case.id)})" for case in found)
    return ["## Failed and skipped cases", "\n".join(lines)]


def _under_declared(made: Certificate) -> list[str]:
    found = made.under_declared()
    return [f"Works although it is not declared: {_text(', '.join(found))}."] if found else []


def _figures(made: Certificate) -> list[str]:
    rows = figure_rows(made)
    return (
        ["## Figures", "Measured once, on a machine that may have been busy.", table(FIGURE_COLUMNS, rows)]
        if rows
        else []
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a row of dashes without a header's words is still one."""
    lines = [columns, ["---"] * len(columns), *([_text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(words: str) -> str:
    """Words that Markdown shows as they are, on one line."""
    return " ".join(words.split()).translate(_MARKDOWN)
