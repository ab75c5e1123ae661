"""The tables of a comparison, from its JSON.

python ci/bench/table.py bench-results/compare.json    # Markdown, for docs/performance.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells as text; `title` is one line."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """As GitHub shows it."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join([f"{self.title}:", "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Speed and ratios, latency, and what each engine is."""
    return [_speed(report), _latency(report), _engines(report)]


def measured_on(report: Mapping[str, Any]) -> str:
    """The machine and the work in a few words."""
    machine, work = report["machine"], report["work"]
    return (
        f"Measured on {machine['date']}: {machine['processor']}, {report['threads']} threads, "
        f"{machine['memory'] / 2**30:.0f} GiB, {machine['system']}, torch {machine['torch']}, pagedkv "
        f"{machine['pagedkv']}{_commit(machine)}. {report['model']}, {work['output_len']} output tokens, "
        f"{work['rounds']} interleaved rounds, median (least..most)."
    )


def _commit(machine: Mapping[str, Any]) -> str:
    return f" ({machine['commit']})" if machine.get("commit") else ""


def _speed(report: Mapping[str, Any]) -> Table:
    ours, *peers = report["names"]
    return Table(
        title="Output tokens a second, and pagedkv's as a multiple",
        columns=("input", "requests", ours, *peers, "to the best peer"),
        rows=tuple(
            (*_size(row), spread(row["tokens_per_second"][ours]), *_peers(row, peers), _best(row))
            for row in report["rows"]
        ),
    )


def _peers(row: Mapping[str, Any], peers: Sequence[str]) -> list[str]:
    return [f"{spread(row['tokens_per_second'][peer])}, {row['ratio'][peer]:.2f}x" for peer in peers]


def _best(row: Mapping[str, Any]) -> str:
    return "-" if row["best_peer"] is None else f"**{row['ratio'][row['best_peer']]:.2f}x** {row['best_peer']}"


def _latency(report: Mapping[str, Any]) -> Table:
    return Table(
        title="First token / between tokens, milliseconds",
        columns=("input", "requests", *report["names"]),
        rows=tuple((*_size(row), *(_times(row, name) for name in report["names"])) for row in report["rows"]),
    )


def _times(row: Mapping[str, Any], name: str) -> str:
    medians = [row[figure][name] for figure in ("time_to_first_token", "time_between_tokens_p50")]
    return " / ".join("-" if each is None else f"{each['median'] * 1000:.1f}" for each in medians)


def _engines(report: Mapping[str, Any]) -> Table:
    rows = [_engine(report, name) for name in report["names"]]
    absent = [(name, f"not measured here: {why}", "", "", "", "") for name, why in report["not_measured"].items()]
    return Table(
        title="The engines",
        columns=("engine", "version", "dtype, cache", "seconds to load", "from start to first token", "equal tokens"),
        rows=(*rows, *absent),
    )


def _engine(report: Mapping[str, Any], name: str) -> tuple[str, ...]:
    facts = report["engines"][name]
    shares = [row["equal"][name] for row in report["rows"] if name in row["equal"]]
    equal = f"{min(shares):.0%} to {max(shares):.0%}" if shares else "-"
    kinds = f"{facts.get('dtype')}, {facts.get('cache') or facts.get('kv_cache_dtype')}"
    version = facts.get("version") or report["machine"]["pagedkv"]
    return (name, version, kinds, f"{facts['load_seconds']:.1f}", f"{facts['first_token_seconds']:.1f}", equal)


def _size(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row["input_len"]), str(row["batch_size"])


def spread(values: Mapping[str, float]) -> str:
    """A median, and how far the rounds lie apart."""
    return f"{values['median']:.1f} ({values['min']:.1f}..{values['max']:.1f})"


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(file: Path) -> None:
    """Print the tables of FILE as Markdown."""
    report = json.loads(file.read_text(encoding="utf-8"))
    click.echo("\n\n".join([measured_on(report), *(table.markdown() for table in tables(report))]))


if __name__ == "__main__":
    main()
