"""The pytest plugin that runs the kit.

    pytest -p pagedkv.conformance.plugin --pyargs pagedkv.conformance --backend NAME

It chooses the cases that the declared capabilities call for, gives them the fixture `kit`, and gathers a certificate.
Nothing registers it: pytest runs of other projects do not know it.
"""

from __future__ import annotations

import platform
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedkv import __version__
from pagedkv.api.errors import PagedKVError
from pagedkv.conformance.certificate import COMING, Case, Certificate, Outcome
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.lattice import points
from pagedkv.conformance.subject import Subject
from pagedkv.plugins.probing import capabilities_to_json

_SUBJECT = pytest.StashKey[Subject]()
_GATHERER = pytest.StashKey["Gatherer"]()
_MARKERS = {
    "level(name)": "the level of the certificate it counts for",
    "law(sentence)": "the law it tests",
    "needs(feature, ...)": "applies only where these features are declared",
    "without(feature, ...)": "applies only where none of these features is declared",
    "extension(name)": "applies only where this extension is declared",
    "placement(name)": "applies only where pools of this placement are",
    "applies(function)": "applies only where function(capabilities) is true",
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
    if not config.option.backend:
        raise pytest.UsageError("name the backend to test: --backend NAME (`pagedkv backends` lists them)")
    try:
        subject = Subject(
            config.option.backend, device=config.option.backend_device, options=tuple(config.option.backend_option)
        )
        config.stash[_SUBJECT] = subject
        config.stash[_GATHERER] = Gatherer(config, subject)
    except PagedKVError as error:
        raise pytest.UsageError(f"{type(error).__name__}: {error}") from error
    config.pluginmanager.register(config.stash[_GATHERER], "pagedkv-gatherer")


def pytest_unconfigure(config: pytest.Config) -> None:
    if (subject := config.stash.get(_SUBJECT, None)) is not None:
        subject.close()


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The backend under test."""
    return request.config.stash[_SUBJECT]


@pytest.fixture
def kit(subject: Subject, record_property: Any) -> Iterator[Kit]:
    """What a case works with; see `pagedkv.conformance.kit`."""
    made = Kit(subject, record_property)
    yield made
    made.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "point" in metafunc.fixturenames:
        metafunc.parametrize("point", points(metafunc.config.stash[_SUBJECT].capabilities), ids=str)


@pytest.hookimpl(tryfirst=True)  # before -k and -m look at what is left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    can = config.stash[_SUBJECT].capabilities
    items[:] = [item for item in items if _applies(item, can)]
    config.stash[_GATHERER].expected = {item.nodeid for item in items}


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

    def __init__(self, config: pytest.Config, subject: Subject) -> None:
        self._config, self._subject = config, subject
        self.expected: set[str] = set()
        self.cases: dict[str, Case] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        report.pagedkv = (_argument(item, "level", "core"), _argument(item, "law", item.name))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.cases.get(report.nodeid)
        if report.when != "call" and (report.passed or (before and before.outcome == "failed")):
            return
        level, law = report.pagedkv
        figures = _figures(report)
        error, tolerance = max(figures.get("checks", []), key=lambda check: check[0] / check[1], default=(None, None))
        self.cases[report.nodeid] = Case(
            id=report.nodeid.rpartition("/")[2],
            level=level,
            law=law,
            outcome=_outcome(report),
            seconds=round(report.duration, 6),
            error=_finite(error),
            tolerance=tolerance,
            message="" if report.passed else _message(report),
            figures={name: value for name, value in figures.items() if name != "checks"},
        )

    def certificate(self) -> Certificate:
        """What was found so far."""
        subject = self._subject
        return Certificate(
            backend=subject.name,
            distribution=subject.selected.distribution,
            version=subject.selected.version,
            api=subject.descriptor.api,
            pagedkv=__version__,
            device=subject.device.kind,
            options=dict(subject.options),
            machine={"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()},
            capabilities=capabilities_to_json(subject.capabilities),
            declared=declared(subject),
            complete=self.expected == self.cases.keys(),
            cases=tuple(self.cases.values()),
        )

    def pytest_sessionfinish(self) -> None:
        if path := self._config.option.certificate:
            Path(path).write_text(self.certificate().to_json(), encoding="utf-8")

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
    }
    called_for = [name for name, there in optional.items() if there]
    return tuple(level for level in ("core", "copy", *called_for, "engine") if level not in COMING)


def _argument(item: pytest.Item, marker: str, default: str) -> str:
    found = item.get_closest_marker(marker)
    return str(found.args[0]) if found else default


def _outcome(report: pytest.TestReport) -> Outcome:
    return "passed" if report.passed else "skipped" if report.skipped else "failed"


def _message(report: pytest.TestReport) -> str:
    """The last line that says what went wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).strip().splitlines()[0][:400]
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)[:400]


def _figures(report: pytest.TestReport) -> dict[str, Any]:
    """Name -> the last value reported; under "checks" every (error, tolerance)."""
    checks = [value for name, value in report.user_properties if name == "check"]
    return {"checks": checks} | {name: value for name, value in report.user_properties if name != "check"}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: a result that is not finite has no error that could be written."""
    return value if value is not None and value < float("inf") else None
