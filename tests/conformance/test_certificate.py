"""Certificates: verdicts, JSON and back, and what is refused as one."""

from __future__ import annotations

import dataclasses
import json

import pytest

from pagedkv.api.errors import ConfigError
from pagedkv.conformance.certificate import LEVELS, Certificate, read_all, worst
from tests.conformance.certificates import case, certificate

EVERYTHING = (
    case(0, error=1.25e-7, tolerance=1e-5, figures={"plan_ms": {"1": 0.5, "64": 2.0}}),
    case(1, level="copy", law="copy: bits", outcome="failed", message='worst error 3 at (0, 1)\n"quoted" ünïcode'),
    case(2, outcome="skipped", message="one processor only"),  # the law of the first again
    case(3, law="numerics: another", figures={"under_declared": ["sinks", "alibi"]}),
    case(4, law="numerics: another", tolerance=1e-5, outcome="failed", message="not finite"),
)


@pytest.mark.parametrize("made", [certificate(), certificate(*EVERYTHING, complete=False), certificate(coming=())])
def test_json_gives_the_same_record_back(made):
    assert Certificate.from_json(made.to_json()) == made


def test_json_says_the_verdicts_and_has_one_case_a_line():
    text = certificate(*EVERYTHING).to_json()
    assert json.loads(text)["passed"] is False
    assert json.loads(text)["levels"]["copy"] == "not reached"
    assert sum('"id"' in line for line in text.splitlines()) == len(EVERYTHING)
    assert text.count("copy: bits") == 1 and '"error": 1.25e-07' in text
    assert [sorted(one) for group in json.loads(text)["laws"][:1] for one in group["cases"]] == [
        ["error", "figures", "id", "outcome", "seconds", "tolerance"]
    ]


def test_what_a_later_version_adds_is_ignored():
    values = json.loads(certificate().to_json())
    values |= {"mood": "good", "levels": {**values["levels"], "telepathy": "reached"}}
    values["laws"][0]["cases"][0]["colour"] = "red"
    assert Certificate.from_json(json.dumps(values)) == certificate()


def changed(**fields):
    return json.dumps({**json.loads(certificate().to_json()), **fields})


def without(name):
    return json.dumps({k: v for k, v in json.loads(certificate().to_json()).items() if k != name})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "it is no JSON"),
        ("[1]", "its format is None; this version reads 1"),
        (changed(format=2), "its format is 2; this version reads 1"),
        (without("machine"), "a field is missing"),
        (without("laws"), "a field is missing"),
        (changed(laws=7), "wrong value"),
        (changed(api=1), "wrong value"),
        (changed(date=20260131), "wrong values: date"),
        (changed(complete="yes"), "wrong values: complete"),
        (changed(passed=False), "its verdicts are not those of its cases"),
        (changed(levels={"graph": "reached"}), "its verdicts are not those of its cases"),
        (changed(laws=[{"level": "core", "law": "a", "cases": [{"id": "b", "seconds": 1}]}]), "outcome"),
        (
            changed(laws=[{"level": "core", "law": "a", "cases": [{"id": "b", "seconds": 1, "outcome": "fine"}]}]),
            "wrong values: outcome of b",
        ),
    ],
)
def test_what_is_no_certificate_is_refused_with_the_command_that_makes_one(text, words):
    with pytest.raises(ConfigError) as caught:
        Certificate.from_json(text)
    assert words in str(caught.value) and "pagedkv certify NAME --json FILE" in str(caught.value)


def test_files_are_read_by_backend_and_named_in_errors(tmp_path):
    for name in ("zebra", "ant"):
        (tmp_path / f"{name}.json").write_text(certificate(backend=name).to_json())
    assert [made.backend for made in read_all(sorted(tmp_path.glob("*.json"), reverse=True))] == ["ant", "zebra"]
    (tmp_path / "bad.json").write_bytes(b"\xff")
    for name in ("bad.json", "none.json"):
        with pytest.raises(ConfigError, match=name):
            read_all([tmp_path / name])


# -- verdicts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "reached"),
        ({"outcome": "skipped"}, "not reached"),
        ({"outcome": "failed"}, "not reached"),
        ({"complete": False}, "not reached"),
        ({"declared": ("core",)}, "not declared"),
        ({"level": "core"}, "not reached"),  # no case is left
        ({"coming": ("copy",)}, "coming"),
    ],
    ids=str,
)
def test_a_level_is_reached_only_if_all_its_cases_were_run_and_passed(changes, verdict):
    own = {name: changes[name] for name in ("outcome", "level") if name in changes}
    others = {name: value for name, value in changes.items() if name not in own}
    made = certificate(case(0), case(1), case(2, **{"level": "copy", **own}), **others)
    assert made.verdict("copy") == verdict
    assert made.levels()["copy"] == verdict and made.levels().keys() == LEVELS.keys()


def test_one_levels_failure_is_not_anothers():
    made = certificate(case(0), case(1, level="copy", outcome="failed"))
    assert (made.verdict("core"), made.verdict("copy")) == ("reached", "not reached")


def test_levels_whose_cases_are_not_written_are_coming_even_if_declared():
    made = certificate(declared=("core", "copy", "mla"))
    assert made.verdict("mla") == "coming"


@pytest.mark.parametrize(
    ("outcomes", "complete", "result"),
    [
        (["passed", "passed"], True, "passed"),
        (["passed", "failed"], True, "failed"),
        (["passed", "skipped"], True, "failed"),
        (["passed"], False, "partial"),
        (["failed"], False, "failed"),
    ],
)
def test_the_result_in_one_word(outcomes, complete, result):
    made = certificate(*(case(i, outcome=outcome) for i, outcome in enumerate(outcomes)), complete=complete)
    assert (made.result, made.passed) == (result, result == "passed")


def test_a_run_without_cases_has_not_passed():
    assert not dataclasses.replace(certificate(), cases=()).passed


def test_laws_gather_their_cases_in_order():
    laws = certificate(*EVERYTHING).laws()
    assert list(laws) == ["numerics: agrees", "copy: bits", "numerics: another"]
    assert [one.id[-2] for one in laws["numerics: agrees"]] == ["0", "2"]


def test_under_declared_features_come_from_all_cases():
    made = certificate(*EVERYTHING, case(5, figures={"under_declared": ["sinks"]}))
    assert made.under_declared() == ("alibi", "sinks")


def test_figures_are_named_after_their_case_only_where_several_cases_of_a_section_use_the_name():
    made = certificate(
        case(0, figures={"gap": 1.0, "once": 2.0}),
        case(1, figures={"gap": 3.0, "under_declared": ["sinks"]}),
        case(2, id="folder/test_other.py::test_c", figures={"gap": 4.0}),
    )
    assert made.figures() == [
        ("a", "gap of test_b[0]", 1.0),
        ("a", "once", 2.0),
        ("a", "gap of test_b[1]", 3.0),
        ("other", "gap", 4.0),
    ]


def test_the_worst_error_is_the_one_nearest_to_its_own_tolerance():
    cases = [case(0, error=1e-3, tolerance=2e-2), case(1, error=9e-6, tolerance=1e-5), case(2)]
    assert worst(cases) == (9e-6, 1e-5)
    assert worst(cases[2:]) is None
