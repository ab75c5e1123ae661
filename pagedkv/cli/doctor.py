"""`pagedkv doctor`: what is here, what would be chosen and why, and what is known to work."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

import click

from pagedkv import __version__
from pagedkv.api import API_VERSION
from pagedkv.cli.backends import as_record, show
from pagedkv.cli.tables import print_table
from pagedkv.environment import ENVIRONMENT
from pagedkv.plugins import Status, discover, find, preview, probe_all, requested

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "huggingface-hub", "stevedore", "transformers")
"""Whose versions a bug report needs; the distributions of the backends come on top."""

VERIFIED = (("cpu", "x86-64, Linux", "run by the test suite"),)
"""(backend, hardware, how): nothing else has been verified yet."""


@click.command("doctor")
@click.option("--backend", metavar="NAME", help="Look at this backend only, as if it were chosen.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.pass_context
def doctor(context: click.Context, backend: str | None, as_json: bool) -> None:
    """Show what is here, what would be chosen and why.

    Exit code 1 when no backend can be used, or not the one that --backend or PAGEDKV_BACKEND names.

    \b
    pagedkv doctor
    pagedkv doctor --backend cpu
    pagedkv doctor --json > report.json
    """
    name, _ = requested(backend)
    if backend is not None and name is not None:
        find(name)
    statuses = probe_all([name] if backend is not None and name is not None else None, diagnose=True)
    chosen, why = preview(statuses, backend)
    report = collect(statuses, chosen, why)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _show(report, statuses)
    context.exit(0 if chosen else 1)


def collect(statuses: list[Status], chosen: str | None, why: str) -> dict[str, Any]:
    """The whole report as JSON values."""
    return {
        "pagedkv": __version__,
        "contract": "{}.{}".format(*API_VERSION),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": f"{platform.platform()} {platform.machine()}",
        "packages": _packages(),
        "environment": _environment(),
        "backends": [_backend(status) for status in statuses],
        "choice": {"backend": chosen, "why": why},
        "verified": [{"backend": name, "hardware": where, "how": how} for name, where, how in VERIFIED],
    }


def _backend(status: Status) -> dict[str, Any]:
    formats = sorted(status.offer.weight_formats) if status.offer else []
    return {**as_record(status), "weight_formats": formats, "diagnose": dict(status.diagnose)}


def _packages() -> dict[str, str]:
    names = dict.fromkeys((*PACKAGES, *(found.distribution for found in discover())))
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _environment() -> dict[str, str]:
    """The variables that are set, those that pagedkv does not read included and marked."""
    names = sorted(name for name in os.environ if name.startswith("PAGEDKV_"))
    return {name: os.environ[name] + ("" if name in ENVIRONMENT else " (unknown, has no effect)") for name in names}


def _show(report: dict[str, Any], statuses: list[Status]) -> None:
    pairs = ("", "")
    print_table(pairs, [(key, str(report[key])) for key in ("pagedkv", "contract", "python", "platform")])
    click.echo("\npackages")
    print_table(pairs, list(report["packages"].items()))
    click.echo("\nenvironment")
    print_table(pairs, list(report["environment"].items()) or [("no PAGEDKV_* variable is set", "")])
    click.echo("\nbackends")
    show(statuses)
    for status, record in zip(statuses, report["backends"], strict=True):
        packed = {"packed weights": ", ".join(record["weight_formats"])} if record["weight_formats"] else {}
        if said := {**status.diagnose, **packed}:
            click.echo(f"\n{status.name} says")
            print_table(pairs, list(said.items()))
    click.echo("\nverified so far")
    print_table(("backend", "hardware", "how"), VERIFIED)
    choice = report["choice"]
    click.echo(f"\nwould be chosen: {choice['backend'] or 'none'} ({choice['why']})")
