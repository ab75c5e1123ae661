"""The kit is itself tested: each deliberately broken backend is caught by the law that names its fault.

One fresh interpreter installs them all and runs the kit on each: the cases that its law stands for, and the same cases
on its unbroken base. `make mutants` runs the whole kit on each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pagedkv.api import AttentionBackend, DeviceInfo, World
from tests.conformance.mutants import plugins
from tests.conformance.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
LEAST = 25


@pytest.fixture(scope="session")
def found() -> dict[str, Any]:
    """Mutant -> what `mutants.run` tells of it."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PAGEDKV_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance.mutants.run"],
        cwd=ROOT,
        env={**plain, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_the_law_that_names_the_fault_catches_it(mutant: Mutant, found: dict[str, Any]) -> None:
    told = found[mutant.name]
    assert any(mutant.law in law for law in told["laws"]), f"{mutant.what} Nobody says so; failed: {told['messages']}"
    assert not told["broke"], "the mutant raises instead of being wrong"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_the_same_cases_pass_on_its_base(mutant: Mutant, found: dict[str, Any]) -> None:
    unbroken = found[mutant.name]["unbroken"]
    assert unbroken and set(unbroken.values()) == {"passed"}, unbroken


def test_there_are_enough_and_each_is_told_apart() -> None:
    assert len(MUTANTS) >= LEAST
    assert [name for name, count in Counter(one.name for one in MUTANTS).items() if count > 1] == []
    assert [one.name for one in MUTANTS if not one.what.endswith(".") or ": " not in one.law] == []


def test_a_mutant_differs_from_its_base_in_one_method() -> None:
    one = next(one for one in MUTANTS if one.name == "mutant-window-off-by-one")
    broken, base = (_created(name) for name in (one.name, one.base.control))
    assert type(broken).__mro__[1] is type(base)
    assert vars(type(broken)).keys() - {"__module__", "__doc__", "__abstractmethods__", "_abc_impl"} == {"_visible"}


def _created(name: str) -> AttentionBackend:
    descriptor = vars(plugins)[plugins.attribute(name)]
    assert descriptor.name == name
    made: AttentionBackend = descriptor.create(0, {}, World())
    assert made.capabilities() == descriptor.describe(DeviceInfo(index=0, kind=""))
    return made
