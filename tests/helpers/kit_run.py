"""Runs the conformance kit on the double of a backend whose hardware is not here, in a process of its own.

    python kit_run.py NAME [-k EXPR] [--seed N] [--certificate FILE]

Prints, as JSON, how many cases passed and what each other one said. The certificate is one of the backend itself with a
note of what it was not run on; docs/certificates has those of the whole kit.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedkv.conformance.certificate import Certificate

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = "pagedkv-doubles"
TARGETS = {
    "cuda-double": "tests.backends.cuda.double_descriptor:DOUBLE",
    "cuda-interpreted": "tests.backends.cuda.double_descriptor:INTERPRETED",
    "jetson-double": "tests.backends.jetson.double_descriptor:DoubleDescriptor",
    "ascend-double": "tests.backends.ascend.double_descriptor:DOUBLE",
}
NOTES = {
    "cuda": "not run on hardware: kit on the double (kernels=torch), kernels under the interpreter",
    "jetson": "not run on hardware: kit on the double (kernels=torch), kernels under the interpreter",
    "ascend": "not run on hardware: kit on the double, the vendor's operators emulated in float32",
}
OPTIONS = {"cuda": {"kernels": "torch"}, "jetson": {"kernels": "torch"}, "ascend": {}}
"""What the double stands for, besides its own seed."""


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
    lines = [f"{name} = {target}\n" for name, target in TARGETS.items()]
    (info / "entry_points.txt").write_text("[pagedkv.backends]\n" + "".join(lines))
    paths = [str(folder), str(ROOT)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    importlib.invalidate_caches()


def noted(made: Certificate) -> Certificate:
    """The certificate as one of the real backend, which says what it was not run on."""
    real, version = made.backend.partition("-")[0], importlib.metadata.version("pagedkv")
    own = {"backend": real, "distribution": "pagedkv", "version": version}
    options = {name: value for name, value in made.options.items() if name != "seed"} | OPTIONS[real]
    return dataclasses.replace(made, **own, options=options, note=NOTES[real])


def main(arguments: argparse.Namespace) -> None:
    from pagedkv.conformance.run import run
    from pagedkv.conformance.subject import Subject

    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        subject = Subject(arguments.name, options={"seed": arguments.seed})
        made = run(subject, Silent(), sys.stderr, select=arguments.select).certificate
        subject.close()
    if arguments.certificate is not None:
        arguments.certificate.write_text(noted(made).to_json(), "utf-8")
    cases = made.cases
    others = [f"{case.id} {case.outcome}: {case.message}" for case in cases if case.outcome != "passed"]
    print("\n" + json.dumps({"passed": len(cases) - len(others), "others": others}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TARGETS)
    parser.add_argument("-k", dest="select")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--certificate", type=Path)
    main(parser.parse_args())
