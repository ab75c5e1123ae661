"""A picture of memory against concurrent sequences, one line for each length."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pagedkv.api.errors import ConfigError
from pagedkv.planning.plan import Plan

_log = logging.getLogger("pagedkv.planning")

GIB = 1 << 30
POINTS = 24


def draw(plan: Plan, path: Path) -> None:
    """Write the picture; its kind follows from the file's name. Raises `ConfigError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}): pip install matplotlib, or leave --plot out") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for length, counts, sizes in curves(plan):
        axes.plot(counts, [size / GIB for size in sizes], marker=".", label=f"{length} tokens each")
    _mark(axes, plan)
    title = f"{Path(plan.config.model).name} on {plan.fit.target.title}"
    axes.set(xlabel="sequences at once", ylabel="GiB", title=title)
    axes.set_ylim(bottom=0)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error
    _log.info("written to %s", path)


def curves(plan: Plan) -> list[tuple[int, list[int], list[int]]]:
    """(length, numbers of sequences, bytes that they take with weights and workspace), a little past what fits."""
    result = []
    for length, count in plan.sequences:
        past = count + count // 10 + 1
        counts = sorted({1, count or 1, *range(1, past + 1, -(-past // POINTS)), past})
        result.append((length, counts, [plan.fit.needs(n, length) for n in counts]))
    return result


def _mark(axes: Any, plan: Plan) -> None:
    """Where memory ends, and what the weights take of it."""
    total = plan.fit.target.memory().total
    lines = (
        (plan.ceiling, "may be taken", "black"),
        (total, "memory", "grey"),
        (plan.fit.agreed.request.weights, "weights", "brown"),
    )
    for value, label, color in lines:
        if value is not None:
            axes.axhline(value / GIB, linestyle="--", color=color, label=label)
