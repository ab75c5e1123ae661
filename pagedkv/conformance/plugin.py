"""The pytest plugin that runs the kit.

    pytest -p pagedkv.conformance.plugin --pyargs pagedkv.conformance --backend NAME

It chooses the cases that the declared capabilities call for, gives them the fixture `kit`, and gathers a certificate.
Nothing registers it: pytest runs of other projects do not know it. Cases of other packages in the same run are left
alone and do not count.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv import __version__
from pagedkv.api.errors import PagedKVError
from pagedkv.conformance.certificate import COMING, UNDER_DECLARED, Case, Certificate, Outcome
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.lattice import PLAIN, points
from pagedkv.conformance.machine import surroundings
from pagedkv.conformance.subject import Subject
from pagedkv.plugins.probing import capabilities_to_json

HERE = Path(__file__).parent
PACKAGE = __name__.rpartition(".")[0]
LONGEST_MESSAGE = 2000

_SUBJECT = pytest.StashKey[Subject]()
_GATHERER = pytest.StashKey["Gatherer"]()
_OWN = pytest.StashKey[Subject]()
_MARKERS = {
    "level(name)": "the level of the certificate it counts for",
    "law(sentence)": "the law it tests",
    "needs(feature, ...)": "applies only where these features are declared",
    "without(feature, ...)": "applies only where none of these features is declared",
    "extension(name)": "applies only where this extension is declared",
    "placement(name)": "applies only where pools of this placement are",
    "applies(function)": "applies only where function(capabilities) is true",
    "unchecked": "breaks the caller's laws on purpose: PAGEDKV_CHECK stays out, so that the backend itself answers",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pagedkv", "pagedkv conformance kit")
    group.addoption("--backend", metavar="NAME", help="the installed backend to test")
    group.addoption("--backend-device", type=int, metavar="INDEX", help="its device; default: the best one")
    group.addoption("--backend-option", action="append", default=[], metavar="NAME=VALUE", help="an option of it")
    group.addoption("--certificate", metavar="FILE", help="write the certificate there, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    for marker, meaning in _MARKERS.items():
        config.addinivalue_line("markers", f"{marker}: {meaning}")
    if config.option.help or config.option.markers:
        return
    gatherer = _given(config) or _from_options(config)
    config.stash[_GATHERER], config.stash[_SUBJECT] = gatherer, gatherer.subject


def _given(config: pytest.Config) -> Gatherer | None:
    """The gatherer of a caller that runs pytest in its own process, with a subject that stays the caller's."""
    return next((one for one in config.pluginmanager.get_plugins() if isinstance(one, Gatherer)), None)


def _from_options(config: pytest.Config) -> Gatherer:
    given = config.option
    if not given.backend:
        raise pytest.UsageError("name the backend to test: --backend NAME (`pagedkv backends` lists them)")
    try:
        subject = Subject(given.backend, device=given.backend_device, options=tuple(given.backend_option))
    except PagedKVError as error:
        raise pytest.UsageError(f"{type(error).__name__}: {error}") from error
    config.stash[_OWN] = subject
    gatherer = Gatherer(subject, given.certificate and Path(given.certificate))
    config.pluginmanager.register(gatherer, "pagedkv-gatherer")
    return gatherer


def pytest_unconfigure(config: pytest.Config) -> None:
    if (subject := config.stash.get(_OWN, None)) is not None:
        subject.close()


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The backend under test."""
    return request.config.stash[_SUBJECT]


@pytest.fixture
def kit(subject: Subject, record_property: Any, request: pytest.FixtureRequest) -> Iterator[Kit]:
    """What a case works with; see `pagedkv.conformance.kit`."""
    made = Kit(subject, record_property, checked=request.node.get_closest_marker("unchecked") is None)
    yield made
    made.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "point" in metafunc.fixturenames:
        metafunc.parametrize("point", points(metafunc.config.stash[_SUBJECT].capabilities), ids=str)


@pytest.hookimpl(tryfirst=True)  # before -k and -m look at what is left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    can = config.stash[_SUBJECT].capabilities
    items[:] = [item for item in items if not _is_ours(item) or _applies(item, can)]
    ours = [item for item in items if _is_ours(item)]
    named_whole = config.option.pyargs and PACKAGE in config.option.file_or_dir
    sections = {path.name for path in HERE.glob("test_*.py")}
    config.stash[_GATHERER].expect(
        {item.nodeid for item in ours}, whole=bool(named_whole) and sections <= config.stash[_GATHERER].sections
    )


def _is_ours(item: pytest.Item) -> bool:
    return item.path.parent == HERE


def _applies(item: pytest.Item, can: Any) -> bool:
    wanted = {feature for mark in item.iter_markers("needs") for feature in mark.args}
    unwanted = {feature for mark in item.iter_markers("without") for feature in mark.args}
    extensions = {name for mark in item.iter_markers("extension") for name in mark.args}
    placements = {name for mark in item.iter_markers("placement") for name in mark.args}
    return (
        wanted <= can.features
        and unwanted.isdisjoint(can.features)
        and extensions <= can.extensions.keys()
        and placements <= can.placements
        and all(mark.args[0](can) for mark in item.iter_markers("applies"))
    )


class Gatherer:
    """Turns pytest's reports into cases of a certificate, and prints and writes it at the end."""

    def __init__(self, subject: Subject, path: Path | None = None) -> None:
        self.subject, self._path = subject, path
        self.cases: dict[str, Case] = {}
        self.sections: set[str] = set()
        self._expected: set[str] = set()
        self._whole = False

    def expect(self, ids: set[str], *, whole: bool) -> None:
        """The cases that apply, and whether they are those of all sections."""
        self._expected, self._whole = ids, whole

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed:
            self.sections.add(section_file(report.nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        if _is_ours(item):
            report.pagedkv = (argument(item, "level", "core"), argument(item, "law", item.name))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.cases.get(report.nodeid)
        if not hasattr(report, "pagedkv"):
            return
        if report.when != "call" and (report.passed or (before and before.outcome == "failed")):
            return
        level, law = report.pagedkv
        figures = _figures(report)
        error, tolerance = max(figures.get("checks", []), key=lambda check: check[0] / check[1], default=(None, None))
        self.cases[report.nodeid] = Case(
            id=short_id(report.nodeid),
            level=level,
            law=law,
            outcome=_outcome(report),
            seconds=round(report.duration, 4),
            error=_rounded(error),
            tolerance=tolerance,
            message="" if report.passed else _message(report),
            figures={name: value for name, value in figures.items() if name != "checks"},
        )

    def certificate(self) -> Certificate:
        """What was found so far."""
        subject = self.subject
        return Certificate(
            backend=subject.name,
            distribution=subject.selected.distribution,
            version=subject.selected.version,
            api=subject.descriptor.api,
            pagedkv=__version__,
            device=subject.device.kind,
            options=dict(subject.options),
            machine=surroundings(),
            date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            capabilities=capabilities_to_json(subject.capabilities),
            declared=declared(subject),
            complete=self._whole and self._expected == self.cases.keys(),
            cases=tuple(self.cases.values()),
        )

    def pytest_sessionfinish(self) -> None:
        if self._path is not None:
            self._path.write_text(self.certificate().to_json(), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.cases:
            return
        made = self.certificate()
        terminalreporter.section(f"pagedkv conformance: {made.backend} ({made.distribution} {made.version})")
        for level, verdict in made.levels().items():
            terminalreporter.write_line(f"{level:<14} {verdict}")
        if not made.complete:
            terminalreporter.write_line("some cases were left out, so no level is reached")


def declared(subject: Subject) -> tuple[str, ...]:
    """The levels that the capabilities call for; those that are coming aside."""
    can = subject.capabilities
    optional = {
        "graph": "graph" in can.extensions,
        "canonical_kv": "canonical_kv" in can.extensions,
        "lse": "lse" in can.features,
        "collectives": bool(can.collectives),
        "quantized_kv": any(name not in PLAIN for name in can.kv_dtypes),
    }
    called_for = [name for name, there in optional.items() if there]
    return tuple(level for level in ("core", "copy", *called_for, "engine") if level not in COMING)


def section_file(nodeid: str) -> str:
    """The file of a case."""
    return nodeid.partition("::")[0].rpartition("/")[2]


def short_id(nodeid: str) -> str:
    """A case's id without the folders before the file's name."""
    return section_file(nodeid) + "".join(nodeid.partition("::")[1:])


def argument(item: pytest.Item, marker: str, default: str) -> str:
    """The text that a marker of the case has."""
    found = item.get_closest_marker(marker)
    return str(found.args[0]) if found else default


def _outcome(report: pytest.TestReport) -> Outcome:
    return "passed" if report.passed else "skipped" if report.skipped else "failed"


def _message(report: pytest.TestReport) -> str:
    """What went wrong: the message of an assertion, or the exception and where it was raised."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return _bounded(str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr))
    kind, colon, text = str(crash.message).strip().partition(": ")
    if kind != "AssertionError" or not colon:
        return _bounded(f"{crash.message} ({Path(crash.path).name}, line {crash.lineno})")
    return _bounded(text.partition("\nassert ")[0])  # pytest adds the compared values below the message


def _bounded(text: str) -> str:
    left = len(text) - LONGEST_MESSAGE
    return text if left <= 0 else f"{text[:LONGEST_MESSAGE]} ... ({left} characters more)"


def _figures(report: pytest.TestReport) -> dict[str, Any]:
    """Name -> the last value reported; under "checks" every (error, tolerance), and every under-declared feature."""
    found: dict[str, Any] = {"checks": [value for name, value in report.user_properties if name == "check"]}
    found |= {name: _plain(value) for name, value in report.user_properties if name not in ("check", UNDER_DECLARED)}
    under = [value for name, value in report.user_properties if name == UNDER_DECLARED]
    return found | ({UNDER_DECLARED: under} if under else {})


def _plain(value: Any) -> Any:
    """A figure as JSON has it: numpy's numbers as Python's, and what is not finite as a word."""
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(error: float | None) -> float | None:
    """Three digits. JSON has no infinity: a result that is not finite has no error that could be written."""
    return float(f"{error:.3g}") if error is not None and error < float("inf") else None
