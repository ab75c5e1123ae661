"""The server beside the engine alone, and beside other servers of the same model, under one load of clients.

    python ci/bench/serve.py demo                                # the server beside the engine, 1 to 128 clients
    python ci/bench/serve.py demo --quick                        # a first look: fewer clients, shorter answers
    python ci/bench/serve.py demo --peers vllm,llama_cpp --clients 1,32 --modes stream --no-engine --rounds 1

C clients at once, each sending requests in turn: random token ids as the prompt (where a server takes no ids, their
text), greedy, end token ignored, prefix cache off. In the mode `stream` answers come token by token, in the mode
`whole` at once. The engine alone is fed in the same pattern, in a process of its own: C requests at once, each replaced
when it ends, with an output for every token or with one for each request. Server and clients share the machine's cores.

All are loaded first, warmed up at each level, then asked in turn: rounds go over levels and over who is asked, and who
begins changes. Ratios are taken within a round; medians and spread are printed and written as JSON with the machine
described. A peer that is not there, does not start or ends is named with the reason. No new round begins after
--time-limit. Files: serve_client.py (the clients), serve_engine.py (the engine alone), serve_servers.py (how each
server is started), serve_figures.py, serve_report.py (tables). serve_memory.py measures what many requests leave.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import click
from compare import _commit
from engines import Child, Engine, NotMeasured
from models import Model, find
from rounds import speed_ratio
from serve_report import FIGURES, tables
from serve_servers import PEERS, free_port, pagedkv, served

from pagedkv.api.errors import PagedKVError
from pagedkv.cli.bench import _batch_sizes
from pagedkv.cli.machine import cores, machine
from pagedkv.cli.standard_work import Work, bench_settings, spread
from pagedkv.cli.tables import print_table

_log = logging.getLogger("bench")

RESULTS = Path("bench-results/serve.json")
ENGINE, SERVER = "engine", "server"
MODES = ("stream", "whole")
LEAST, MOST = 4, 128
WARM_UP_TOKENS = 4
QUICK: Mapping[str, Any] = {"clients": (1, 32), "output_len": 32, "rounds": 1}
"""What --quick changes of the options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """So many clients at once, and how they are answered."""

    clients: int
    mode: str

    @property
    def requests(self) -> int:
        """Two for each client, four at least; above 64 clients, where that takes long, fewer, and one at least."""
        return max(LEAST, self.clients, min(2 * self.clients, MOST))


class Asked(Protocol):
    """What the rounds need of an engine or a server."""

    @property
    def name(self) -> str: ...

    def run(self, prompts: Sequence[list[int]], output_len: int, **how: Any) -> dict[str, Any]: ...


class Rounds:
    """Runs of all at all levels. One that fails leaves with its reason; ours may not fail.

    `runs`: (name, level) -> its figures, one a round. In a round all get the same prompts, which no two runs share.
    """

    def __init__(self, asked: Iterable[Asked], levels: Sequence[Level], work: Work, vocab_size: int) -> None:
        self._asked, self._levels, self._work, self._vocab_size = list(asked), levels, work, vocab_size
        self.runs: dict[tuple[str, Level], list[dict[str, Any]]] = {}
        self.failed: dict[str, str] = {}
        self.done = 0

    @property
    def names(self) -> list[str]:
        """Those that are left, in their order."""
        return [each.name for each in self._asked]

    def warm_up(self) -> None:
        """A few tokens at each level, so that what is prepared once is not measured."""
        for each in list(self._asked):
            _log.info("warming up %s", each.name)
            for level in self._levels:
                if each in self._asked:
                    self._ask(each, level, 0, level.clients, min(WARM_UP_TOKENS, self._work.output_len))

    def measure(self, rounds: int, until: float) -> None:
        """Up to `rounds` rounds, none of which begins after the moment `until`."""
        turn = 0
        for number in range(1, rounds + 1):
            if number > 1 and time.monotonic() > until:
                _log.warning("stopped after %d of %d rounds: the time limit is over", self.done, rounds)
                return
            for level in self._levels:
                turn = (turn + 1) % len(self._asked)
                for each in (*self._asked[turn:], *self._asked[:turn]):
                    self._record(each, level, number)
            self.done = number

    def _record(self, each: Asked, level: Level, number: int) -> None:
        found = self._ask(each, level, number, level.requests, self._work.output_len)
        if found is not None:
            self.runs.setdefault((each.name, level), []).append(found)
            told = (number, level.clients, level.mode, each.name, found["tokens_per_second"], found["seconds"])
            _log.info("round %d, %d clients, %s, %s: %.1f tokens/s in %.1f s", *told)

    def _ask(self, each: Asked, level: Level, number: int, requests: int, output_len: int) -> dict[str, Any] | None:
        try:
            prompts = self._work.prompts(self._vocab_size, requests, number)
            return each.run(prompts, output_len, clients=level.clients, stream=level.mode == "stream")
        except NotMeasured as why:
            if each.name in (ENGINE, SERVER):
                raise
            _log.warning("%s: not measured here: %s", each.name, why)
            self.failed[each.name] = str(why)
            self._asked.remove(each)
            return None

    def row(self, level: Level) -> dict[str, Any]:
        """One level as JSON values; `ratio` is the server's speed as a multiple of each other's, in the same round."""
        runs = {name: self.runs[name, level] for name in self.names}
        return {
            "clients": level.clients,
            "mode": level.mode,
            "requests": level.requests,
            **{figure: {name: spread([run[figure] for run in runs[name]]) for name in runs} for figure in FIGURES},
            "ratio": {name: speed_ratio(runs[SERVER], runs[name]) for name in runs if name != SERVER},
            "cores": {name: _cores(runs[name]) for name in runs},
            "runs": runs,
        }


def _cores(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float] | None]:
    """Processor seconds a second, of each part."""
    return {part: spread([run["cpu"][part] / run["seconds"] for run in runs]) for part in runs[0]["cpu"]}


def _peers(text: str) -> tuple[Engine, ...]:
    engines = tuple(Engine.of(name.strip()) for name in dict.fromkeys(text.split(",")) if name.strip())
    for engine in engines:
        if engine.kind not in PEERS:
            raise click.BadParameter(f"{engine.kind!r} has no server here; those with one are {', '.join(PEERS)}")
    return engines


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not modes or set(modes) - set(MODES):
        raise click.BadParameter(f"{text!r}: the modes are {' and '.join(MODES)}")
    return modes


@click.command(context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
@click.argument("model", default="demo")
@click.option("--peers", type=_peers, default="", help=f"Further servers: {','.join(PEERS)}.")
@click.option("--engine/--no-engine", "with_engine", default=True, show_default=True, help="Measure the engine alone.")
@click.option("--clients", type=_batch_sizes, default="1,8,32,128", show_default=True)
@click.option("--modes", type=_modes, default=",".join(MODES), show_default=True)
@click.option("--input-len", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--output-len", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Of each engine; else the cores of this process.")
@click.option("--time-limit", type=float, default=1200.0, show_default=True, help="Seconds; no round begins later.")
@click.option("--quick", is_flag=True, help="1 and 32 clients, 32 output tokens, one round, whatever else is given.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, show_default=True)
def main(output: Path, quick: bool, **options: Any) -> None:
    """Measure the server of MODEL."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    _log.setLevel(logging.INFO)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        report = _measure(logs=output.parent, **{**options, **(QUICK if quick else {})})
    except (PagedKVError, NotMeasured) as error:
        raise click.ClickException(str(error)) from error
    described = {**machine(), "date": datetime.date.today().isoformat(), "commit": _commit()}
    report = {"machine": described, **report}
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _log.info("written to %s", output)
    for table in tables(report):
        click.echo(f"\n{table.title}")
        print_table(table.columns, table.rows)


def _measure(
    model: str,
    peers: tuple[Engine, ...],
    with_engine: bool,
    clients: tuple[int, ...],
    modes: tuple[str, ...],
    input_len: int,
    output_len: int,
    rounds: int,
    seed: int,
    threads: int | None,
    time_limit: float,
    logs: Path,
) -> dict[str, Any]:
    began = time.monotonic()
    found, work = find(model), Work(input_len=input_len, output_len=output_len, seed=seed)
    start = _Start(found, work, max(clients), threads or cores(), logs)
    levels = [Level(clients=number, mode=mode) for number in clients for mode in modes]
    with ExitStack() as stack:
        ours = [start.engine(stack)] if with_engine else []
        ours.append(start.server(stack))
        theirs = [started for peer in peers if (started := start.peer(stack, peer)) is not None]
        measured = Rounds([*ours, *theirs], levels, work, found.vocab_size)
        measured.warm_up()
        measured.measure(rounds, began + time_limit)
    facts = {each.name: each.facts for each in (*ours, *theirs)}
    return {
        "model": model,
        "threads": start.threads,
        "work": {"input_len": input_len, "output_len": output_len, "seed": seed, "rounds": measured.done},
        "names": measured.names,
        "engines": facts,
        "not_measured": {**start.absent, **measured.failed},
        "rows": [measured.row(level) for level in levels],
    }


class _Start:
    """Starts each one, with the same limits: as many sequences at once as there are clients, of the work's length."""

    def __init__(self, model: Model, work: Work, clients: int, threads: int, logs: Path) -> None:
        self._model, self._logs, self.threads = model, logs, threads
        self._prompt = Work(input_len=work.input_len, output_len=1, seed=work.seed).prompts(model.vocab_size, 1, 0)[0]
        tokens = work.input_len + work.output_len
        limits = {"requests": clients, "tokens": tokens, "cache_numbers": model.cache_numbers}
        self._given = {"threads": threads, "limits": limits}
        options = {"backend": "cpu", "backend_options": {"threads": threads}}
        self._settings = bench_settings(work, clients, options)
        self.absent: dict[str, str] = {}

    def engine(self, stack: ExitStack) -> Any:
        """The engine alone."""
        _log.info("loading the engine alone")
        script = Path(__file__).resolve().parent / "serve_engine.py"
        told = {"model": self._model.name, "settings": self._settings, "threads": self.threads}
        command = [sys.executable, str(script), json.dumps(told)]
        log = self._logs / "serve-engine.log"
        return stack.enter_context(Child(ENGINE, command, self.threads, self._prompt, log))

    def server(self, stack: ExitStack) -> Any:
        """Ours."""
        _log.info("starting the server")
        port = free_port()
        plan = pagedkv(self._model.name, self._settings, port)
        return stack.enter_context(served(SERVER, plan, port, self.threads, self._prompt, self._logs))

    def peer(self, stack: ExitStack, engine: Engine) -> Any:
        """Another one, or None, with the reason in `absent`."""
        try:
            engine.given(self._model, self.threads, self._given["limits"])
            _log.info("starting %s's server", engine.name)
            port = free_port()
            plan = PEERS[engine.kind](engine, self._model, self._given, port)
            return stack.enter_context(served(engine.name, plan, port, self.threads, self._prompt, self._logs))
        except NotMeasured as why:
            _log.warning("%s: not measured here: %s", engine.name, why)
            self.absent[engine.name] = str(why)
            return None


if __name__ == "__main__":
    main()
