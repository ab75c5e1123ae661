"""The standard work: B requests at once, random prompts, greedy, end token ignored; and what is measured of it."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from pagedkv.api.errors import ConfigError, ModelError
from pagedkv.config import EngineConfig
from pagedkv.core.scheduler import Scheduler
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.runner import Runner
from pagedkv.engine.setup import Parts, build
from pagedkv.sampling.params import SamplingParams

_WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The sizes in tokens, and the seed of the prompts."""

    input_len: int
    output_len: int
    seed: int = 0

    def prompts(self, vocab_size: int, batch: int, run: int) -> list[list[int]]:
        """Random ids [batch, input_len], other ones in every `run`, the same for every engine."""
        generator = np.random.default_rng([self.seed, run, batch])
        ids: list[list[int]] = generator.integers(0, vocab_size, (batch, self.input_len)).tolist()
        return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run. Seconds; `first` has one entry a request, `gaps` one for each pair of consecutive tokens of a request.

    `peak_blocks` are the most cache blocks held in any step, `peak_running` the most requests that held some.
    """

    batch: int
    seconds: float
    tokens: list[list[int]]
    first: list[float]
    gaps: list[float]
    peak_blocks: int
    peak_running: int
    preemptions: int

    @property
    def output_tokens(self) -> int:
        """Tokens generated, counted."""
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def speed(self) -> float:
        """Output tokens a second over the whole run, prefill included."""
        return self.output_tokens / self.seconds

    def figures(self) -> dict[str, Any]:
        """The run as JSON values."""
        return {
            "seconds": self.seconds,
            "output_tokens": self.output_tokens,
            "tokens_per_second": self.speed,
            "time_to_first_token": statistics.median(self.first),
            "time_between_tokens_p50": _percentile(self.gaps, 50),
            "time_between_tokens_p99": _percentile(self.gaps, 99),
            "peak_blocks": self.peak_blocks,
            "peak_running": self.peak_running,
            "preemptions": self.preemptions,
        }


class _Watch:
    """Stands before the runner and looks at the cache while a step holds all it needs."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner, self._scheduler = runner, scheduler
        self.reset()

    def reset(self) -> None:
        self.peak_blocks = self.peak_running = 0

    def run(self, step: Any) -> Any:
        self.peak_blocks = max(self.peak_blocks, self._scheduler.pool.num_used)
        self.peak_running = max(self.peak_running, len(self._scheduler.running))
        return self._runner.run(step)

    def close(self) -> None:
        self._runner.close()


class Bench:
    """One engine for all batch sizes up to `largest`."""

    def __init__(
        self,
        model: str,
        work: Work,
        largest: int,
        settings: Mapping[str, Any],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        config = EngineConfig.of(model=model, **bench_settings(work, largest, settings))
        try:
            self.parts: Parts = build(config, progress)
        except ConfigError as error:
            if "max_model_len" not in settings and "max_model_len" in str(error):
                raise ConfigError(f"--input-len {work.input_len} + --output-len {work.output_len}: {error}") from error
            raise
        self.work = work
        self._watch = _Watch(self.parts.runner, self.parts.scheduler)
        self._engine = LLMEngine(dataclasses.replace(self.parts, runner=cast(Runner, self._watch)))

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def warm_up(self, batch: int) -> None:
        """A short run at this batch size, so that what is prepared once is not measured."""
        self.measure(self.work.prompts(self.parts.vocab_size, batch, 0), min(_WARM_UP_TOKENS, self.work.output_len))

    def run(self, batch: int, number: int) -> Measured:
        """Run `number` (from 1 on) at this batch size."""
        return self.measure(self.work.prompts(self.parts.vocab_size, batch, number), self.work.output_len)

    def measure(self, prompts: Sequence[list[int]], output_len: int) -> Measured:
        """Answer these prompts, all given at once, with so many tokens each."""
        engine, scheduler = self._engine, self.parts.scheduler
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        ready = [engine.prepare(prompt, params) for prompt in prompts]
        before = scheduler.num_preemptions
        self._watch.reset()
        began = time.perf_counter()
        keys = {engine.add_request(prompt, params) for prompt in ready}
        requests = [request for request in scheduler.waiting if request.id in keys]
        stamps: list[list[float]] = [[] for _ in requests]
        tokens: dict[int, list[int]] = {}
        while engine.has_unfinished_requests():
            finished = engine.step()
            now = time.perf_counter()
            for request, times in zip(requests, stamps, strict=True):
                if len(scheduler.tokens_of(request)) - request.prompt_len > len(times):
                    times.append(now)
            tokens |= {key: output.outputs[0].token_ids for key, output in finished}
        if any(len(times) != output_len for times in stamps):
            raise ModelError("a request ended early, as the log says: there is nothing to measure")
        return Measured(
            batch=len(prompts),
            seconds=now - began,
            tokens=[tokens[request.id] for request in requests],
            first=[times[0] - began for times in stamps],
            gaps=[float(gap) for times in stamps for gap in np.diff(times)],
            peak_blocks=self._watch.peak_blocks,
            peak_running=self._watch.peak_running,
            preemptions=scheduler.num_preemptions - before,
        )


def bench_settings(work: Work, largest: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's settings, those left open filled for the work. Raises `ConfigError` for sizes that cannot fit.

    Prefix caching is off: nothing but the model's work is to be measured. There are twice the rows that are needed,
    if a step has room for them, since the cache is sized for all rows, and the scheduler admits a request only while
    it can keep a block free for each running one.
    """
    length = work.input_len + work.output_len
    step = settings.get("max_num_batched_tokens", EngineConfig(model="any").max_num_batched_tokens)
    rows = max(largest, min(2 * largest, step))
    named = {"enable_prefix_caching": False, "max_model_len": length, "max_num_seqs": rows, **settings}
    if named["max_model_len"] < length:
        raise ConfigError(
            f"--input-len {work.input_len} + --output-len {work.output_len} are {length} tokens, more than "
            f"--max-model-len {named['max_model_len']}; lower the lengths or raise it"
        )
    if named["max_num_seqs"] < largest:
        raise ConfigError(
            f"--max-num-seqs {named['max_num_seqs']} is below the largest batch size, {largest}; raise it, or leave "
            "it out"
        )
    return named


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median, least and most; None when there is nothing."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known)}


def _percentile(values: Sequence[float], share: float) -> float | None:
    return float(np.percentile(values, share)) if values else None
