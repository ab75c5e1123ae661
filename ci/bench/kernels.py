"""How near the CPU backend's kernels come to the limits of this machine, and where a step's and the start's time goes.

    python ci/bench/kernels.py demo                          # everything, about ten minutes; run nothing else meanwhile
    python ci/bench/kernels.py demo --quick                  # fewer shapes, one minute
    python ci/bench/kernels.py --only "linear Q4_1" --only step
    python ci/bench/kernels.py demo --json FILE --markdown   # tables for docs/performance.md, figures into FILE
    python ci/bench/kernels.py --read FILE --markdown        # the tables of an earlier run

Parts: `limits` (always), every kernel (`--only linear` takes all whose names begin so), `step`, `start`. The kernels'
shapes are the demo model's whatever MODEL is. Files: limits.py and peaks.cpp (the machine), kernel_cases.py and
paged.py (the kernels), step_split.py and clocks.py (the step), startup.py and startup_child.py (the start).
"""

from __future__ import annotations

import datetime
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import click
import torch
from compare import _commit
from kernel_cases import QUICK, Call, Case, Shapes, Sweep, all_cases
from limits import STEPS, Limits, measure_limits, seconds_of
from startup import spread_of, startup
from step_split import step_splits
from table import Table

from pagedkv import plugins
from pagedkv.api.errors import PagedKVError
from pagedkv.cli.machine import machine
from pagedkv.cli.standard_work import Work
from pagedkv.cli.tables import print_table
from pagedkv.conformance.machine import cores
from pagedkv_cpu.native import Kernels

_log = logging.getLogger("bench")

SECONDS, LEAST = 0.3, 5
"""How long a case is measured, and the fewest calls."""
WORK, QUICK_WORK = Work(input_len=128, output_len=128), Work(input_len=128, output_len=32)
BATCHES, REPEATS = (1, 32), 5


@click.command()
@click.argument("model", default="demo")
@click.option("--only", "parts", multiple=True, metavar="NAME", help="A part; may be repeated.")
@click.option("--quick", is_flag=True, help="Fewer shapes, shorter measurements.")
@click.option("--threads", type=click.IntRange(min=1), help="Else the cores of this process.")
@click.option("--isa", default="auto", show_default=True, help="Instruction set of the kernels.")
@click.option("--markdown", is_flag=True, help="Print the tables as Markdown.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE")
@click.option("--read", "given", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE")
def main(
    model: str,
    parts: tuple[str, ...],
    quick: bool,
    threads: int | None,
    isa: str,
    markdown: bool,
    output: Path | None,
    given: Path | None,
) -> None:
    """Measure the kernels of the CPU backend against the limits of this machine."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    _log.setLevel(logging.INFO)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    try:
        options = {"threads": threads or cores(), "isa": isa, "kernels": "native"}
        report = json.loads(given.read_text("utf-8")) if given else measured(model, parts, quick, options)
    except PagedKVError as error:
        raise click.ClickException(str(error)) from error
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        _log.info("written to %s", output)
    show(report, markdown)


def measured(model: str, parts: Sequence[str], quick: bool, options: Mapping[str, Any]) -> dict[str, Any]:
    """The report: limits, and each part that is asked for (none: all). Raises `ConfigError` and its like."""
    backend = plugins.create(plugins.select("cpu"), options)
    try:
        cases = all_cases(backend, Shapes(), QUICK if quick else Sweep())
        check_parts(parts, [*cases, "step", "start"])
        isa, threads = Kernels(options["isa"]).isa, options["threads"]
        described = {**machine(), "date": datetime.date.today().isoformat(), "commit": _commit(), "isa": isa}
        _log.info("limits")
        limits = [measure_limits(backend, isa, count) for count in dict.fromkeys((1, threads))]
        warn_if_busy(limits)
        kernels = [
            row for name, make in cases.items() if chosen(name, parts) for row in kernel_rows(make, limits[-1], quick)
        ]
    finally:
        backend.close()
    steps, start = step_and_start(model, parts, quick, options)
    limit_rows = [{name: getattr(each, name) for name in Limits.__slots__} for each in limits]
    return {
        "machine": described,
        "model": model,
        "limits": limit_rows,
        "kernels": kernels,
        "steps": steps,
        "start": start,
    }


def step_and_start(
    model: str, parts: Sequence[str], quick: bool, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What is asked for of the two splits; the other is empty."""
    steps: list[dict[str, Any]] = []
    start: dict[str, Any] = {}
    if chosen("step", parts):
        _log.info("step")
        settings = {"backend": "cpu", "backend_options": dict(options)}
        steps = step_splits(model, BATCHES, QUICK_WORK if quick else WORK, settings)
    if chosen("start", parts):
        _log.info("start")
        start = startup(model, 1 if quick else REPEATS)
    return steps, start


def warn_if_busy(limits: Sequence[Limits]) -> None:
    """All threads do no less than one, unless others take the cores."""
    for name in ("read", "copy", "flops", "macs"):
        one, everyone = getattr(limits[0], name), getattr(limits[-1], name)
        if everyone < 0.95 * one:
            _log.warning(
                "limit %s is lower with %d threads than with one (%.3g, %.3g a second): something else runs on this "
                "machine, and its figures mean little; end that and measure again",
                name,
                limits[-1].threads,
                everyone,
                one,
            )


def chosen(name: str, parts: Sequence[str]) -> bool:
    """Whether a part is asked for: all are where none is named."""
    return not parts or any(name.startswith(part) for part in parts)


def check_parts(parts: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a name that selects nothing."""
    for part in parts:
        if part != "limits" and not any(chosen(name, [part]) for name in known):
            raise click.UsageError(f"--only {part}: there is no such part; there are limits, {', '.join(known)}")


# -- kernels -----------------------------------------------------------------------------------------------------------


def kernel_rows(make: Callable[[], Iterator[Case]], limits: Limits, quick: bool) -> Iterator[dict[str, Any]]:
    """Each case of a kernel, measured."""
    with torch.inference_mode():
        for case in make():
            _log.info("%s, %s", case.kernel, case.shape)
            yield row(case, timed(case.calls, SECONDS / 3 if quick else SECONDS), limits)
            del case  # its memory goes before the next one's is made


def timed(calls: Sequence[Call], seconds: float) -> list[float]:
    """Seconds of call after call, round the ring, for so long, after one or two that are not counted."""
    turns = cycle(calls)
    for call in calls[:2]:
        call()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < LEAST or time.perf_counter() < end:
        samples.append(seconds_of(next(turns)))
    return samples


def row(case: Case, samples: Sequence[float], limits: Limits) -> dict[str, Any]:
    """A case as JSON values; rates a second, `achieved` the share of the median time that the floor is."""
    median = statistics.median(samples)
    least, bound = limits.floor(case.nbytes, case.copies, case.operations, case.macs)
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "bytes": case.nbytes,
        "operations": case.operations,
        "macs": case.macs,
        "cached": case.cached,
        "seconds": spread_of(samples),
        "samples": len(samples),
        "bytes_per_second": case.nbytes / median,
        "operations_per_second": case.operations / median,
        "floor": least,
        "bound": bound,
        "achieved": least / median,
    }


# -- tables ------------------------------------------------------------------------------------------------------------


def show(report: Mapping[str, Any], markdown: bool) -> None:
    """Print the tables of what was measured."""
    facts = report["machine"]
    click.echo(
        f"Measured on {facts['date']}: {facts['processor']}, {facts['isa']}, {facts['memory'] / 2**30:.0f} GiB, "
        f"{facts['system']}, torch {facts['torch']}, pagedkv {facts['pagedkv']} ({facts['commit']})."
    )
    for table in tables(report):
        if markdown:
            click.echo(f"\n{table.markdown()}")
        else:
            click.echo(f"\n{table.title}")
            print_table(table.columns, table.rows)


def tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """Limits, kernels, steps, start; those that have rows."""
    yield limits_table(report["limits"], report["machine"]["isa"])
    if report["kernels"]:
        yield kernels_table(report["kernels"])
    yield from (step_table(step) for step in report["steps"])
    if report["start"]:
        yield start_table(report["model"], report["start"])


def limits_table(limits: Sequence[Mapping[str, float]], isa: str) -> Table:
    """One row a number of threads."""
    return Table(
        title=f"The machine's limits (8-bit products: {STEPS[isa]})",
        columns=("threads", "read GB/s", "copy GB/s, both ways", "float32 GFLOP/s", "8-bit GMAC/s"),
        rows=tuple(
            (f"{each['threads']:.0f}", *(_giga(each[name]) for name in ("read", "copy", "flops", "macs")))
            for each in limits
        ),
    )


def kernels_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row a case."""
    return Table(
        title="Kernels",
        columns=("kernel", "work", "MB", "GFLOP or GMAC", "time", "GB/s", "G/s", "floor", "of it", "set by"),
        rows=tuple(_kernel_cells(each) for each in rows),
    )


def _kernel_cells(each: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        each["kernel"],
        each["shape"],
        f"{each['bytes'] / 1e6:.3g}",
        f"{each['operations'] / 1e9:.3g}" if each["operations"] else "-",
        _time(each["seconds"]["median"]),
        _giga(each["bytes_per_second"]),
        _giga(each["operations_per_second"]) if each["operations"] else "-",
        _time(each["floor"]),
        f"{each['achieved']:.0%}",
        "cached" if each["cached"] and each["bound"] == "memory" else each["bound"],
    )


def step_table(step: Mapping[str, Any]) -> Table:
    """One row a part of the step."""
    whole = step["clocked_seconds"]
    return Table(
        title=(
            f"A decode step of {step['batch_size']}: {_time(step['seconds'])} without clocks, {_time(whole)} with "
            f"their cost subtracted; Python, glue included, {step['python']:.0%}"
        ),
        columns=("part", "calls", "time", "share", "glue"),
        rows=tuple(
            (
                name,
                str(part["calls"] or "-"),
                _time(part["seconds"]),
                f"{part['seconds'] / whole:.0%}",
                "-" if name == "sampling" else _time(part["glue"]),
            )
            for name, part in step["parts"].items()
        ),
    )


def start_table(model: str, start: Mapping[str, Mapping[str, float]]) -> Table:
    """One row a stage."""
    return Table(
        title=f"From `pagedkv generate {model}` to the first token",
        columns=("stage", "median", "least..most"),
        rows=tuple(
            (stage, _time(each["median"]), f"{_time(each['min'])}..{_time(each['max'])}")
            for stage, each in start.items()
        ),
    )


def _giga(value: float) -> str:
    return f"{value / 1e9:.1f}"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


if __name__ == "__main__":
    main()
