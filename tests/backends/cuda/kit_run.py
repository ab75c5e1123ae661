"""Runs the conformance kit on a double of the CUDA backend, in a process of its own: `python kit_run.py NAME [-k ...]`.

Prints, as JSON, how many cases passed and what each other one said.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DISTRIBUTION = "pagedkv-cuda-doubles"
TARGETS = {"cuda-double": "DoubleDescriptor", "cuda-interpreted": "InterpretedDescriptor"}


class Silent:
    """Watches nothing."""

    def begin(self, cases: int) -> None:
        return

    def start(self, section: str, law: str) -> None:
        return

    def end(self, section: str, case: object) -> None:
        return


def install(folder: Path) -> None:
    """A distribution that offers the doubles, for this process and its children."""
    info = folder / f"{DISTRIBUTION.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 1.0\n")
    lines = [f"{name} = tests.backends.cuda.double_descriptor:{target}\n" for name, target in TARGETS.items()]
    (info / "entry_points.txt").write_text("[pagedkv.backends]\n" + "".join(lines))
    paths = [str(folder), str(ROOT)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    importlib.invalidate_caches()


def main(name: str, select: str | None) -> None:
    from pagedkv.conformance.run import run
    from pagedkv.conformance.subject import Subject

    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        subject = Subject(name)
        cases = run(subject, Silent(), sys.stderr, select=select).certificate.cases
        subject.close()
    others = [f"{case.id} {case.outcome}: {case.message}" for case in cases if case.outcome != "passed"]
    print("\n" + json.dumps({"passed": len(cases) - len(others), "others": others}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
