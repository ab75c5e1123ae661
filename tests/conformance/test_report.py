"""A certificate as people read it."""

from __future__ import annotations

import pytest

from pagedkv.conformance import report
from tests.conformance.certificates import case, certificate
from tests.conformance.test_certificate import EVERYTHING


def test_markdown_has_identity_levels_laws_failures_and_figures():
    text = report.markdown(certificate(*EVERYTHING))
    for line in (
        "# Certificate: mine (pagedkv-mine 1.5)",
        "**failed (2 passed, 2 failed, 1 skipped)**",
        "| machine | some\\_cpu, Linux x86\\_64 |",
        "| versions | python 3.12.1 |",
        "| options | level=3 |",
        "| day | 2026-01-31 |",
        "| core | not reached | 4 | loads, declares, plans, appends and attends by every law |",
        "| graph | not declared | 0 | a recorded step replays like the eager one |",
        "| core | numerics: agrees | 2 | 1.2e-07 of 1e-05 | 1 skipped |",
        "| copy | copy: bits | 1 |  | 1 failed |",
        '- failed, copy: bits: worst error 3 at (0, 1) "quoted" ünïcode (test\\_a.py::test\\_b\\[1\\])',
        "- skipped, numerics: agrees: one processor only (test\\_a.py::test\\_b\\[2\\])",
        "Works although it is not declared: alibi, sinks.",
        "## Figures",
        "| a | plan\\_ms | 1 0.5, 64 2 |",
    ):
        assert line in text.splitlines(), line


def test_a_partial_run_says_so():
    assert report.headline(certificate(case(0), complete=False)) == (
        "partial (1 passed; cases were left out, so no level is reached)"
    )


def test_a_run_under_the_checker_says_so():
    assert report.identity(certificate(machine={"checked": True}))[-1][0] == "checked"
    assert report.identity(certificate())[-1][0] == "day"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123456, "0.1235"), (12345.678, "12,346"), (3_000_000_000, "3,000,000,000"), ("fast", "fast"), (True, "True")],
)
def test_figures_have_four_digits(value, text):
    assert report.figure(value) == text


@pytest.mark.parametrize(
    ("id", "expression"),
    [
        ("test_a.py::test_b", "test_b"),
        ("test_a.py::test_b[fp32-int8/token_head-b16]", "test_b[fp32-int8/token_head-b16]"),
        ("test_a.py::test_b[x::y]", "test_b[x::y]"),
        ("test_a.py::test_b[a, b]", "test_b"),  # -k cannot read it: every parameter of the case
    ],
)
def test_the_expression_that_runs_one_case(id, expression):
    assert report.selection(case(0, id=id)) == expression
