"""Everything that can be found out about an installation, in one report."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv import __version__
from pagedkv.api import API_VERSION
from pagedkv.diagnosis import packages, system, variables
from pagedkv.diagnosis.backends import Choice, backend_findings
from pagedkv.diagnosis.findings import EXIT_CODES, Finding, Verdict, verdict, worst_first
from pagedkv.diagnosis.known import known
from pagedkv.diagnosis.model import ModelCheck, model_findings
from pagedkv.diagnosis.torch import TorchCheck, torch_findings
from pagedkv.plugins import Status, discover, find, preview, probe_all, requested

VERSION = 1
"""Of the report's form: a key that is there keeps its meaning; new ones may come."""

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`facts`: topic -> JSON values. `findings`, the worst first; `about` of each is a topic."""

    facts: Mapping[str, Any]
    statuses: tuple[Status, ...]
    choice: Choice
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """All of it in one word."""
        return verdict(self.findings)

    @property
    def exit_code(self) -> int:
        """0 fine, 1 warnings, 2 broken."""
        return EXIT_CODES[self.verdict]


def examine(
    backend: str | None = None,
    model: str | None = None,
    *,
    root: Path = system.ROOT,
    environ: Mapping[str, str] = os.environ,
    progress: Callable[[str], None] = lambda doing: None,
) -> Report:
    """Look at everything, at `backend` alone if one is named. Raises `BackendNotFound` for an unknown name.

    Plugins, torch and the model are asked in child processes, each within a limit, at the same time.
    """
    named, _ = requested(backend)
    if backend is not None and named is not None:
        find(named)
    with contextlib.ExitStack() as children:
        torch = children.enter_context(contextlib.closing(TorchCheck()))
        progress("asking the backends")
        statuses = tuple(probe_all([named] if backend is not None and named else None, diagnose=True))
        chosen, why = preview(statuses, backend)
        choice = Choice(backend=chosen, why=why, named=named)
        plan = None if model is None else children.enter_context(contextlib.closing(ModelCheck(model, chosen)))
        facts = _facts(root, environ)
        progress("importing torch")
        facts["torch"] = torch.facts()
        progress(f"looking at {model}")
        facts["model"] = None if plan is None else plan.facts(torch_loads=facts["torch"]["version"] is not None)
    facts["choice"] = {"backend": choice.backend, "why": choice.why}
    return Report(
        facts=facts, statuses=statuses, choice=choice, findings=tuple(worst_first(_findings(facts, statuses, choice)))
    )


def _facts(root: Path, environ: Mapping[str, str]) -> Facts:
    versions = packages.packages(_distributions())
    return {
        "report": VERSION,
        "pagedkv": __version__,
        "contract": "{}.{}".format(*API_VERSION),
        "system": system.system(root),
        "python": _python(),
        "processor": system.processor(root),
        "memory": system.memory(root),
        "limits": system.limits(),
        "packages": versions,
        "pairs": packages.pairs(versions, known()),
        "environment": variables.variables(environ, known()),
    }


def _python() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "virtual_environment": sys.prefix != sys.base_prefix,
    }


def _distributions() -> list[str]:
    return list(dict.fromkeys(found.distribution for found in discover()))


def _findings(facts: Facts, statuses: tuple[Status, ...], choice: Choice) -> Iterator[Finding]:
    container, memory = facts["system"]["container"], facts["memory"]
    pins = any(s.status == "ok" and d.total is not None and not d.unified for s in statuses for d in s.devices)
    yield from torch_findings(facts["torch"])
    yield from model_findings(facts["model"])
    yield from backend_findings(statuses, choice, memory["usable"])
    yield from packages.requirement_findings(_distributions())
    yield from packages.conflict_findings(facts["packages"], known())
    yield from packages.pair_findings(facts["pairs"])
    yield from system.system_findings(facts["system"])
    yield from system.memory_findings(memory, container)
    yield from system.processor_findings(facts["processor"], container)
    yield from system.limit_findings(facts["limits"], memory["total"], pins)
    yield from variables.variable_findings(facts["environment"], known())
