"""What a run of the kit found: cases, laws and levels, as a record that goes to JSON and back."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pagedkv.api.errors import ConfigError

FORMAT = 1

Outcome = Literal["passed", "failed", "skipped"]
Verdict = Literal["reached", "not reached", "not declared", "coming"]
Result = Literal["passed", "failed", "partial"]

LEVELS: Mapping[str, str] = {
    "core": "loads, declares, plans, appends and attends by every law",
    "copy": "blocks are copied bit for bit, in the promised order",
    "graph": "a recorded step replays like the eager one",
    "canonical_kv": "blocks as bytes that every backend reads",
    "lse": "the log of each softmax denominator",
    "collectives": "two ranks reduce, gather and broadcast",
    "engine": "a whole model generates the expected tokens",
    "quantized_kv": "a quantized cache: codes, scales, and scales with their blocks",
    "mla": "latent attention",
}
"""Level -> what it says. A level is reached only if it has cases, all passed, and none was skipped."""

COMING = ("mla",)
"""Levels whose cases are not written yet."""

UNDER_DECLARED = "under_declared"
"""The figure of a case that names features which work although they are not declared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case. `error` is the worst absolute error against the float64 oracle, `figures` what it measured."""

    id: str
    level: str
    law: str
    outcome: Outcome
    seconds: float
    error: float | None = None
    tolerance: float | None = None
    message: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def section(self) -> str:
        """The section it belongs to."""
        return section_of(self.id)

    @property
    def name(self) -> str:
        """Its name in the section, parameters included."""
        return self.id.partition("::")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result of one run. `declared` are the levels that the backend's capabilities call for.

    `complete`: no case was left out by the caller's choice (`-k` and the like). `machine` and `capabilities` hold
    plain JSON values. `date` is the day in UTC. `coming` are the levels for which that kit had no cases yet. `note`
    says what the run was not made on, and what in its place: the verdicts are those of what was run.
    """

    backend: str
    distribution: str
    version: str
    api: tuple[int, int]
    pagedkv: str
    device: str
    options: Mapping[str, Any]
    machine: Mapping[str, Any]
    date: str
    capabilities: Mapping[str, Any]
    declared: tuple[str, ...]
    complete: bool
    cases: tuple[Case, ...]
    coming: tuple[str, ...] = COMING
    note: str = ""
    format: int = FORMAT

    def verdict(self, level: str) -> Verdict:
        """Whether a level is reached."""
        if level in self.coming:
            return "coming"
        if level not in self.declared:
            return "not declared"
        mine = [case for case in self.cases if case.level == level]
        return "reached" if self.complete and mine and all(c.outcome == "passed" for c in mine) else "not reached"

    def levels(self) -> dict[str, Verdict]:
        """Every level with its verdict."""
        return {level: self.verdict(level) for level in LEVELS}

    def laws(self) -> dict[str, tuple[Case, ...]]:
        """Law -> its cases, in the order of the run."""
        found: dict[str, list[Case]] = {}
        for case in self.cases:
            found.setdefault(case.law, []).append(case)
        return {law: tuple(cases) for law, cases in found.items()}

    @property
    def passed(self) -> bool:
        """Whether every case that applies was run and passed."""
        return self.complete and bool(self.cases) and all(case.outcome == "passed" for case in self.cases)

    @property
    def result(self) -> Result:
        """The run in one word: "passed"; "partial" if cases were left out and none failed; else "failed"."""
        if self.passed:
            return "passed"
        return "failed" if self.complete or any(case.outcome == "failed" for case in self.cases) else "partial"

    def under_declared(self) -> tuple[str, ...]:
        """Features that work although they are not declared, sorted."""
        return tuple(sorted({name for case in self.cases for name in case.figures.get(UNDER_DECLARED, ())}))

    def figures(self) -> list[tuple[str, str, Any]]:
        """(section, name, value) of what was measured; a name that several cases of a section use has its case's."""
        found = [
            (case, name, value) for case in self.cases for name, value in case.figures.items() if name != UNDER_DECLARED
        ]
        uses = Counter((case.section, name) for case, name, _ in found)
        return [
            (case.section, name if uses[case.section, name] == 1 else f"{name} of {case.name}", value)
            for case, name, value in found
        ]

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The certificate as JSON, one case a line, verdicts included for readers that do not compute them."""
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "cases"}
        head = {**kept, "levels": self.levels(), "passed": self.passed}
        lines = [f"{_dump(name)}: {_dump(value)}" for name, value in head.items()]
        return "{\n" + ",\n".join([*lines, f'"laws": [\n{_laws_to_json(self.cases)}\n]']) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """The record that `to_json` wrote; what a later version added is ignored.

        Raises `ConfigError` for what is no certificate, has another format, or contradicts itself.
        """
        values = _object(text)
        try:
            made = _made(cls, values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _wrong(f"a field is missing or has a wrong value ({type(error).__name__}: {error})") from error
        _check(made, values)
        return made


def _laws_to_json(cases: Iterable[Case]) -> str:
    """Runs of cases of one law, in order, so that its words stand there once."""
    groups = itertools.groupby(cases, key=lambda case: (case.level, case.law))
    return ",\n".join(
        f' {{"level": {_dump(level)}, "law": {_dump(law)}, "cases": [\n{_cases_to_json(mine)}\n ]}}'
        for (level, law), mine in groups
    )


def _cases_to_json(cases: Iterable[Case]) -> str:
    return ",\n".join(f"  {_dump(_without_defaults(case))}" for case in cases)


def _without_defaults(case: Case) -> dict[str, Any]:
    return {
        f.name: value
        for f in dataclasses.fields(case)
        if f.name not in ("level", "law") and (value := getattr(case, f.name)) not in (None, "", {})
    }


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise _wrong(f"it is no JSON: {error}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        given = values.get("format") if isinstance(values, dict) else None
        raise _wrong(f"its format is {given!r}; this version reads {FORMAT}")
    return values


def _made(cls: type[Certificate], values: Mapping[str, Any]) -> Certificate:
    known = {f.name for f in dataclasses.fields(cls)} - {"cases"}
    kept = {name: value for name, value in values.items() if name in known}
    cases = tuple(_case(group, case) for group in values["laws"] for case in group["cases"])
    tuples = {name: tuple(kept[name]) for name in ("api", "declared", "coming")}
    return cls(**{**kept, **tuples, "cases": cases})


def _case(group: Mapping[str, Any], values: Mapping[str, Any]) -> Case:
    known = {f.name for f in dataclasses.fields(Case)}
    kept = {name: value for name, value in values.items() if name in known}
    return Case(**{**kept, "level": group["level"], "law": group["law"]})


def _check(made: Certificate, values: Mapping[str, Any]) -> None:
    """Types of what is read from it, and that the verdicts written beside are those of its cases."""
    texts = ("backend", "distribution", "version", "pagedkv", "device", "date", "note")
    wrong = [name for name in texts if not isinstance(getattr(made, name), str)]
    wrong += [name for name in ("options", "machine", "capabilities") if not isinstance(getattr(made, name), dict)]
    wrong += [] if isinstance(made.complete, bool) else ["complete"]
    wrong += [f"outcome of {case.id}" for case in made.cases if case.outcome not in get_args(Outcome)]
    wrong += [f"seconds of {case.id}" for case in made.cases if not isinstance(case.seconds, (int, float))]
    if wrong:
        raise _wrong(f"wrong values: {', '.join(wrong)}")
    computed = made.levels()
    written = {level: verdict for level, verdict in values.get("levels", {}).items() if level in computed}
    if values.get("passed") != made.passed or any(computed[level] != verdict for level, verdict in written.items()):
        raise _wrong("its verdicts are not those of its cases")


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"this is no certificate of the kit: {what}; make it with `pagedkv certify NAME --json FILE`")


def section_of(id: str) -> str:
    """The section of a case's id: the name of its file without folders and "test_"."""
    return id.partition("::")[0].rpartition("/")[2].removeprefix("test_").removesuffix(".py")


# -- several -----------------------------------------------------------------------------------------------------------


def worst(cases: Iterable[Case]) -> tuple[float, float] | None:
    """(largest error, its tolerance) among cases that have one; the one nearest to its tolerance counts."""
    measured = [(c.error, c.tolerance) for c in cases if c.error is not None and c.tolerance]
    return max(measured, key=lambda pair: pair[0] / pair[1], default=None)


def read_all(paths: Sequence[Path]) -> list[Certificate]:
    """Certificates from files, by backend name. Raises `ConfigError` with the file's name."""
    return sorted((read(path) for path in paths), key=lambda made: (made.backend, made.distribution))


def read(path: Path) -> Certificate:
    """The certificate in a file. Raises `ConfigError` with the file's name."""
    try:
        return Certificate.from_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
