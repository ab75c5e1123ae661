"""The tables of a measured server, from its JSON.

python ci/bench/serve_report.py bench-results/serve.json    # Markdown, for docs/performance.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from table import Table, measured_on, spread

FIGURES = (
    "requests_per_second",
    "tokens_per_second",
    "time_to_first_token_p50",
    "time_to_first_token_p99",
    "time_between_tokens_p50",
    "time_between_tokens_p99",
    "time_of_request_p50",
    "time_of_request_p99",
)
"""Of a run, summed up over the rounds."""

Report = Mapping[str, Any]


def tables(report: Report) -> list[Table]:
    """Speed and ratios, requests, latency of streams and of whole answers, processor time, and who was measured."""
    streams = [row for row in report["rows"] if row["mode"] == "stream"]
    made = [_speed(report), _requests(report), _latency(report, streams), _whole(report), _cores(report), _who(report)]
    return [each for each in made if each.rows]


def _speed(report: Report) -> Table:
    names = report["names"]
    others = [name for name in names if name != "server"]
    return Table(
        title="Output tokens a second; behind the others, the server's as a multiple of theirs",
        columns=("clients", "answers", "server", *others),
        rows=tuple(
            (*_level(row), spread(row["tokens_per_second"]["server"]), *(_beside(row, name) for name in others))
            for row in report["rows"]
        ),
    )


def _beside(row: Mapping[str, Any], name: str) -> str:
    return f"{spread(row['tokens_per_second'][name])}, **{row['ratio'][name]:.3f}x**"


def _requests(report: Report) -> Table:
    return Table(
        title="Requests a second",
        columns=("clients", "answers", "requests", *report["names"]),
        rows=tuple(
            (
                *_level(row),
                str(row["requests"]),
                *(f"{row['requests_per_second'][n]['median']:.2f}" for n in report["names"]),
            )
            for row in report["rows"]
        ),
    )


def _latency(report: Report, rows: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        title="First token, p50 and p99 / between tokens, p50 and p99, milliseconds",
        columns=("clients", *report["names"]),
        rows=tuple((str(row["clients"]), *(_times(row, name) for name in report["names"])) for row in rows),
    )


def _times(row: Mapping[str, Any], name: str) -> str:
    kinds = ("time_to_first_token", "time_between_tokens")
    return " / ".join(", ".join(_ms(row[f"{kind}_p{share}"][name]) for share in (50, 99)) for kind in kinds)


def _whole(report: Report) -> Table:
    rows = [row for row in report["rows"] if row["mode"] == "whole"]
    shares = (50, 99)
    return Table(
        title="Whole answers, p50 and p99, milliseconds",
        columns=("clients", *report["names"]),
        rows=tuple(
            (
                str(row["clients"]),
                *(", ".join(_ms(row[f"time_of_request_p{p}"][n]) for p in shares) for n in report["names"]),
            )
            for row in rows
        ),
    )


def _ms(values: Mapping[str, float] | None) -> str:
    return "-" if values is None else f"{values['median'] * 1000:.1f}"


def _cores(report: Report) -> Table:
    return Table(
        title="Cores in use: processor seconds a second of each part",
        columns=("clients", "answers", *report["names"]),
        rows=tuple((*_level(row), *(_parts(row["cores"][n]) for n in report["names"])) for row in report["rows"]),
    )


def _parts(cores: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(f"{part} {values['median']:.3f}" for part, values in cores.items())


def _who(report: Report) -> Table:
    rows = [(name, f"{report['engines'][name]['load_seconds']:.1f}", _prompt(report, name)) for name in report["names"]]
    absent = [(name, "-", f"not measured here: {why}") for name, why in report["not_measured"].items()]
    return Table(title="Who was measured", columns=("name", "seconds to load", "prompts"), rows=(*rows, *absent))


def _prompt(report: Report, name: str) -> str:
    return str(report["engines"][name].get("prompt", "ids"))


def _level(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row["clients"]), str(row["mode"])


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(file: Path) -> None:
    """Print the tables of FILE as Markdown."""
    report = json.loads(file.read_text(encoding="utf-8"))
    click.echo("\n\n".join([measured_on(report), *(table.markdown() for table in tables(report))]))


if __name__ == "__main__":
    main()
