"""The figures of a day with a card as a picture: each kernel beside its limit, and tokens a second beside transformers.

python ci/device/plot.py kernels.json engine.json picture.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SERIES = {"pagedkv": "pagedkv", "pagedkv_eager": "pagedkv, eager", "transformers": "transformers"}


def draw(kernels: Mapping[str, Any], engine: Mapping[str, Any], to: Path) -> None:
    """Two panels. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    attention(left, kernels)
    tokens(right, engine)
    figure.suptitle(f"{kernels['device']}, {kernels['dtype']}")
    figure.savefig(to, dpi=120)


def attention(axes: Any, kernels: Mapping[str, Any]) -> None:
    """The share of the device's limit, of ours and of torch's own attention: both move the same bytes."""
    rows = kernels["attention"]
    names = [f"{row['rows']} x {row['queries']} at {row['context']}" for row in rows]
    places = range(len(rows))
    axes.barh(places, [row["share_of_limit"] for row in rows], height=0.4, label="pagedkv")
    theirs = [row["share_of_limit"] * row["seconds"] / row["seconds_sdpa"] for row in rows]
    axes.barh([place + 0.4 for place in places], theirs, height=0.4, label="scaled_dot_product_attention")
    axes.set_yticks([place + 0.2 for place in places], names)
    axes.set_xlabel("share of what the device can read or multiply")
    axes.legend()


def tokens(axes: Any, engine: Mapping[str, Any]) -> None:
    """Output tokens a second against the number of requests."""
    for name, label in SERIES.items():
        speeds = {int(size): speed for size, speed in engine.get(name, {}).items()}
        axes.plot(list(speeds), list(speeds.values()), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("requests at once")
    axes.set_ylabel(f"output tokens a second, {engine['shape']}")
    axes.legend()


def main(arguments: Sequence[str]) -> None:
    kernels, engine, to = map(Path, arguments)
    draw(json.loads(kernels.read_text("utf-8")), json.loads(engine.read_text("utf-8")), to)


if __name__ == "__main__":
    main(sys.argv[1:])
