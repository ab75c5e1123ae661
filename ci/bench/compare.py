"""pagedkv beside other engines, on the same machine, in the same minutes, on the same work.

    python ci/bench/compare.py demo                                       # all peers that have an environment
    python ci/bench/compare.py demo --peers openvino,transformers:bfloat16 --batch-sizes 1,8 --rounds 3
    python ci/bench/compare.py demo --input-len 512,2048,8160 --output-len 32 --batch-sizes 1,8   # long contexts
    python ci/bench/compare.py llama-1b-random                            # a second shape, made up on the first call
    python ci/bench/compare.py --host-costs                               # the core alone, no model

The work is that of `pagedkv bench`: B requests at once, random prompts from a seed, greedy, a fixed number of tokens.
The prompts come from here, so every engine answers the same ones, with its prefix cache off. Every engine has a
process of its own, which keeps its model loaded; only one computes at a time. Each is warmed up at each size; then
rounds go over sizes and engines in turn, so that a slow moment of the machine hits all alike. Medians and spread are
printed, with the ratio to each peer in the same round, and written as JSON with the machine described; a picture lies
beside it. The greedy tokens are compared too: `equal` is the share that stands before the first difference of each
request. Engines that round weights or activations differently part sooner, and near ties may fall either way.

An engine that is not there, does not start or ends is named with the reason, and the others go on. No new round begins
after --time-limit. Needs the packages of the extra `dev`; `make peers` sets the peers up. Files: engines.py
(processes), peers/ (one adapter an engine), models.py, rounds.py, table.py, plot.py, host_costs.py (the core's costs).
"""

from __future__ import annotations

import datetime
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from engines import Child, Engine, NotMeasured, start
from host_costs import host_costs
from models import ROOT, Model, find
from plot import draw
from rounds import Rounds, Size
from table import tables

from pagedkv.api.errors import PagedKVError
from pagedkv.cli.bench import _batch_sizes
from pagedkv.cli.machine import cores, machine
from pagedkv.cli.standard_work import Work, spread
from pagedkv.cli.tables import print_table

_log = logging.getLogger("bench")

PEERS = "llama_cpp,openvino,vllm,transformers"
RESULTS = Path("bench-results/compare.json")


def _engine_names(text: str) -> tuple[Engine, ...]:
    return tuple(Engine.of(name) for name in dict.fromkeys(part.strip() for part in text.split(",")) if name)


@click.command(context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
@click.argument("model", default="demo")
@click.option("--peers", type=_engine_names, default=PEERS, show_default=True, help='"" for none.')
@click.option("--batch-sizes", type=_batch_sizes, default="1,8,16,32", show_default=True)
@click.option("--input-len", "input_lens", type=_batch_sizes, default="128", show_default=True, help="One or several.")
@click.option("--output-len", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Of each engine; else the cores of this process.")
@click.option("--dtype", default="auto", show_default=True, help="Of pagedkv.")
@click.option("--time-limit", type=float, default=7200.0, show_default=True, help="Seconds; no round begins later.")
@click.option("--host-costs", "costs_only", is_flag=True, help="Measure the core's five host costs instead.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, show_default=True)
def main(output: Path, costs_only: bool, **options: Any) -> None:
    """Compare pagedkv with other engines, or measure the core's host costs."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    _log.setLevel(logging.INFO)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        report = _costs() if costs_only else _compare(logs=output.parent, **options)
    except (PagedKVError, NotMeasured) as error:
        raise click.ClickException(str(error)) from error
    described = {**machine(), "date": datetime.date.today().isoformat(), "commit": _commit()}
    report = {"machine": described, **report}
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _log.info("written to %s", output)
    if not costs_only:
        _show(report, output.with_suffix(".png"))


def _compare(
    model: str,
    peers: tuple[Engine, ...],
    batch_sizes: tuple[int, ...],
    input_lens: tuple[int, ...],
    output_len: int,
    rounds: int,
    seed: int,
    threads: int | None,
    dtype: str,
    time_limit: float,
    logs: Path,
) -> dict[str, Any]:
    found = find(model)
    limits = _limits(found, max(batch_sizes), max(input_lens), output_len)
    given = {"threads": threads or cores(), "limits": limits}
    ours = Engine(name="pagedkv" if dtype == "auto" else f"pagedkv:{dtype}", kind="pagedkv", dtype=dtype)
    prompt = Work(input_len=min(input_lens), output_len=1, seed=seed).prompts(found.vocab_size, 1, 0)[0]
    sizes = [(input_len, batch) for input_len in input_lens for batch in batch_sizes]
    with ExitStack() as stack:
        children, absent = _start(stack, [ours, *peers], found, given, prompt, logs)
        measured = Rounds(children, sizes, output_len, found.vocab_size, seed)
        measured.warm_up()
        measured.measure(rounds, time.monotonic() + time_limit)
    facts = {child.name: child.facts for child in children}
    work = {"output_len": output_len, "seed": seed, "rounds": measured.done}
    return {"model": model, **given, "work": work, **_rows(measured, sizes, facts, absent)}


def _rows(measured: Rounds, sizes: Sequence[Size], facts: dict[str, Any], absent: dict[str, str]) -> dict[str, Any]:
    return {
        "names": measured.names,
        "engines": facts,
        "not_measured": {**absent, **measured.failed},
        "rows": [measured.row(size) for size in sizes],
    }


def _limits(model: Model, requests: int, input_len: int, output_len: int) -> dict[str, int]:
    if input_len + output_len > model.max_tokens:
        raise click.UsageError(
            f"--input-len {input_len} + --output-len {output_len} are more than the model's own limit of "
            f"{model.max_tokens} positions: the longest input is {model.max_tokens - output_len}"
        )
    return {"requests": requests, "tokens": input_len + output_len, "cache_numbers": model.cache_numbers}


def _start(
    stack: ExitStack, engines: Sequence[Engine], model: Model, given: dict[str, Any], prompt: list[int], logs: Path
) -> tuple[list[Child], dict[str, str]]:
    """(what runs, why the others do not). Raises `NotMeasured` where pagedkv itself does not."""
    children, absent = [], {}
    for engine in engines:
        try:
            told = engine.given(model, given["threads"], given["limits"])
            _log.info("loading %s", engine.name)
            log = logs / f"{engine.name.replace(':', '-')}.log"
            children.append(stack.enter_context(start(engine, told, prompt, log)))
        except NotMeasured as why:
            if engine.kind == "pagedkv":
                raise
            _log.warning("%s: not measured here: %s", engine.name, why)
            absent[engine.name] = str(why)
    return children, absent


def _show(report: dict[str, Any], picture: Path) -> None:
    for table in tables(report):
        click.echo(f"\n{table.title}")
        print_table(table.columns, table.rows)
    try:
        draw(report, picture)
    except ImportError as error:
        _log.warning("no picture: %s; pip install matplotlib, then ci/bench/plot.py draws it from the JSON", error)
        return
    _log.info("drawn to %s", picture)


def _commit() -> str | None:
    """The checkout's commit, with "+" behind it where files have changed since; None outside of one."""
    told = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip() or None


def _costs() -> dict[str, Any]:
    """The core's costs beside their targets."""
    rows, report = [], []
    for cost in host_costs():
        median, target = statistics.median(cost.seconds), cost.target
        verdict = "" if target is None else "reached" if median <= target else f"{median / target:.1f}x over"
        rows.append(
            [cost.name, _time(median), _time(min(cost.seconds)), _time(max(cost.seconds)), _time(target), verdict]
        )
        report.append(
            {"name": cost.name, "target": target, **(spread(cost.seconds) or {}), "samples": len(cost.seconds)}
        )
    print_table(["cost", "median", "least", "most", "target", ""], rows)
    return {"host_costs": report}


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


if __name__ == "__main__":
    main()
