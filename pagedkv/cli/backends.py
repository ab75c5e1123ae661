"""`pagedkv backends`: every installed backend, its devices, and every reason for a no."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import click

from pagedkv.api import DeviceInfo
from pagedkv.cli.tables import print_table
from pagedkv.config import show_bytes
from pagedkv.plugins import Status, probe_all


@click.command("backends")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
def backends(as_json: bool) -> None:
    """List the installed backends, their devices, and every reason for a no.

    Each plugin is asked in a process of its own; this one imports none of them and opens no device.

    \b
    pagedkv backends
    pagedkv backends --json | jq '.[] | select(.status != "ok")'
    """
    statuses = probe_all()
    if as_json:
        click.echo(json.dumps([as_record(status) for status in statuses], indent=2))
    else:
        show(statuses)


def show(statuses: Sequence[Status]) -> None:
    """The table, one row a backend."""
    rows = [
        [
            s.name,
            f"{s.distribution} {s.version}",
            s.api or "?",
            s.status,
            str(s.score),
            devices(s),
            "\n".join(s.reasons),
        ]
        for s in statuses
    ]
    print_table(["name", "distribution", "api", "status", "score", "devices", "reasons"], rows)


def devices(status: Status) -> str:
    """One line a device."""
    return "\n".join(f"{device.index}: {device.kind}{_memory(device)}" for device in status.devices)


def as_record(status: Status) -> dict[str, Any]:
    """What `--json` prints for one backend."""
    return {
        "name": status.name,
        "distribution": status.distribution,
        "version": status.version,
        "api": status.api,
        "status": status.status,
        "score": status.score,
        "devices": [{f.name: getattr(device, f.name) for f in dataclasses.fields(device)} for device in status.devices],
        "reasons": list(status.reasons),
    }


def _memory(device: DeviceInfo) -> str:
    if device.total is None:
        return ""
    return f", {show_bytes(device.free)} free of {show_bytes(device.total)}"
