"""`pagedkv bench`: throughput, latency and memory against batch size, or over work that shares prefixes."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedkv.cli import scenario_report
from pagedkv.cli.common import model_argument
from pagedkv.cli.model_options import engine_options, engine_settings
from pagedkv.cli.scenario_options import scenario_options, scenario_sizes
from pagedkv.cli.tables import print_table
from pagedkv.config import show_bytes

if TYPE_CHECKING:
    from pagedkv.cli import scenario_bench
    from pagedkv.cli.standard_work import Bench, Measured

_log = logging.getLogger("pagedkv.cli")


def _batch_sizes(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, each once, in the order given."""
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise click.BadParameter(f"{text!r}: give whole numbers of at least 1, such as 1,8,16,32")
    return sizes


_COUNT = click.IntRange(min=1)


@click.command("bench")
@model_argument
@click.option("--batch-sizes", type=_batch_sizes, default="1,8,16,32", show_default=True, help="Requests at once.")
@click.option("--input-len", type=_COUNT, default=128, show_default=True, metavar="N", help="Tokens of a prompt.")
@click.option("--output-len", type=_COUNT, default=128, show_default=True, metavar="N", help="Tokens of an answer.")
@click.option("--repeats", type=_COUNT, default=3, show_default=True, metavar="N", help="Measured rounds.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of the work.")
@click.option(
    "--floor", "with_floor", is_flag=True, help="Measure how fast memory is read; show the least time between tokens."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a row instead of a table.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Write the JSON objects to a file as well, one a line.",
)
@scenario_options
@engine_options
@click.pass_context
def bench(
    context: click.Context,
    model: str,
    batch_sizes: tuple[int, ...],
    input_len: int,
    output_len: int,
    repeats: int,
    seed: int,
    with_floor: bool,
    as_json: bool,
    output: Path | None,
    scenario: str | None,
    sizes: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Measure MODEL: output tokens a second, latency and memory against the number of requests.

    B requests come at once, each with random prompt tokens and an answer of fixed length, greedy, the end token
    ignored. Tokens a second count the whole run, prefill included. After a warm-up at each size, rounds over all sizes
    are measured; the table shows medians over the rounds, with the least and the most for the speed. The times between
    tokens are those of each request. Every run has prompts of its own, and prefix caching is off unless it is switched
    on. The cache is made for the work, unless an option says otherwise.

    With --floor, each time between tokens stands beside its floor: the bytes of weights and cached keys and values
    that a decode step must read, over the speed at which a plain sum over a large array reads memory here.

    With --scenario, work whose prompts begin alike runs over a cache that holds only a part of it, on three engines:
    without host memory, with host memory for preempted requests (swap), and for evicted prefixes as well (host tier).
    The table shows the times to the first token (median and worst), where prompt tokens came from, how many were
    computed again after a preemption, and what was copied. --input-len is then what a request adds, and where several
    defaults are shown they are of chat, documents and agents.

    \b
    chat       users take turns; a prompt is the whole conversation so far
    documents  questions about long documents, in mixed order
    agents     samples of one task go on by themselves, and branch again

    \b
    pagedkv bench demo
    pagedkv bench demo --batch-sizes 1,64 --dtype bfloat16 --json > figures.jsonl
    pagedkv bench demo --scenario chat
    pagedkv bench demo --scenario documents --documents 10 --cache-share 0.3
    """
    if output is not None and not output.resolve().parent.is_dir():
        raise click.UsageError(f"--output {output}: there is no folder {output.resolve().parent}; make it first")
    sized = scenario_sizes(context, scenario, sizes, settings)
    named = engine_settings(settings)
    if scenario is not None:
        rows, show = _scenario_rows(model, scenario, sized, seed, named), scenario_report.show
    else:
        lengths = {"input_len": input_len, "output_len": output_len, "seed": seed}
        rows, show = _batch_rows(model, lengths, batch_sizes, repeats, with_floor, named), _show
    lines = [json.dumps(row) for row in rows]
    if as_json:
        click.echo("\n".join(lines))
    else:
        show(rows)
    if output is not None:
        output.write_text("\n".join(lines) + "\n", encoding="utf-8")
        _log.info("written to %s", output)


def _batch_rows(
    model: str,
    lengths: Mapping[str, int],
    sizes: Sequence[int],
    repeats: int,
    with_floor: bool,
    named: Mapping[str, Any],
) -> list[dict[str, Any]]:
    from pagedkv.cli.standard_work import Bench, Work
    from pagedkv.progress import loading_bar

    with loading_bar() as progress:
        made = Bench(model, Work(**lengths), max(sizes), named, progress)
    with made:
        bandwidth = _bandwidth(made) if with_floor else None
        return _rows(made, _measure(made, sizes, repeats), bandwidth)


def _scenario_rows(
    model: str, scenario: str, sizes: Mapping[str, Any], seed: int, named: Mapping[str, Any]
) -> list[dict[str, Any]]:
    from pagedkv.cli.scenario_bench import plan
    from pagedkv.cli.scenarios import work

    made = plan(model, work(scenario, sizes, seed), sizes["cache_share"], named)
    rows = scenario_report.rows(made.work, [_run_scenario(made, kind) for kind in made.kinds])
    if rows[0]["differing_answers"] and rows[0]["batch_invariant"]:
        _log.error("answers differ, although results do not depend on the batch here; please report this")
    return rows


def _run_scenario(plan: scenario_bench.Plan, kind: str) -> scenario_bench.Measured:
    from pagedkv.cli.scenario_bench import measure
    from pagedkv.progress import counting_bar, loading_bar

    _log.info("%s: %s", plan.work.scenario, kind)
    with loading_bar() as progress:
        parts = plan.build(kind, progress)
    with counting_bar(f"Measuring {kind}", len(plan.work.asks)) as advance:
        return measure(plan.work, kind, parts, advance)


def _measure(bench: Bench, sizes: Sequence[int], repeats: int) -> dict[int, list[Measured]]:
    """Rounds over all sizes, so that a slow moment of the machine does not hit one size alone."""
    from pagedkv.progress import counting_bar

    runs: dict[int, list[Measured]] = {size: [] for size in sizes}
    with counting_bar("Measuring", len(sizes) * (repeats + 1)) as advance:
        for size in sizes:
            bench.warm_up(size)
            advance()
        for number in range(1, repeats + 1):
            for size in sizes:
                runs[size].append(bench.run(size, number))
                advance()
    return runs


def _bandwidth(bench: Bench) -> float:
    from pagedkv.planning.rates import read_bandwidth

    return read_bandwidth(bench.parts.runner.backend)


def _rows(bench: Bench, runs: Mapping[int, Sequence[Measured]], bandwidth: float | None) -> list[dict[str, Any]]:
    from pagedkv.cli.machine import engine_facts, machine

    described = {**machine(), **engine_facts(bench.parts)}
    _log.info("%s", ", ".join(f"{name} {value}" for name, value in described.items()))
    rows = [{**_row(bench, size, measured), "machine": described} for size, measured in runs.items()]
    for row in rows:
        if bandwidth is not None:
            row["floor"] = _floor(bench, row, bandwidth)
        if row["peak_running"] < row["batch_size"]:
            _log.warning(
                "only %d of %d requests ran at the same time: give the cache more blocks (--kv-cache-memory)",
                row["peak_running"],
                row["batch_size"],
            )
    return rows


def _row(bench: Bench, size: int, runs: Sequence[Measured]) -> dict[str, Any]:
    """One batch size as JSON values; times in seconds, memory in bytes."""
    from pagedkv.cli.standard_work import spread

    figures, memory = [run.figures() for run in runs], bench.parts.memory
    peak = max(run.peak_blocks for run in runs)
    timed = ("tokens_per_second", "time_to_first_token", "time_between_tokens_p50", "time_between_tokens_p99")
    return {
        "batch_size": size,
        "input_len": bench.work.input_len,
        "output_len": bench.work.output_len,
        "seed": bench.work.seed,
        "repeats": len(runs),
        **{name: spread([figure[name] for figure in figures]) for name in timed},
        "cache": {
            "peak_blocks": peak,
            "peak_bytes": peak * memory.cost.per_block,
            "pool_blocks": memory.num_blocks,
            "pool_bytes": memory.cache,
        },
        "peak_running": max(run.peak_running for run in runs),
        "preemptions": sum(run.preemptions for run in runs),
        "runs": figures,
    }


def _floor(bench: Bench, row: Mapping[str, Any], bandwidth: float) -> dict[str, Any]:
    from pagedkv.cli.floor import floor

    between = row["time_between_tokens_p50"]
    least = floor(bench.parts, row["batch_size"], row["input_len"], row["output_len"], bandwidth)
    return least.figures(None if between is None else between["median"])


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = (
        "requests",
        "tokens/s",
        "least..most",
        "first token",
        "between p50",
        "p99",
        *(["floor"] if "floor" in rows[0] else []),
        "cache used",
        "pool with scratch",
    )
    print_table(columns, [_cells(row) for row in rows])


def _cells(row: Mapping[str, Any]) -> list[str]:
    speed, cache = row["tokens_per_second"], row["cache"]
    return [
        str(row["batch_size"]),
        f"{speed['median']:.1f}",
        f"{speed['min']:.1f}..{speed['max']:.1f}",
        *(
            _milliseconds(row[f"time_{name}"])
            for name in ("to_first_token", "between_tokens_p50", "between_tokens_p99")
        ),
        *([_floor_cell(row["floor"])] if "floor" in row else []),
        *(f"{cache[f'{part}_blocks']} blocks, {show_bytes(cache[f'{part}_bytes'])}" for part in ("peak", "pool")),
    ]


def _milliseconds(seconds: Mapping[str, float] | None) -> str:
    return "-" if seconds is None else f"{seconds['median'] * 1000:.1f} ms"


def _floor_cell(floor: Mapping[str, Any]) -> str:
    share = "" if floor["achieved"] is None else f" ({floor['achieved']:.0%} of p50)"
    return f"{floor['seconds'] * 1000:.1f} ms{share}"
