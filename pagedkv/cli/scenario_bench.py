"""A scenario on one engine after another: no host memory, host memory for the preempted, and for evicted prefixes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pagedkv import plugins
from pagedkv.api.errors import ConfigError, ModelError
from pagedkv.cli.machine import engine_facts
from pagedkv.cli.scenarios import Ask, Work
from pagedkv.config import EngineConfig
from pagedkv.core.negotiation import Choice, negotiate
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.memory import MemoryPlan
from pagedkv.engine.metrics import EngineMetrics
from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.setup import Parts, build, model_requirements
from pagedkv.sampling.params import SamplingParams

NO_SWAP, SWAP, HOST_TIER = "no swap", "swap", "swap + host tier"
_HOST_SIZES = ("swap_space", "swap_blocks")
_WARM_UP_TOKENS = 4
_WARM_UP = 1 << 33  # a seed of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A work on a model: what each of its engines is made with.

    `num_blocks` of the device's cache; None where the user's own setting sizes it. `host_blocks` where host memory is
    left open. `kinds` of engines, in the order in which they run.
    """

    work: Work
    model: str
    named: Mapping[str, Any]
    num_blocks: int | None
    host_blocks: int
    kinds: tuple[str, ...]

    def build(self, kind: str, progress: Callable[[int, int], None] | None = None) -> Parts:
        """Make one engine's parts."""
        try:
            return build(self._config(kind), progress)
        except ConfigError as error:
            if f"max_model_len={self.work.longest}" not in str(error):
                raise
            longest = f"the longest request of --scenario {self.work.scenario} has {self.work.longest} tokens"
            raise ConfigError(f"{longest}: {error}; lower the lengths") from error

    def _config(self, kind: str) -> EngineConfig:
        sized = {} if self.num_blocks is None else {"num_blocks": self.num_blocks}
        own = {name: value for name, value in self.named.items() if name not in _HOST_SIZES}
        return EngineConfig.of(model=self.model, **own, **sized, **self._host(kind))

    def _host(self, kind: str) -> dict[str, Any]:
        if kind == NO_SWAP:
            return {"swap_space": 0}
        given = {name: self.named[name] for name in _HOST_SIZES if self.named.get(name, "auto") != "auto"}
        return {**(given or {"swap_blocks": self.host_blocks}), "enable_host_caching": kind == HOST_TIER}


def plan(model: str, work: Work, share: float | None, settings: Mapping[str, Any]) -> Plan:
    """Size the cache to `share` of the work, before a weight is read. Raises `ConfigError` for what cannot fit.

    Host memory that is left open holds all of the work. A backend without host memory runs the first engine only, and
    without prefix caching there is nothing to keep for others.
    """
    rows = work.concurrency * work.samples
    named = {"max_model_len": work.longest, "max_num_seqs": rows, **settings}
    config = EngineConfig.of(model=model, **named)
    if config.max_model_len is not None and config.max_model_len < work.longest:
        raise ConfigError(
            f"the longest request of --scenario {work.scenario} has {work.longest} tokens, more than --max-model-len "
            f"{config.max_model_len}; raise it, or lower the lengths"
        )
    if 0 in (config.swap_bytes, config.swap_blocks):
        raise ConfigError("a scenario runs without host memory anyway: leave 0 out, or say how much to compare it with")
    selected = plugins.select(config.backend, device=config.device)
    offer = plugins.offer(selected)
    size = negotiate(offer, model_requirements(config), backend=selected.name).block_size
    kinds = [NO_SWAP]
    if "host" in offer.placements:
        kinds += [SWAP, HOST_TIER] if config.enable_prefix_caching else [SWAP]
    return Plan(
        work=work,
        model=model,
        named={**named, "backend": selected.name, "device": selected.device.index},
        num_blocks=None if share is None else _blocks(work, share, size),
        host_blocks=_ceil(2 * work.tokens, size),
        kinds=tuple(kinds),
    )


def _blocks(work: Work, share: float, size: int) -> int:
    """Blocks of `size` for this share of the work, and the null block."""
    blocks, least = _ceil(int(share * work.tokens), size), _ceil(work.longest - 1, size)
    if blocks < least:
        enough = np.ceil(100 * (least * size + 1) / work.tokens) / 100
        raise ConfigError(
            f"--cache-share {share:g} of {work.tokens} tokens are {blocks} blocks of {size}, but the longest request "
            f"alone, {work.longest} tokens, needs {least}; --cache-share {enough:g} would do"
        )
    return blocks + 1


def _ceil(tokens: int, size: int) -> int:
    return -(-tokens // size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What an engine did: prompt tokens by where they came from, preemptions, blocks copied and their bytes."""

    prompt_tokens: int
    device_cached_tokens: int
    host_cached_tokens: int
    computed_prompt_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    preemptions_by_swap: int
    preemptions_by_recompute: int
    blocks_out: int
    blocks_in: int
    bytes_out: int
    bytes_in: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The work on one engine; `first` are seconds to the first token [asks], `answers` ids [asks][samples]."""

    kind: str
    facts: dict[str, Any]
    memory: MemoryPlan
    choice: Choice
    seconds: float
    first: list[float]
    answers: list[list[list[int]]]
    counts: Counts

    def figures(self) -> dict[str, Any]:
        """The run as JSON values; seconds."""
        tokens = sum(len(answer) for answers in self.answers for answer in answers)
        return {
            "seconds": self.seconds,
            "output_tokens": tokens,
            "tokens_per_second": tokens / self.seconds,
            "time_to_first_token": {"median": statistics.median(self.first), "max": max(self.first)},
            **asdict(self.counts),
        }


def measure(work: Work, kind: str, parts: Parts, advance: Callable[[], None] = lambda: None) -> Measured:
    """Let an engine of these parts work, and close it; `advance` is called for each answer."""
    engine = LLMEngine(parts)
    try:
        _warm_up(engine, work)
        before, began = engine.metrics(), time.perf_counter()
        outputs = Client(engine, work).run(advance)
        seconds = time.perf_counter() - began
        return Measured(
            kind=kind,
            facts=engine_facts(parts),
            memory=parts.memory,
            choice=parts.choice,
            seconds=seconds,
            first=[output.metrics.time_to_first_token or 0.0 for output in outputs],
            answers=[[answer.token_ids for answer in output.outputs] for output in outputs],
            counts=_counts(parts.memory, outputs, before, engine.metrics()),
        )
    finally:
        engine.close()


def _warm_up(engine: LLMEngine, work: Work) -> None:
    """A short answer to a prompt of its own, so that what is prepared once is not measured; nothing of it is kept."""
    ids = np.random.default_rng([work.seed, _WARM_UP]).integers(0, engine.parts.vocab_size, work.contexts[0]).tolist()
    params = _params(min(_WARM_UP_TOKENS, work.output_len), 1, 0)
    engine.add_request(engine.prepare(ids, params), params)
    while engine.has_unfinished_requests():
        engine.step()
    engine.settle()
    engine.reset_prefix_cache()


def _params(output_len: int, samples: int, seed: int) -> SamplingParams:
    """One answer is greedy; several are drawn."""
    return SamplingParams(
        n=samples,
        temperature=0.0 if samples == 1 else 1.0,
        seed=seed,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
    )


def _counts(
    memory: MemoryPlan, outputs: Iterable[RequestOutput], before: EngineMetrics, after: EngineMetrics
) -> Counts:
    prompt = cached = host = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        cached += output.num_cached_tokens
        host += output.num_host_cached_tokens
    swaps = after.swaps - before.swaps
    saved, fetched = after.blocks_saved - before.blocks_saved, after.blocks_fetched - before.blocks_fetched
    size = 0 if memory.host is None else memory.host.cost.per_block
    return Counts(
        prompt_tokens=prompt,
        device_cached_tokens=cached - host,
        host_cached_tokens=host,
        computed_prompt_tokens=prompt - cached,
        recomputed_tokens=after.recomputed_tokens - before.recomputed_tokens,
        computed_tokens=after.computed_tokens - before.computed_tokens,
        preemptions_by_swap=swaps,
        preemptions_by_recompute=after.preemptions - before.preemptions - swaps,
        blocks_out=saved,
        blocks_in=fetched,
        bytes_out=saved * size,
        bytes_in=fetched * size,
    )


class Client:
    """Asks in the work's order, `concurrency` at once; one whose answer is still to come is passed over."""

    def __init__(self, engine: LLMEngine, work: Work) -> None:
        self._engine, self._work = engine, work
        self._contexts, self._texts = work.texts(engine.parts.vocab_size)
        self._left = list(range(len(work.asks)))
        self._open: dict[int, int] = {}
        self._answered: dict[int, RequestOutput] = {}

    def run(self, advance: Callable[[], None]) -> list[RequestOutput]:
        """Let everything be answered; outputs in the work's order."""
        while self._left or self._open:
            self._submit()
            for key, output in self._engine.step():
                self._answered[self._open.pop(key)] = self._whole(output)
                advance()
        return [self._answered[place] for place in range(len(self._work.asks))]

    def _submit(self) -> None:
        ready = [place for place in self._left if self._comes(self._work.asks[place])]
        for place in ready[: self._work.concurrency - len(self._open)]:
            params = _params(self._work.output_len, self._work.asks[place].samples, self._work.seed + place)
            self._open[self._engine.add_request(self._engine.prepare(self._prompt(place), params), params)] = place
            self._left.remove(place)

    def _comes(self, ask: Ask) -> bool:
        return ask.after is None or ask.after in self._answered

    def _prompt(self, place: int) -> list[int]:
        ask = self._work.asks[place]
        if ask.after is None:
            return self._contexts[ask.context] + self._texts[place]
        before = self._answered[ask.after]
        return [*before.prompt_token_ids, *before.outputs[ask.branch].token_ids, *self._texts[place]]

    def _whole(self, output: RequestOutput) -> RequestOutput:
        if any(len(answer.token_ids) != self._work.output_len for answer in output.outputs):
            raise ModelError("a request ended early, as the log says: there is nothing to measure")
        return output


def differing(runs: Sequence[Measured]) -> int:
    """How many requests were not answered with the same ids by all engines."""
    answers = zip(*(run.answers for run in runs), strict=True)
    return sum(any(other != first for other in others) for first, *others in answers)
