"""`pagedkv doctor`: what is here, what would be chosen and why, and the command that mends each trouble."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
from rich.console import Console

from pagedkv.cli.backends import as_record, devices
from pagedkv.cli.tables import print_table
from pagedkv.config import show_bytes
from pagedkv.diagnosis.backends import shown
from pagedkv.diagnosis.findings import Finding
from pagedkv.diagnosis.privacy import Privacy
from pagedkv.diagnosis.report import Report, examine
from pagedkv.diagnosis.variables import UNKNOWN
from pagedkv.plugins import Status

VERIFIED = (("cpu", "x86-64, Linux", "run by the test suite"),)
"""(backend, hardware, how): nothing else has been verified yet; what a backend says of its own state comes on top."""

_COLORS = {"broken": "red", "warning": "yellow", "note": None, "warnings": "yellow", "fine": "green"}


@click.command("doctor")
@click.argument("model", required=False)
@click.option("--backend", metavar="NAME", help="Look at this backend only, as if it were chosen.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for a bug report, without personal paths.")
@click.pass_context
def doctor(context: click.Context, model: str | None, backend: str | None, as_json: bool) -> None:
    """Show what is here, what would be chosen and why, and the command that mends each trouble.

    With MODEL also what would fit; `pagedkv plan` says more of that, for other devices too.

    Exit code 0: fine, 1: warnings, 2: broken, when no backend can be used, or not the one that --backend or
    PAGEDKV_BACKEND names, or when MODEL cannot run. Plugins and torch are asked in processes of their own; one that
    hangs is stopped.

    \b
    pagedkv doctor
    pagedkv doctor ./Qwen3-0.6B
    pagedkv doctor --backend cpu
    pagedkv doctor --json > report.json
    pagedkv doctor --json | jq -r '.findings[] | select(.level != "note") | .command'
    """
    with _spinner() as progress:
        report = examine(backend, model, progress=progress)
    if as_json:
        click.echo(json.dumps(as_json_values(report), indent=2))
    else:
        _show(report)
    context.exit(report.exit_code)


@contextlib.contextmanager
def _spinner() -> Iterator[Callable[[str], None]]:
    """A callback that says on a terminal what is being waited for."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda doing: None
        return
    with console.status("looking") as status:
        yield status.update


def as_json_values(report: Report) -> dict[str, Any]:
    """The report for a bug tracker: the keys stay from release to release, and nothing in it is personal."""
    kept = {word for status in report.statuses for word in (status.name, status.distribution, status.status)}
    values = {
        **report.facts,
        "backends": [_backend(status) for status in report.statuses],
        "verified": _verified(report.statuses),
        "findings": [finding.record() for finding in report.findings],
        "verdict": report.verdict,
        "exit_code": report.exit_code,
    }
    model = report.facts["model"]
    kept |= {*values, *report.facts["packages"]}
    cleaned: dict[str, Any] = Privacy([model["name"]] if model else [], kept=kept).clean(values)
    return cleaned


def _verified(statuses: Sequence[Status]) -> list[dict[str, str]]:
    """What was verified on which hardware; the line `state` of a `diagnose()` is of a backend that was on none."""
    own = [(status.name, "none", status.diagnose["state"]) for status in statuses if "state" in status.diagnose]
    return [{"backend": name, "hardware": where, "how": how} for name, where, how in (*VERIFIED, *own)]


def _backend(status: Status) -> dict[str, Any]:
    return {**as_record(status), "weight_formats": _formats(status), "diagnose": dict(status.diagnose)}


def _formats(status: Status) -> list[str]:
    return sorted(status.offer.weight_formats) if status.offer else []


# -- one screen --------------------------------------------------------------------------------------------------------


def _show(report: Report) -> None:
    print_table(("", ""), _summary(report.facts))
    click.echo("\nbackends")
    print_table(("name", "status", "score", "devices", "why not"), [_row(status) for status in report.statuses])
    for status in shown(report.statuses, report.choice.backend):
        click.echo(f"\n{status.name} says")
        packed = {"packed weights": ", ".join(_formats(status))} if _formats(status) else {}
        print_table(("", ""), list({**status.diagnose, **packed}.items()))
    if report.facts["model"] is not None and report.facts["model"]["summary"]:
        click.echo(f"\n{report.facts['model']['name']}")
        print_table(("", ""), report.facts["model"]["summary"])
    click.echo("")
    for finding in report.findings:
        _show_finding(finding)
    once = "" if report.facts["torch"]["version"] or report.choice.backend is None else ", once torch loads"
    click.echo(f"would be chosen: {report.choice.backend or 'none'} ({report.choice.why}){once}")
    click.echo(click.style(_verdict(report), fg=_COLORS[report.verdict]))


def _row(status: Status) -> list[str]:
    unused = [device.reason or "only when chosen by name" for device in status.devices if device.score == 0]
    return [status.name, status.status, str(status.score), devices(status), "\n".join(unused or status.reasons)]


def _show_finding(finding: Finding) -> None:
    click.echo(f"{click.style(finding.level, fg=_COLORS[finding.level], bold=True)}: {finding.what}")
    click.echo(f"  why   {finding.why}")
    if finding.command:
        click.echo(f"  mend  {finding.command}")


def _verdict(report: Report) -> str:
    counts = {level: sum(f.level == level for f in report.findings) for level in ("broken", "warning", "note")}
    if report.verdict == "fine":
        return "verdict: fine" + (f", {counts['note']} to note" if counts["note"] else "")
    parts = [f"{counts['broken']} broken"] if counts["broken"] else []
    return "verdict: " + ", ".join([*parts, *([f"warnings: {counts['warning']}"] if counts["warning"] else [])])


def _summary(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("pagedkv", f"{facts['pagedkv']}, contract {facts['contract']}"),
        ("system", _system(facts["system"])),
        ("python", _python(facts["python"])),
        ("torch", _torch(facts["torch"])),
        ("processor", _processor(facts["processor"])),
        ("memory", _memory(facts["memory"])),
        ("limits", _limits(facts["limits"])),
        ("packages", ", ".join(f"{name} {version}" for name, version in facts["packages"].items())),
        ("pairs", _pairs(facts["pairs"])),
        ("environment", _environment(facts["environment"])),
    ]


def _joined(parts: Sequence[str | None]) -> str:
    return ", ".join(part for part in parts if part)


def _system(facts: Mapping[str, Any]) -> str:
    container = f"in a container ({facts['container']})" if facts["container"] else "no container"
    wsl = f"WSL {facts['wsl']}" if facts["wsl"] else None
    kernel = f"{facts['system']} {facts['release']} {facts['machine']}"
    return _joined([facts["distribution"], kernel, facts["libc"], container, wsl])


def _python(facts: Mapping[str, Any]) -> str:
    kind = "virtual environment" if facts["virtual_environment"] else "no virtual environment"
    return f"{facts['version']} ({facts['implementation']}), {kind}, {facts['executable']}"


def _torch(facts: Mapping[str, Any]) -> str:
    if facts["error"] or not facts["installed"]:
        return "see below"
    builds = " ".join(f"{name} {version}" for name, version in facts["builds"].items())
    architectures = f"code for {' '.join(facts['architectures'])}" if facts["architectures"] else None
    built = f"built with {builds}" if builds else "built for processors alone"
    return _joined([facts["version"], built, architectures, f"imported in {facts['seconds']:.1f} s"])


def _processor(facts: Mapping[str, Any]) -> str:
    quota = f"quota {facts['quota']:g} cores" if facts["quota"] is not None else None
    cores = f"{facts['affinity']} of {facts['cores']} cores"
    return _joined([facts["name"], cores, quota, " ".join(facts["instructions"]) or "no instruction set listed"])


def _memory(facts: Mapping[str, Any]) -> str:
    swap = f"{show_bytes(facts['swap_used'])} of {show_bytes(facts['swap_total'])} swap used"
    limit = facts["cgroup_limit"]
    group = f"control group: {show_bytes(limit)}, {show_bytes(facts['cgroup_left'])} left" if limit else "no limit set"
    swap = swap if facts["swap_total"] else "no swap"
    return _joined([f"{show_bytes(facts['available'])} available of {show_bytes(facts['total'])}", swap, group])


def _limits(facts: Mapping[str, int | None]) -> str:
    files = "unlimited" if facts["open_files"] is None else str(facts["open_files"])
    sizes = {name: facts[name] for name in ("locked_memory", "address_space")}
    words = [f"{n.replace('_', ' ')} {'unlimited' if v is None else show_bytes(v)}" for n, v in sizes.items()]
    return _joined([f"open files {files}", *words])


def _environment(facts: Mapping[str, str]) -> str:
    said = (f"{name} ({value})" if value == UNKNOWN else f"{name}={value}" for name, value in facts.items())
    return ", ".join(said) or "no variable that matters is set"


def _pairs(pairs: Sequence[Mapping[str, Any]]) -> str:
    said = [f"{p['package']} {p['version']} with {p['beside']} {p['beside_version']}: {p['state']}" for p in pairs]
    return _joined(said) or "none in the table"
