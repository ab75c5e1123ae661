"""A comparison as a picture: speed and time between tokens against the number of requests.

python ci/bench/plot.py bench-results/compare.json picture.png
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

PANELS = (("tokens_per_second", "output tokens a second", 1.0), ("time_between_tokens_p50", "ms between tokens", 1e3))


def draw(report: Mapping[str, Any], to: Path) -> None:
    """One line of panels for each input length; bars span the least and the most. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths = sorted({row["input_len"] for row in report["rows"]})
    figure = Figure(figsize=(5 * len(PANELS), 3.6 * len(lengths)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(lengths), len(PANELS), squeeze=False)
    for length, line in zip(lengths, grid, strict=True):
        rows = [row for row in report["rows"] if row["input_len"] == length]
        for axes, (figure_name, label, scale) in zip(line, PANELS, strict=True):
            for name in report["names"]:
                _curve(axes, name, [(row["batch_size"], row[figure_name][name]) for row in rows], scale)
            axes.set(xlabel=f"requests at once, {length} input tokens", ylabel=label, ylim=(0, None))
            axes.set_xticks(sorted({row["batch_size"] for row in rows}))
            axes.grid(alpha=0.3)
    grid[0][0].legend()
    figure.suptitle(f"{report['model']}, {report['machine']['processor']}, {report['threads']} threads", fontsize=10)
    figure.savefig(to, dpi=120)


def _curve(axes: Any, name: str, points: Sequence[tuple[int, Mapping[str, float] | None]], scale: float) -> None:
    known = sorted((size, spread) for size, spread in points if spread is not None)
    middle = [spread["median"] * scale for _, spread in known]
    low, high = ([abs(s[end] - s["median"]) * scale for _, s in known] for end in ("min", "max"))
    axes.errorbar([size for size, _ in known], middle, yerr=[low, high], marker="o", capsize=3, label=name)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("to", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def main(file: Path, to: Path) -> None:
    """Draw the comparison of FILE."""
    draw(json.loads(file.read_text(encoding="utf-8")), to)


if __name__ == "__main__":
    main()
