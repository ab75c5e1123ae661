"""The public surface of `pagedkv.api` changes only on purpose: a stranger's plugin is written against it (U80)."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkv.api
from pagedkv.api import errors, extensions, records
from tests.helpers.surface import surface

KEPT = Path(__file__).with_name("surface.txt")
HOW = "if the change is meant: python -m tests.helpers.surface > tests/api/surface.txt, a line in CHANGELOG.md, and G2"


def test_the_surface_is_the_one_that_was_reviewed():
    kept, now = KEPT.read_text("utf-8").splitlines(), surface().splitlines()
    difference = "\n".join(difflib.unified_diff(kept, now, "tests/api/surface.txt", "pagedkv/api", lineterm="", n=1))
    assert not difference, f"\n{difference}\n\n{HOW}"


def test_every_name_of_the_front_is_there_and_in_the_text():
    text = KEPT.read_text("utf-8")
    for name in pagedkv.api.__all__:
        value = getattr(pagedkv.api, name)
        assert f"class {name}(" in text or f"def {name}(" in text or f"\n{name} = " in text, name
        assert inspect.getdoc(value), name


@pytest.mark.parametrize("module", [records, extensions], ids=lambda module: module.__name__)
def test_the_text_says_of_each_field_what_the_record_does(module):
    """The text is read from the source; `dataclasses` knows what came of it."""
    lines = {line.strip() for line in KEPT.read_text("utf-8").splitlines()}
    for record in vars(module).values():
        if isinstance(record, type) and dataclasses.is_dataclass(record) and record.__module__ == module.__name__:
            for field in dataclasses.fields(record):
                feature = field.metadata.get("feature")
                said = [line for line in lines if line.startswith(f"{field.name}: {field.type}")]
                assert said, (record.__name__, field.name)
                assert feature is None or f"{field.name}: {field.type} = gated({feature!r}, {field.default!r})" in said


def test_the_errors_of_the_text_are_one_tree():
    tree = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert {f"class {name}" for name in tree} <= {line.split("(")[0] for line in KEPT.read_text("utf-8").splitlines()}
    assert all(issubclass(getattr(errors, name), errors.PagedKVError) for name in tree)


def test_a_change_shows_as_a_readable_difference(tmp_path):
    source = (
        "class A(B):\n    x: int = gated('f', 0)\n    def m(self, y: int = 1) -> None: ...\n    def _own(self): ...\n"
    )
    (tmp_path / "one.py").write_text(f"LIMIT = 3\n_hidden = 4\n{source}")
    assert surface(tmp_path).splitlines() == [
        "# pagedkv.api.one",
        "LIMIT = 3",
        "class A(B)",
        "    x: int = gated('f', 0)",
        "    def m(self, y: int=1) -> None",
    ]


def test_importing_it_loads_no_framework():
    asked = "print([m for m in ('torch', 'stevedore', 'click') if m in sys.modules])"
    code = f"import sys, pagedkv.api, pagedkv.api.extensions; {asked}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
