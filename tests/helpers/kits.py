"""The conformance kit run several times in one child process: what a run needs takes seconds to load."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedkv.conformance.certificate import Certificate

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A backend or a double of `kit_run`, its options, and pytest's expression for the cases; None: the whole kit."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    select: str | None = None


def certificates(runs: Sequence[Run], **variables: str) -> list[Certificate]:
    """What the kit says in each of these runs; `variables` are added to the child's environment."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps([dataclasses.asdict(run) for run in runs])],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Certificate.from_json(text) for text in json.loads(done.stdout.splitlines()[-1])]


def complaints(found: Certificate) -> list[str]:
    """What each case said that did not pass."""
    return [f"{case.id} {case.outcome}: {case.message}" for case in found.cases if case.outcome != "passed"]


def main(asked: str) -> None:
    from pagedkv.conformance.run import run
    from pagedkv.conformance.subject import Subject
    from tests.helpers.kit_run import Silent, install

    made = []
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        for one in json.loads(asked):
            subject = Subject(one["backend"], options=one["options"])
            made.append(run(subject, Silent(), sys.stderr, select=one["select"]).certificate.to_json())
            subject.close()
    print("\n" + json.dumps(made))


if __name__ == "__main__":
    main(sys.argv[1])
