"""pagedkv beside transformers, on the same machine, in the same minutes, on the same work.

    python ci/bench/compare.py demo                                  # float32, batch sizes 1,8,16,32
    python ci/bench/compare.py demo --bf16                           # transformers in bfloat16 as well
    python ci/bench/compare.py demo --batch-sizes 1,2 --input-len 16 --output-len 8 --rounds 1
    python ci/bench/compare.py --host-costs                          # the core alone, no model

The work is that of `pagedkv bench`: B requests at once, random prompts from a seed, greedy, a fixed number of tokens.
transformers answers them with `generate`: a static batch, its default cache, the same weights (a GGUF file is
dequantized for it). Every engine has a process of its own, which keeps its model loaded; only one of them computes at
a time. Each is warmed up at each size; then rounds go over sizes and engines in turn, so that a slow moment of the
machine hits all alike. Medians and spread are printed, with the ratio to each peer in the same round, and written as
JSON with the machine described. The greedy tokens are compared too: `equal` is the share that stands before the first
difference of each request (near ties between two tokens may fall either way, in bfloat16 more often).

No new round begins after --time-limit. Needs the packages of the extra `dev`. Files: engines.py (one engine in its
process), host_costs.py (the core's costs).
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from host_costs import host_costs

from pagedkv.cli.bench import _batch_sizes
from pagedkv.cli.machine import cores, machine
from pagedkv.cli.standard_work import spread
from pagedkv.cli.tables import print_table

HERE = Path(__file__).resolve().parent
_log = logging.getLogger("bench")


class Child:
    """An engine in its own process."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        self.name = name
        threads = str(given["threads"])
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "engines.py"), name, json.dumps(given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "PAGEDKV_LOG_LEVEL": "WARNING"},
        )
        self.facts = self._answer()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(self, batch: int, number: int) -> dict[str, Any]:
        """One run; number 0 is the warm-up."""
        if self._process.stdin is None:
            raise click.ClickException(f"{self.name} takes no jobs")
        self._process.stdin.write(json.dumps({"batch": batch, "run": number}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise click.ClickException(f"{self.name} ended with code {self._process.wait()}, see its messages above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@click.command(context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
@click.argument("model", default="demo")
@click.option("--batch-sizes", type=_batch_sizes, default="1,8,16,32", show_default=True)
@click.option("--input-len", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--output-len", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Of each engine; else the cores of this process.")
@click.option("--bf16", is_flag=True, help="transformers in bfloat16 as well.")
@click.option("--dtype", default="float32", show_default=True, help="Of pagedkv.")
@click.option("--time-limit", type=float, default=1200.0, show_default=True, help="Seconds; no round begins later.")
@click.option("--host-costs", "costs_only", is_flag=True, help="Measure the core's five host costs instead.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), default=Path("bench.json"), show_default=True
)
def main(output: Path, costs_only: bool, **options: Any) -> None:
    """Compare pagedkv with transformers, or measure the core's host costs."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    report = _costs() if costs_only else _compare(**options)
    output.write_text(json.dumps({"machine": machine(), **report}, indent=1) + "\n", encoding="utf-8")
    _log.info("written to %s", output)


def _compare(
    model: str,
    batch_sizes: tuple[int, ...],
    input_len: int,
    output_len: int,
    rounds: int,
    seed: int,
    threads: int | None,
    bf16: bool,
    dtype: str,
    time_limit: float,
) -> dict[str, Any]:
    work = {"input_len": input_len, "output_len": output_len, "seed": seed}
    given = {"model": model, "threads": threads or cores(), "largest": max(batch_sizes), "work": work}
    names = [f"pagedkv:{dtype}", "transformers:float32", *(["transformers:bfloat16"] if bf16 else [])]
    with ExitStack() as stack:
        children = []
        for name in names:
            _log.info("loading %s", name)
            children.append(stack.enter_context(Child(name, given)))
        runs = _rounds(children, batch_sizes, rounds, time.monotonic() + time_limit)
        facts = {child.name: child.facts for child in children}
    rows = [_row(size, names, runs) for size in batch_sizes if runs[names[0], size]]
    _show(names, rows)
    return {**given, "rounds": rounds, "engines": facts, "rows": rows}


Runs = dict[tuple[str, int], list[dict[str, Any]]]


def _rounds(children: Sequence[Child], sizes: Sequence[int], rounds: int, until: float) -> Runs:
    """Warm up, then measure in turn; the engine that begins changes with every round."""
    runs: Runs = {(child.name, size): [] for child in children for size in sizes}
    for child in children:
        for size in sizes:
            child.run(size, 0)
    for number in range(1, rounds + 1):
        if number > 1 and time.monotonic() > until:
            _log.warning("stopped after %d of %d rounds: the time limit is over", number - 1, rounds)
            break
        turn = number % len(children)
        for size in sizes:
            for child in (*children[turn:], *children[:turn]):
                answer = child.run(size, number)
                runs[child.name, size].append(answer)
                speed = answer["tokens_per_second"]
                _log.info("round %d, B=%d, %s: %.1f tokens/s", number, size, child.name, speed)
    return runs


def _row(size: int, names: Sequence[str], runs: Runs) -> dict[str, Any]:
    """One batch size: the spread of each engine, and pagedkv's speed as a multiple of each peer's."""
    speeds = {name: [run["tokens_per_second"] for run in runs[name, size]] for name in names}
    ours, *peers = names
    return {
        "batch_size": size,
        "tokens_per_second": {name: spread(values) for name, values in speeds.items()},
        "ratio": {
            peer: statistics.median(a / b for a, b in zip(speeds[ours], speeds[peer], strict=True)) for peer in peers
        },
        "equal": {peer: agreement(runs[ours, size], runs[peer, size]) for peer in peers},
        "runs": {name: [{k: v for k, v in run.items() if k != "tokens"} for run in runs[name, size]] for name in names},
    }


def agreement(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> float:
    """The share of tokens before the first difference of each request."""
    same = total = 0
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine["tokens"], other["tokens"], strict=True):
            differs = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
            same += differs[0] if differs else len(a)
            total += len(a)
    return same / total


def _show(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    peers = names[1:]
    columns = ["requests", *(f"{name} tokens/s" for name in names), *(f"x {p}" for p in peers), "equal tokens"]
    print_table(columns, [[str(row["batch_size"]), *_cells(row, names)] for row in rows])


def _cells(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    speeds = [row["tokens_per_second"][name] for name in names]
    return [
        *(f"{s['median']:.1f} ({s['min']:.1f}..{s['max']:.1f})" for s in speeds),
        *(f"{row['ratio'][peer]:.2f}" for peer in names[1:]),
        ", ".join(f"{row['equal'][peer]:.0%}" for peer in names[1:]),
    ]


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
