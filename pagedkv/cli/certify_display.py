"""How a run of the kit looks while it goes on: a bar on a terminal, a line a section elsewhere, nothing when quiet."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

if TYPE_CHECKING:
    from pagedkv.conformance.certificate import Case
    from pagedkv.conformance.run import Watcher

_UNKNOWN_WIDTH = 80


class Counts:
    """Cases by outcome; written as "3 passed, 1 failed"."""

    def __init__(self) -> None:
        self._found = {"passed": 0, "failed": 0, "skipped": 0}

    def add(self, case: Case) -> None:
        self._found[case.outcome] += 1

    def __str__(self) -> str:
        shown = [f"{count} {outcome}" for outcome, count in self._found.items() if count or outcome == "passed"]
        return ", ".join(shown)


class Silent:
    """Shows nothing."""

    def begin(self, cases: int) -> None:
        """The number of cases is known."""

    def start(self, section: str, law: str) -> None:
        """A case of this law begins."""

    def end(self, section: str, case: Case) -> None:
        """It has ended."""


class Bar(Silent):
    """One line that is drawn anew: section, cases done of all, counts, the law that is tested now."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._counts = progress, Counts()
        self._task = progress.add_task("collecting", total=None, counts="", law="")

    def begin(self, cases: int) -> None:
        self._progress.update(self._task, total=cases)

    def start(self, section: str, law: str) -> None:
        self._progress.update(self._task, description=section, law=law)

    def end(self, section: str, case: Case) -> None:
        self._counts.add(case)
        self._progress.update(self._task, advance=1, counts=str(self._counts))


class Lines(Silent):
    """A line for each section once it is through, and one for each failure at once."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._section, self._counts, self._began = "", Counts(), 0.0

    def start(self, section: str, law: str) -> None:
        if section != self._section:
            self.finish()
            self._section, self._counts, self._began = section, Counts(), time.perf_counter()

    def end(self, section: str, case: Case) -> None:
        self._counts.add(case)
        if case.outcome == "failed":
            self._say(f"failed: {case.law}")

    def finish(self) -> None:
        """Say what the section that is under way gave so far."""
        if self._section:
            self._say(f"{self._section}: {self._counts} in {time.perf_counter() - self._began:.1f} s")

    def _say(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()


@contextlib.contextmanager
def display(*, quiet: bool) -> Iterator[tuple[Watcher, IO[str]]]:
    """(what the run tells how it goes, the stream that it is shown on)."""
    with _own_stderr() as stream:
        if quiet:
            yield Silent(), stream
        elif stream.isatty():
            with _progress(stream) as progress:
                yield Bar(progress), stream
        else:
            lines = Lines(stream)
            yield lines, stream
            lines.finish()


@contextlib.contextmanager
def _own_stderr() -> Iterator[IO[str]]:
    """Standard error over a descriptor of its own, which stays the terminal's while the other one is redirected."""
    try:
        descriptor = os.dup(sys.stderr.fileno())
    except (OSError, ValueError):  # a stream inside this program
        yield sys.stderr
        return
    with os.fdopen(descriptor, "w", encoding=sys.stderr.encoding, errors="replace") as stream:
        yield stream


def _progress(stream: IO[str]) -> Progress:
    """The width is read here: rich would ask the standard streams, which do not lead to the terminal meanwhile."""
    width = os.get_terminal_size(stream.fileno()).columns or _UNKNOWN_WIDTH
    console = Console(file=stream, width=width)
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[counts]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("{task.fields[law]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        console=console,
        transient=True,
        expand=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
