"""The support matrix: made from certificates alone, and the one in docs/ is that of those beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedkv.api.errors import ConfigError
from pagedkv.conformance import matrix
from pagedkv.conformance.certificate import read_all
from pagedkv.conformance.report import headline
from tests.conformance.certificates import case, certificate

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_in_docs_is_what_the_certificates_give():
    made = matrix.matrix(read_all(sorted((DOCS / "certificates").glob("*.json"))))
    assert (DOCS / "support.md").read_text("utf-8") == made, "run `make support` and commit docs/support.md"


def test_the_certificates_in_docs_are_of_whole_runs_that_passed():
    for made in read_all(sorted((DOCS / "certificates").glob("*.json"))):
        assert made.passed, f"{made.backend}: run `make certify` once its cases pass"


def test_rows_are_what_the_backends_declare_and_reach():
    other = certificate(case(0, outcome="failed"), backend="other", declared=("core", "graph"))
    lines = matrix.matrix([certificate(), other]).splitlines()
    for line in (
        "|  | mine | other |",
        "| result | passed (2 passed) | failed (1 failed) |",
        "| core | reached | not reached |",
        "| copy | reached | not declared |",
        "| mla | coming | coming |",
        "| KV dtypes | fp32, int8/token\\_head | fp32, int8/token\\_head |",
        "| block sizes | 8, 16, or 32 to 128 in steps of 32 | 8, 16, or 32 to 128 in steps of 32 |",
        "| head dims | 1 to 256 | 1 to 256 |",
        "| query heads of a KV head | at most 8 | at most 8 |",
        "| window | yes | yes |",
        "| graph | 1.0 | 1.0 |",
        "| graphs of batches | decode | decode |",
        "| mine | dtype bf16, head\\_dim 8 to 64 in steps of 8, feature window | no kernel \\| yet |",
    ):
        assert line in lines, line


def test_what_a_run_was_not_made_on_stands_beside_every_level_it_reached():
    noted = certificate(backend="noted", note="not run on a card: a stand-in took its place")
    lines = matrix.matrix([certificate(), noted]).splitlines()
    assert "| note | - | not run on a card: a stand-in took its place |" in lines
    assert "| core | reached | reached\\* |" in lines and "| graph | not declared | not declared |" in lines
    assert "| result | passed (2 passed) | passed (2 passed) |" in lines
    assert headline(noted) == "passed (2 passed), not run on a card: a stand-in took its place"
    assert not any(line.startswith("| note") for line in matrix.matrix([certificate()]).splitlines())


def test_a_feature_of_one_backend_is_a_no_of_the_other():
    values = dict(certificate().capabilities)
    lean = certificate(backend="lean", capabilities={**values, "features": {"set": []}, "extensions": {"map": []}})
    lines = matrix.matrix([lean, certificate()]).splitlines()
    assert "| window | - | yes |" in lines and "| graph | - | 1.0 |" in lines


def test_partial_runs_and_no_runs_make_no_page(capsys, tmp_path):
    with pytest.raises(ConfigError, match="run the whole kit"):
        matrix.matrix([certificate(complete=False)])
    assert matrix.main([]) == 2
    assert matrix.main([str(tmp_path / "none.json")]) == 2
    assert "pagedkv certify NAME" in capsys.readouterr().err


def test_the_command_prints_the_page(capsys, tmp_path):
    (tmp_path / "mine.json").write_text(certificate().to_json())
    assert matrix.main([str(tmp_path / "mine.json")]) == 0
    assert capsys.readouterr().out == matrix.matrix([certificate()])
