"""`pagedkv certify`: the conformance kit on one backend, and the certificate it gives."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pagedkv.api.errors import BackendUnavailable, ConfigError
from pagedkv.cli.common import INTERRUPTED
from pagedkv.cli.tables import print_table

if TYPE_CHECKING:
    from pagedkv.conformance.certificate import Case, Certificate
    from pagedkv.conformance.run import Outcome
    from pagedkv.conformance.subject import Subject

STDOUT = "-"

_log = logging.getLogger("pagedkv.cli")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the command line chose."""

    name: str
    device: int | None
    options: tuple[str, ...]
    select: str | None
    json: str | None
    markdown: str | None

    @property
    def command(self) -> str:
        """The command line without the cases it chose."""
        options = [word for text in self.options for word in ("--backend-option", text)]
        device = [] if self.device is None else ["--device", str(self.device)]
        return shlex.join(["pagedkv", "certify", self.name, *device, *options])

    @property
    def json_target(self) -> str | None:
        """Where the JSON goes: what was named; a file named after the backend for a run of the whole kit."""
        whole = None if self.select else f"pagedkv-certificate-{self.name.replace(os.sep, '-')}.json"
        return self.json or whole


@click.command("certify")
@click.argument("name", metavar="NAME")
@click.option("-k", "select", metavar="EXPR", help='Run these cases only, such as "copy and not host".')
@click.option(
    "--json", metavar="FILE", help="Where the certificate goes; - is standard output. [pagedkv-certificate-NAME.json]"
)
@click.option("--markdown", metavar="FILE", help="Write it as Markdown too; - is standard output.")
@click.option("--device", type=int, metavar="N", help="Index of the backend's device; else its best one.")
@click.option("--backend-option", "options", multiple=True, metavar="NAME=VALUE", help="An option; may be repeated.")
@click.pass_context
def certify(
    context: click.Context,
    name: str,
    select: str | None,
    json: str | None,
    markdown: str | None,
    device: int | None,
    options: tuple[str, ...],
) -> None:
    """Test the installed backend NAME against every law of the contract, and write its certificate.

    Which cases apply follows from what the backend declares. A level is reached only if all of its cases were run,
    passed, and none was skipped. With -k the result is partial: it says what failed, and certifies nothing.

    Exit code 0: certified. 1: a case failed, was skipped, or was left out. 2: the kit could not be started that way.
    130: stopped by Ctrl-C. PAGEDKV_CHECK=1 checks every call of the kit as well.

    \b
    pagedkv certify cpu
    pagedkv certify mine --json certificate.json --markdown certificate.md
    pagedkv certify mine -k "copy or append" --backend-option threads=1
    """
    chosen = Choice(name=name, device=device, options=options, select=select, json=json, markdown=markdown)
    _check(chosen)
    outcome = _run(chosen)
    _tell(outcome)
    if STDOUT not in (chosen.json, chosen.markdown):
        _show(outcome.certificate, chosen)
    _write(outcome.certificate, chosen)
    if outcome.interrupted:
        click.echo(f"interrupted after {len(outcome.certificate.cases)} cases", err=True)
    context.exit(INTERRUPTED if outcome.interrupted else 0 if outcome.certificate.passed else 1)


def _check(chosen: Choice) -> None:
    """Refuse what would fail only after the run."""
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("the kit runs on pytest, which is not installed: pip install 'pagedkv[certify]'")
    if chosen.json == chosen.markdown == STDOUT:
        raise click.UsageError("--json - and --markdown - would both print to standard output; give one of them a file")
    for option, target in (("--json", chosen.json_target), ("--markdown", chosen.markdown)):
        if target is not None and target != STDOUT and not _can_be_written(Path(target)):
            raise ConfigError(f"{target} cannot be written; name a file in a folder of yours with {option} FILE")


def _can_be_written(path: Path) -> bool:
    folder = path.resolve().parent
    return folder.is_dir() and not path.is_dir() and os.access(path if path.exists() else folder, os.W_OK)


def _run(chosen: Choice) -> Outcome:
    from pagedkv.cli.certify_display import display
    from pagedkv.conformance.run import run
    from pagedkv.conformance.subject import Subject

    try:
        subject = Subject(chosen.name, device=chosen.device, options=chosen.options)
        with contextlib.closing(subject):
            _announce(subject)
            with display(quiet=not _log.isEnabledFor(logging.INFO)) as (watcher, stream):
                return run(subject, watcher, stream, select=chosen.select)
    except BackendUnavailable as error:
        raise BackendUnavailable(f"{error}. So nothing can be certified here{_own_state(chosen.name)}") from error


def _own_state(name: str) -> str:
    """What the backend says of what was verified elsewhere, or instead: the line `state` of its `diagnose()`."""
    from pagedkv.plugins import probe_all

    said = next((status.diagnose.get("state") for status in probe_all([name], diagnose=True)), None)
    return f". It says of itself: {said}" if said else ""


def _announce(subject: Subject) -> None:
    """Make the instance here, so that what it logs and how it fails is seen before the display takes over."""
    features = ", ".join(sorted(subject.capabilities.features)) or "no optional feature"
    _log.info("%s on %s declares %s", subject.selected.found, subject.device.kind, features)


def _tell(outcome: Outcome) -> None:
    """What was said during the run and belongs to no case."""
    for warning in outcome.warnings:
        _log.warning("%s", warning)
    if outcome.printed.strip():
        _log.warning("printed outside of all cases:\n%s", outcome.printed.rstrip())


def _show(made: Certificate, chosen: Choice) -> None:
    from pagedkv.conformance import report

    click.echo(report.title(made))
    print_table(("", ""), report.identity(made))
    click.echo()
    print_table(report.LEVEL_COLUMNS, report.level_rows(made))
    click.echo()
    print_table(report.LAW_COLUMNS, report.law_rows(made))
    if figures := report.figure_rows(made):
        click.echo()
        print_table(report.FIGURE_COLUMNS, figures)
    for outcome in ("skipped", "failed"):
        for case in report.bad_cases(made, outcome):
            _show_case(case, chosen)
    if under := made.under_declared():
        click.echo(f"\nworks although it is not declared: {', '.join(under)}; declare it, or refuse it")
    click.echo(f"\n{report.headline(made)}")


def _show_case(case: Case, chosen: Choice) -> None:
    from pagedkv.conformance.report import selection

    click.echo(f"\n{case.outcome}: {case.law}\n  {case.message.replace(chr(10), chr(10) + '  ')}")
    click.echo(f"  run it: {chosen.command} -k {shlex.quote(selection(case))}")


def _write(made: Certificate, chosen: Choice) -> None:
    """Print or write the certificate; one of an interrupted run only where a file was named for it."""
    from pagedkv.conformance.report import markdown

    named = chosen.json or (chosen.json_target if made.complete else None)
    for target, text in ((named, made.to_json), (chosen.markdown, lambda: markdown(made))):
        if target == STDOUT:
            click.echo(text(), nl=False)
        elif target is not None:
            Path(target).write_text(text(), encoding="utf-8")
            _log.info("written to %s", target)
    if named is None:
        _log.info("no certificate is written of a run that left cases out; --json FILE writes one all the same")
