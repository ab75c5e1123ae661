"""`pagedkv backends`: every installed backend, its devices, and every reason for a no."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from pagedkv.api import DeviceInfo, UnsupportedError
from pagedkv.cli.model_options import OPTIONS
from pagedkv.cli.tables import print_table
from pagedkv.config import EngineConfig, show_bytes
from pagedkv.core.negotiation import Choice, Requirements, negotiate
from pagedkv.plugins import Status, probe_all


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a backend can run the model: what would be agreed on, or every reason against."""

    choice: Choice | None
    reasons: tuple[str, ...] = ()


@click.command("backends")
@click.option(
    "--model", metavar="MODEL", help="Say of each backend whether it can run this model; its weights are not read."
)
@click.option("--dtype", **OPTIONS["dtype"])
@click.option("--kv-cache-dtype", **OPTIONS["kv_cache_dtype"])
@click.option("--block-size", **OPTIONS["block_size"])
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
def backends(model: str | None, as_json: bool, **settings: Any) -> None:
    """List the installed backends, their devices, and every reason for a no.

    Each plugin is asked in a process of its own; this one imports none of them and opens no device. The other options
    are those of an engine, and need --model.

    \b
    pagedkv backends
    pagedkv backends --model demo
    pagedkv backends --model ./llama --dtype bfloat16 --block-size 128
    pagedkv backends --json | jq '.[] | select(.status != "ok")'
    pagedkv backends --model demo --json | jq '.[] | select(.model.ok) | .name'
    """
    wanted = _wanted(model, {name: value for name, value in settings.items() if value is not None})
    statuses = probe_all()
    fits = None if wanted is None else [fit(status, wanted) for status in statuses]
    if as_json:
        click.echo(json.dumps(_records(statuses, fits), indent=2))
    else:
        show(statuses, fits)


def _wanted(model: str | None, settings: Mapping[str, Any]) -> Requirements | None:
    """What the model asks of any backend; None without a model."""
    if model is not None:
        from pagedkv.engine.setup import model_requirements

        return model_requirements(EngineConfig.of(model=model, **settings))
    if settings:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in settings)
        raise click.UsageError(f"{flags} {'concerns' if len(settings) == 1 else 'concern'} a model; give --model too")
    return None


def fit(status: Status, wanted: Requirements) -> Fit:
    """What the backend and the model would agree on, as an engine asks it."""
    offer = status.offer
    if status.status != "ok" or offer is None:
        return Fit(None, status.reasons)
    try:
        return Fit(negotiate(offer, wanted, backend=status.name))
    except UnsupportedError as error:
        return Fit(None, error.reasons)


def _records(statuses: Sequence[Status], fits: Sequence[Fit] | None) -> list[dict[str, Any]]:
    if fits is None:
        return [as_record(status) for status in statuses]
    return [as_record(s) | {"model": fit_record(f)} for s, f in zip(statuses, fits, strict=True)]


def fit_record(fit: Fit) -> dict[str, Any]:
    """What `--json` prints of a backend and the model."""
    choice = None
    if fit.choice is not None:
        fields = {f.name: getattr(fit.choice, f.name) for f in dataclasses.fields(fit.choice)}
        choice = fields | {"features": sorted(fit.choice.features), "notes": list(fit.choice.notes)}
    return {"ok": fit.choice is not None, "choice": choice, "reasons": list(fit.reasons)}


def show(statuses: Sequence[Status], fits: Sequence[Fit] | None = None) -> None:
    """The table, one row a backend; with `fits` also what it and the model agree on."""
    columns = ["name", "distribution", "api", "status", "score", "devices"]
    rows = [
        [s.name, f"{s.distribution} {s.version}", s.api or "?", s.status, str(s.score), devices(s)] for s in statuses
    ]
    reasons = [s.reasons for s in statuses]
    if fits is not None:
        columns.append("model")
        rows = [[*row, _verdict(fit)] for row, fit in zip(rows, fits, strict=True)]
        reasons = [tuple(dict.fromkeys((*s.reasons, *fit.reasons))) for s, fit in zip(statuses, fits, strict=True)]
    print_table([*columns, "reasons"], [[*row, "\n".join(why)] for row, why in zip(rows, reasons, strict=True)])


def _verdict(fit: Fit) -> str:
    if fit.choice is None:
        return "no"
    return f"yes: {fit.choice.dtype}, cache {fit.choice.kv_dtype}, blocks of {fit.choice.block_size}"


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
