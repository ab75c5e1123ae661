"""Installs the mutants, runs the kit on each of them in this process, and prints what it found.

    python -m tests.conformance.mutants.run            the cases that each mutant's law stands for, as JSON
    python -m tests.conformance.mutants.run --whole    the whole kit on each, as a table of how many checks catch it

The cases that a mutant is to fail are run on its base too, installed the same way and unbroken.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pagedkv.conformance import plugin
from pagedkv.conformance.certificate import Case
from pagedkv.conformance.plugin import HERE, Gatherer
from pagedkv.conformance.subject import Subject
from tests.conformance.mutants import plugins
from tests.conformance.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[3]
DISTRIBUTION = "pagedkv-mutants"
BROKEN = re.compile(r"^(?!pagedkv\.)[\w.]*(Error|Exception): .*\(\w+\.py, line \d+\)$", re.DOTALL)
"""The message of a case in which something raised that is neither an assertion nor an error of the contract."""

Cases = Mapping[str, Case]


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        if arguments == ["--whole"]:
            for line in whole(Path(folder)):
                print(line, flush=True)
        else:
            print("\n" + json.dumps(chosen(Path(folder))))


def install(folder: Path) -> None:
    """A distribution with an entry point for each mutant and each unbroken base."""
    targets = {name: f"tests.conformance.mutants.plugins:{plugins.attribute(name)}" for name in plugins.CONTROLS}
    targets |= {one.name: f"tests.conformance.mutants.{target_of(one)}" for one in MUTANTS}
    info = folder / f"{DISTRIBUTION.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 1.0\n")
    lines = [f"{name} = {target}\n" for name, target in targets.items()]
    (info / "entry_points.txt").write_text("[pagedkv.backends]\n" + "".join(lines))
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/entry_points.txt,,\n")
    sys.path[:0] = [str(folder), str(ROOT), str(ROOT / "plugins" / "template")]
    importlib.invalidate_caches()


def target_of(one: Mutant) -> str:
    """Where the descriptor lies."""
    return f"{'heavy' if one.part == 'module' else 'plugins'}:{plugins.attribute(one.name)}"


# -- one run -----------------------------------------------------------------------------------------------------------


def run(name: str, folder: Path, cases: Iterable[str]) -> Cases:
    """The cases of a pytest run on one backend, by id; `cases` are files, or node ids whose function may be cut."""
    subject = Subject(name)
    gatherer = Gatherer(subject)
    (folder / "pytest.ini").write_text("[pytest]\n")
    quiet = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "--noconftest", "-W", "ignore", "--tb=native"]
    where = ["-c", str(folder / "pytest.ini"), "--rootdir", str(ROOT)]
    gc.freeze()  # pytest ends with full collections: what is loaded by now need not be looked through every time
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = pytest.main([*quiet, *where, *(str(HERE / case) for case in cases)], plugins=[plugin, gatherer])
    with contextlib.suppress(Exception):  # it is broken, maybe here too
        subject.close()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest on {name} ended with {code!r}:\n{printed.getvalue()}")
    return {case.id: case for case in gatherer.cases.values()}


def judged(cases: Cases) -> list[Case]:
    """The cases that failed because they judged so."""
    return [case for case in cases.values() if case.outcome == "failed" and not BROKEN.match(case.message)]


# -- the cases of their laws -------------------------------------------------------------------------------------------


def chosen(folder: Path) -> dict[str, Any]:
    """Mutant -> what its cases said of it and of its base."""
    controls = {name: control(name, folder) for name in plugins.CONTROLS}
    return {one.name: told(run(one.name, folder, one.cases), controls[one.base.control]) for one in MUTANTS}


def control(name: str, folder: Path) -> Cases:
    """All cases that some mutant of this base is to fail, on the base."""
    cases = dict.fromkeys(case for one in MUTANTS if one.base.control == name for case in one.cases)
    return run(name, folder, cases)


def told(cases: Cases, unbroken: Cases) -> dict[str, Any]:
    """Laws that the judging failures name, messages of the others, and how the same cases went on the base."""
    failed = judged(cases)
    return {
        "laws": sorted({case.law for case in failed}),
        "messages": [f"{case.id}: {case.message}" for case in failed],
        "broke": [f"{c.id}: {c.message}" for c in cases.values() if c.outcome == "failed" and c not in failed],
        "unbroken": {name: unbroken[name].outcome if name in unbroken else "not run" for name in cases},
    }


# -- the whole kit -----------------------------------------------------------------------------------------------------


def whole(folder: Path) -> Iterator[str]:
    """A table: how many cases of how many laws each mutant fails."""
    yield "| mutant | what it does | checks | laws |"
    yield "| --- | --- | ---: | ---: |"
    for one in MUTANTS:
        failed = judged(run(one.name, folder, sections(one)))
        yield f"| {one.name} | {one.what} | {len(failed)} | {len({case.law for case in failed})} |"


def sections(one: Mutant) -> list[str]:
    """The files of the kit; figures judge nothing, and only who breaks collectives needs two more processes."""
    left_out = {"test_costs.py", *(() if one.method == "communicator" else ("test_collectives.py",))}
    return [path.name for path in sorted(HERE.glob("test_*.py")) if path.name not in left_out]


if __name__ == "__main__":
    main(sys.argv[1:])
