"""The kit as a function: runs it in this process, apart from whatever pytest is configured to do here."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import pytest

from pagedkv.api.errors import ConfigError, InternalError
from pagedkv.conformance import plugin
from pagedkv.conformance.certificate import Case, Certificate, section_of
from pagedkv.conformance.plugin import PACKAGE, Gatherer, argument, section_file
from pagedkv.conformance.subject import Subject

MOST_PRINTED = 20_000
"""Bytes that are kept of what is printed outside of the cases."""


class Watcher(Protocol):
    """Who is told how the run goes. A section is named after its file."""

    def begin(self, cases: int) -> None: ...
    def start(self, section: str, law: str) -> None: ...
    def end(self, section: str, case: Case) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run gave. `interrupted` by Ctrl-C; `printed`: what was printed outside of all cases; `warnings` raised."""

    certificate: Certificate
    interrupted: bool
    printed: str
    warnings: tuple[str, ...]


def run(subject: Subject, watcher: Watcher, stream: IO[str], *, select: str | None = None) -> Outcome:
    """Run the kit on `subject`, or those of its cases that pytest's expression `select` names.

    What is printed meanwhile stays away from the terminal; only `stream` is shown a crash of the interpreter. Settings
    of a project around it (pytest.ini, conftest.py, PYTEST_ADDOPTS, installed plugins) have no effect.
    Raises `ConfigError` for an expression that names no case, and `InternalError` when the kit itself breaks.
    """
    gatherer, reporter = Gatherer(subject), _Reporter(watcher)
    with tempfile.TemporaryDirectory() as folder, _apart(), _silenced(stream) as printed:
        code = pytest.main(_arguments(Path(folder), select), plugins=[plugin, gatherer, reporter])
    _refuse(int(code), reporter, printed.text, select)
    return Outcome(
        certificate=gatherer.certificate(),
        interrupted=reporter.interrupted,
        printed=printed.text,
        warnings=tuple(dict.fromkeys(reporter.warnings)),
    )


def _arguments(folder: Path, select: str | None) -> list[str]:
    ini = folder / "pytest.ini"
    ini.write_text("[pytest]\n")
    chosen = [] if select is None else ["-k", select]
    apart = [
        "-c",
        str(ini),
        "--rootdir",
        str(folder),
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
    ]
    return [*apart, "--pyargs", PACKAGE, *chosen]


def _refuse(code: int, reporter: _Reporter, printed: str, select: str | None) -> None:
    """Raise for a run that gives no certificate."""
    if reporter.broken:
        raise InternalError(f"the kit could not be collected: {reporter.broken}")
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise ConfigError(
            f"no case of this backend matches -k {select!r}; leave -k out to see the laws and their cases"
        )
    if code == pytest.ExitCode.USAGE_ERROR:
        raise ConfigError(f"-k {select!r} is no expression that pytest reads: {printed.strip()}")
    if code == pytest.ExitCode.INTERNAL_ERROR:
        raise InternalError(f"the kit broke:\n{printed.strip()}")


class _Reporter:
    """Tells the watcher what pytest's hooks say. Stands in for pytest's own display."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._laws: dict[str, str] = {}
        self._gatherer: Gatherer | None = None
        self.interrupted = False
        self.broken = ""
        self.warnings: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.unregister(name="terminalreporter")
        self._gatherer = next(p for p in config.pluginmanager.get_plugins() if isinstance(p, Gatherer))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken = f"{section_file(report.nodeid)}: {report.longreprtext}"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._laws = {item.nodeid: argument(item, "law", item.name) for item in session.items}
        self._watcher.begin(len(self._laws))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._watcher.start(section_of(nodeid), self._laws[nodeid])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._gatherer is not None and (case := self._gatherer.cases.get(nodeid)) is not None:
            self._watcher.end(section_of(nodeid), case)

    def pytest_warning_recorded(self, warning_message: Any, when: str) -> None:
        if when != "config":  # those are about pytest's own state in this process
            self.warnings.append(f"{warning_message.category.__name__}: {warning_message.message}")

    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        self.interrupted = excinfo.type is KeyboardInterrupt  # else pytest's word for errors while collecting


# -- apart from everything around --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Without the variables that add options or plugins to every run of pytest."""
    before = {name: value for name, value in os.environ.items() if name.startswith("PYTEST_")}
    for name in before:
        del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            del os.environ[name]
        os.environ.update(before)


class _Printed:
    text = ""


@contextlib.contextmanager
def _silenced(crashes: IO[str]) -> Iterator[_Printed]:
    """Standard output and error go into a file, whoever writes to them; `crashes` gets the last words of a crash."""
    printed, was_enabled = _Printed(), faulthandler.is_enabled()
    saved = [(descriptor, os.dup(descriptor)) for descriptor in (1, 2)]
    with tempfile.TemporaryFile() as file:
        try:
            _flush()
            for descriptor, _ in saved:
                os.dup2(file.fileno(), descriptor)
            _watch_for_crashes(crashes)
            yield printed
        finally:
            _flush()
            for descriptor, copy in saved:
                os.dup2(copy, descriptor)
                os.close(copy)
            faulthandler.disable()
            if was_enabled:
                _watch_for_crashes(sys.stderr)
            printed.text = _end_of(file)


def _watch_for_crashes(stream: IO[str]) -> None:
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor cannot show a crash
        faulthandler.enable(stream)


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MOST_PRINTED))
    text = file.read().decode(errors="replace")
    return text if size <= MOST_PRINTED else f"({size - MOST_PRINTED} bytes before this are left out)\n{text}"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
