"""What a run of the kit found: cases, laws and levels, as a record that goes to JSON and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FORMAT = 1

Outcome = Literal["passed", "failed", "skipped"]
Verdict = Literal["reached", "not reached", "not declared", "coming"]

LEVELS: Mapping[str, str] = {
    "core": "loads, declares, plans, appends and attends by every law",
    "copy": "blocks are copied bit for bit, in the promised order",
    "graph": "a recorded step replays like the eager one",
    "canonical_kv": "blocks as bytes that every backend reads",
    "lse": "the log of each softmax denominator",
    "collectives": "two ranks reduce, gather and broadcast",
    "engine": "a whole model generates the expected tokens",
    "quantized_kv": "a quantized cache",
    "mla": "latent attention",
}
"""Level -> what it says. A level is reached only if it has cases, all passed, and none was skipped."""

COMING = ("quantized_kv", "mla")
"""Levels whose cases are not written yet."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result of one run. `declared` are the levels that the backend's capabilities call for.

    `complete`: no case was left out by the caller's choice (`-k` and the like). `machine` and `capabilities` hold
    plain JSON values.
    """

    backend: str
    distribution: str
    version: str
    api: tuple[int, int]
    pagedkv: str
    device: str
    options: Mapping[str, Any]
    machine: Mapping[str, Any]
    capabilities: Mapping[str, Any]
    declared: tuple[str, ...]
    complete: bool
    cases: tuple[Case, ...]
    format: int = FORMAT

    def verdict(self, level: str) -> Verdict:
        """Whether a level is reached."""
        if level in COMING:
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

    def to_json(self) -> str:
        """The certificate as indented JSON, verdicts included for readers that do not compute them."""
        values = dataclasses.asdict(self)
        return json.dumps({**values, "levels": self.levels(), "passed": self.passed}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """The record that `to_json` wrote. Raises `ValueError` for another format."""
        values = json.loads(text)
        if values.get("format") != FORMAT:
            raise ValueError(f"certificate format {values.get('format')!r}; this version reads {FORMAT}")
        known = {f.name for f in dataclasses.fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        kept["cases"] = tuple(Case(**case) for case in kept["cases"])
        return cls(**kept | {"api": tuple(kept["api"]), "declared": tuple(kept["declared"])})


def worst(cases: Iterable[Case]) -> tuple[float, float] | None:
    """(largest error, its tolerance) among cases that have one; the one nearest to its tolerance counts."""
    measured = [(c.error, c.tolerance) for c in cases if c.error is not None and c.tolerance]
    return max(measured, key=lambda pair: pair[0] / pair[1], default=None)


def read_all(paths: Sequence[Path]) -> list[Certificate]:
    """Certificates from files, by backend name."""
    return sorted((Certificate.from_json(path.read_text("utf-8")) for path in paths), key=lambda c: c.backend)
