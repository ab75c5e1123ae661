"""Engines over tiny models, what each request gives when it is alone, and backends that fail on purpose."""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pagedkv import LLM, RequestOutput, SamplingParams
from tests.helpers.tiny_models import hf_greedy, hf_logits, tiny_model

SETTINGS: dict[str, Any] = {
    "backend": "cpu",
    "backend_options": {"threads": 1},
    "num_blocks": 65,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


@functools.cache
def _home() -> Path:
    home = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


@functools.cache
def folder(family: str = "llama", **overrides: Any) -> Path:
    """A tiny model's folder, made once for all tests: read it, never write to it."""
    return tiny_model(_home(), family, **overrides)


@contextmanager
def engine(family: str = "llama", **settings: Any) -> Iterator[LLM]:
    """An `LLM` that must have come to rest when the block ends."""
    with LLM(folder(family), **SETTINGS | settings) as llm:
        yield llm
        drained(llm)


def drained(llm: LLM) -> None:
    """DRAIN: nothing runs or waits, no block is referenced, free + cached = all, on both levels, as the gauges say."""
    llm.engine.settle()
    gauges = llm.metrics()
    assert (gauges.running, gauges.waiting, gauges.swapped, gauges.loading) == (0, 0, 0, 0)
    for level, blocks in ((gauges.device, llm.engine.scheduler.pool), (gauges.host, llm.engine.scheduler.tiers.host)):
        assert (level.used, level.moving, level.cached + level.free) == (0, 0, blocks.usable)
    scheduler, pool = llm.engine.scheduler, llm.engine.scheduler.pool
    assert (len(scheduler.running), len(scheduler.waiting)) == (0, 0)
    assert not llm.engine.has_unfinished_requests()
    assert pool.leaks() == {}
    assert pool.num_used == 0
    assert pool.available == pool.usable == llm.engine.parts.memory.num_blocks - 1
    assert scheduler.rows.num_free == scheduler.config.max_num_seqs
    scheduler.check()
    scheduler.check_idle()


def greedy(max_tokens: int | None = 8, **names: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | names)


def seeded(seed: int, max_tokens: int = 8, **names: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": max_tokens, "ignore_eos": True} | names)


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def some_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random byte tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(n)] for n in lengths]


@functools.cache
def _alone(family: str) -> LLM:
    llm = LLM(folder(family), **SETTINGS | {"enable_prefix_caching": False, "max_num_batched_tokens": 256})
    atexit.register(llm.close)
    return llm


@functools.cache
def _solo(family: str, prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    return tuple(_alone(family).generate(list(prompt), params, use_tqdm=False)[0].outputs[0].token_ids)


def solo(prompt: Sequence[int], params: SamplingParams, family: str = "llama") -> list[int]:
    """The oracle: the request alone, without a cache, its prompt in one piece."""
    return list(_solo(family, tuple(prompt), params))


@functools.cache
def _transformers(family: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(hf_greedy(folder(family), prompt, count))


def transformers_greedy(prompt: Sequence[int], count: int = 8, family: str = "llama") -> list[int]:
    """What transformers generates, end ids being tokens like any other."""
    return list(_transformers(family, tuple(prompt), count))


@functools.cache
def _transformers_logits(family: str, ids: tuple[int, ...]) -> torch.Tensor:
    return hf_logits(folder(family), ids)


def transformers_logits(ids: Sequence[int], family: str = "llama") -> torch.Tensor:
    """Logits [len(ids), vocabulary] of transformers."""
    return _transformers_logits(family, tuple(ids))


def kept_logits(llm: LLM) -> dict[tuple[str, int], torch.Tensor]:
    """From now on, the engine's logits by (label of the request, number of tokens before)."""
    runner, scheduler = llm.engine.parts.runner, llm.engine.scheduler
    kept: dict[tuple[str, int], torch.Tensor] = {}
    run = runner.run

    def keeping(step: Any) -> torch.Tensor:
        logits = run(step)
        for request, row in zip(scheduler.holders(step), logits, strict=True):
            assert request is not None
            kept[request.label, len(scheduler.tokens_of(request))] = row.clone()
        return logits

    runner.run = keeping
    return kept


class Failing:
    """A backend whose `attend` raises on its `at`-th call (and, with `forever`, on every later one)."""

    def __init__(self, backend: Any, at: int, error: Callable[[], BaseException], *, forever: bool = False) -> None:
        self._backend, self._at, self._error, self._forever = backend, at, error, forever
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def attend(self, *args: Any, **names: Any) -> None:
        self.calls += 1
        if self.calls == self._at or (self._forever and self.calls > self._at):
            raise self._error()
        self._backend.attend(*args, **names)


def fail_at(llm: LLM, at: int, error: Callable[[], BaseException], *, forever: bool = False) -> Failing:
    """Let the engine's backend fail on the `at`-th `attend` from now on."""
    failing = Failing(llm.engine.parts.runner.backend, at, error, forever=forever)
    llm.engine.parts.runner.backend = failing  # type: ignore[assignment]
    return failing
