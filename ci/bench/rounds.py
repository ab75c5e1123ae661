"""Interleaved rounds over engines and sizes, and what is computed from them."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from engines import NotMeasured

from pagedkv.cli.standard_work import Work, spread

_log = logging.getLogger("bench")

FIGURES = ("tokens_per_second", "time_to_first_token", "time_between_tokens_p50")
WARM_UP_TOKENS = 4
WARM_UP_INPUT = 512

Size = tuple[int, int]
"""(input tokens, requests at once)"""
Answers = Mapping[str, Any]


class Asked(Protocol):
    """What the rounds need of an engine."""

    @property
    def name(self) -> str: ...

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> Answers: ...


class Rounds:
    """Runs of some engines at all sizes. A peer that fails leaves with its reason; the first engine may not fail.

    `runs`: (engine, size) -> its answers, one a round. All engines answer the same prompts, which no two runs share.
    """

    def __init__(self, engines: Iterable[Asked], sizes: Sequence[Size], output_len: int, vocab: int, seed: int) -> None:
        self._engines = list(engines)
        self._ours = self._engines[0].name
        self._sizes = sizes
        self._output_len = output_len
        self._vocab = vocab
        self._seed = seed
        self.runs: dict[tuple[str, Size], list[Answers]] = {}
        self.failed: dict[str, str] = {}
        self.done = 0

    @property
    def names(self) -> list[str]:
        """The engines that are left, in their order."""
        return [engine.name for engine in self._engines]

    def warm_up(self) -> None:
        """A short run at each size, so that what is prepared once is not measured; of long prompts, the beginning."""
        for engine in list(self._engines):
            _log.info("warming up %s", engine.name)
            for size in self._sizes:
                if engine in self._engines:
                    short = min(size[0], WARM_UP_INPUT), size[1]
                    self._ask(engine, short, 0, min(WARM_UP_TOKENS, self._output_len))

    def measure(self, rounds: int, until: float, now: Callable[[], float] = time.monotonic) -> None:
        """Up to `rounds` rounds, none of which begins after `until`; who begins changes with every size and round."""
        turn = 0
        for number in range(1, rounds + 1):
            if number > 1 and now() > until:
                _log.warning("stopped after %d of %d rounds: the time limit is over", self.done, rounds)
                return
            for size in self._sizes:
                turn = (turn + 1) % len(self._engines)
                for engine in (*self._engines[turn:], *self._engines[:turn]):
                    self._record(engine, size, number)
            self.done = number

    def _record(self, engine: Asked, size: Size, number: int) -> None:
        answer = self._ask(engine, size, number, self._output_len)
        if answer is not None:
            self.runs.setdefault((engine.name, size), []).append(answer)
            speed = answer["tokens_per_second"]
            _log.info("round %d, input %d, B=%d, %s: %.1f tokens/s", number, *size, engine.name, speed)

    def _ask(self, engine: Asked, size: Size, number: int, output_len: int) -> Answers | None:
        input_len, batch = size
        work = Work(input_len=input_len, output_len=output_len, seed=self._seed)
        try:
            return engine.run(work.prompts(self._vocab, batch, number), output_len)
        except NotMeasured as why:
            if engine.name == self._ours:
                raise
            _log.warning("%s: not measured here: %s", engine.name, why)
            self.failed[engine.name] = str(why)
            self._engines.remove(engine)
            return None

    def row(self, size: Size) -> dict[str, Any]:
        """One size as JSON values: spread of each engine, ratios of the first one, named ours, to its peers."""
        names = self.names
        runs = {name: self.runs[name, size] for name in names}
        ours, *peers = names
        ratio = {peer: speed_ratio(runs[ours], runs[peer]) for peer in peers}
        return {
            "input_len": size[0],
            "batch_size": size[1],
            **{figure: {name: spread([run[figure] for run in runs[name]]) for name in names} for figure in FIGURES},
            "ratio": ratio,
            "best_peer": min(ratio, key=lambda peer: ratio[peer], default=None),
            "equal": {peer: agreement(runs[ours], runs[peer]) for peer in peers},
            "runs": {name: [{k: v for k, v in run.items() if k != "tokens"} for run in runs[name]] for name in names},
        }


def speed_ratio(ours: Sequence[Answers], theirs: Sequence[Answers]) -> float:
    """Our speed as a multiple of theirs in the same round, the median over the rounds."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(mine["tokens_per_second"] / other["tokens_per_second"] for mine, other in pairs)


def agreement(ours: Sequence[Answers], theirs: Sequence[Answers]) -> float:
    """The share of tokens before the first difference of each request."""
    same = total = 0
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine["tokens"], other["tokens"], strict=True):
            differs = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
            same += differs[0] if differs else len(a)
            total += len(a)
    return same / total
