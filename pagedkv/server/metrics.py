"""What GET /metrics says: the engine's own numbers, and what the front counts of requests, tokens and answers.

    engine's news ──▶ news ──▶ counters, histograms ─┐
      with a pong ──▶ snapshot ──▶ gauges ───────────┼──▶ text
    app's answers ──▶ http, refused, aborted ────────┘

Every series is there from the start, and no client can add one: labels take known values, or "other".
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from pagedkv import __version__
from pagedkv.engine.metrics import EngineMetrics
from pagedkv.server.errors import as_http
from pagedkv.server.messages import Ending, Facts, News, Piece
from pagedkv.server.series import MODEL, OTHER, Counter, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHED = ("stop", "length", "abort", "error")
ABORTED = ("disconnect", "timeout", "shutdown", "client", OTHER)
CODES = (
    "body_timeout",
    "body_too_large",
    "context_length_exceeded",
    "engine_dead",
    "engine_starting",
    "engine_stopped",
    "foreign_host",
    "internal_error",
    "invalid_api_key",
    "invalid_host",
    "invalid_length",
    "invalid_value",
    "model_not_found",
    "no_usable_logits",
    "not_ready",
    "queue_full",
    "request_timeout",
    "stopping",
    "unsupported",
    "unsupported_encoding",
    "unsupported_media_type",
)
TYPES = (
    "authentication_error",
    "invalid_request_error",
    "rate_limit_error",
    "server_error",
    "service_unavailable",
    "timeout_error",
)
KINDS = (*CODES, *TYPES, OTHER)
"""Kinds of errors: `code` of the error object that the client got, or its `type` where that is none of `CODES`."""
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
STATUSES = range(100, 600)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
"""Of whole requests: a millisecond, to a long answer of a slow processor."""
HTTP_SECONDS = (0.005, 0.025, 0.1, 0.5, 1, 2.5, 10, 50, 250, 1000)
"""Coarser, since every path has its own."""
STEP_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30),
)
"""Of steps and between tokens: finer where people read and where accelerators are, up to a large prompt's step."""
TOKENS = tuple(2**power for power in range(20))

_STATES = {
    "running": "Sequences that hold blocks of the device and take part in steps.",
    "waiting": "Sequences that wait for their first step, or again after a preemption.",
    "swapped": "Preempted sequences whose blocks are in host memory.",
    "loading": "Sequences whose blocks are on their way from host memory.",
}
_GROWING = {
    "num_preemptions": ("preemptions", "Times a running sequence had to stop for others."),
    "swaps": ("swaps", "Preemptions whose blocks went to host memory."),
    "recomputed_tokens": ("recomputed_tokens", "Tokens computed again after a preemption."),
    "blocks_saved": ("blocks_saved", "Blocks copied from the device to host memory."),
    "blocks_fetched": ("blocks_fetched", "Blocks copied from host memory to the device."),
    "computed_tokens": ("computed_tokens", "Tokens that steps computed, of prompts and of answers."),
    "replayed_steps": ("replayed_steps", "Steps that a recording served."),
}
"""Our name -> the field of `EngineMetrics` that counts since that engine's start, and what it is."""


@dataclass(slots=True)
class _Open:
    """A request that has not ended. `last`: by choice, when its last tokens came.

    `early` tokens came together with their choice's first one, `longest` is the longest choice that did: when each of
    its tokens was made, only the ending tells.
    """

    arrived: float | None = None
    tokens: int = 0
    early: int = 0
    longest: int = 0
    last: dict[int, float] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


class _Families(Collector):
    """What a registry asks for at each scrape."""

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Every family, as of now."""
        return self._families()


class ServerMetrics:
    """Every series of one server, in a registry of its own. Call it in the front's event loop only.

    `routes`: path templates with their methods; `clock` and `wall` give seconds, the former as the engine's moments.
    """

    def __init__(
        self,
        model: str,
        routes: Mapping[str, Iterable[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.registry = CollectorRegistry()
        self._model, self._clock, self._wall = model, clock, wall
        self._handlers = frozenset(routes)
        self._facts: Facts | None = None
        self._up, self._last_step = False, 0.0
        self._now: EngineMetrics | None = None
        self._before = dict.fromkeys(_GROWING, 0)  # what engines counted that are no more
        self._open: defaultdict[int, _Open] = defaultdict(_Open)
        self._series: list[Counter | Histogram] = []
        self._make_counters()
        self._make_histograms()
        self._make_http(routes)
        self.registry.register(_Families(self._families))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def _make_counters(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, as `usage` counts them.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens of answers, as `usage` counts them.")
        self._queries = self._counter("prefix_cache_queries", "Tokens of prompts looked up in the prefix cache.")
        self._hits = self._counter(
            "prefix_cache_hits", "Those of them found, by where.", ["tier"], [("device",), ("host",)]
        )
        self._finished = self._counter(
            "request_success",
            "Answers that the engine ended, by why; each of n counts.",
            ["finished_reason"],
            [(reason,) for reason in FINISHED],
        )
        self._errors = self._counter(
            "request_errors", "Errors sent to clients, by kind.", ["kind"], [(kind,) for kind in KINDS]
        )
        self._aborted = self._counter(
            "requests_aborted", "Requests given up, by why.", ["reason"], [(reason,) for reason in ABORTED]
        )
        self._restarts = self._counter("engine_restarts", "Engines that were lost and started again.")

    def _make_histograms(self) -> None:
        self._first = self._histogram(
            "time_to_first_token_seconds", "From sending a request to the engine to its first token.", SECONDS
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of one answer.", STEP_SECONDS
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From sending a request to the engine to its end.", SECONDS
        )
        self._queued = self._histogram(
            "request_queue_time_seconds", "From sending a request to the engine to its first step.", SECONDS
        )
        self._step = self._histogram("step_time_seconds", "One step of the engine.", STEP_SECONDS)
        self._prompt_length = self._histogram("request_prompt_tokens", "Tokens of a finished request's prompt.", TOKENS)
        self._answer_length = self._histogram(
            "request_generation_tokens", "Tokens of a finished request's answers, all n of them.", TOKENS
        )

    def _make_http(self, routes: Mapping[str, Iterable[str]]) -> None:
        served = [(path, method, "200") for path, methods in routes.items() for method in methods]
        self._http = self._counter(
            "http_requests",
            "Answers over HTTP, by path template.",
            ["handler", "method", "status"],
            [*served, (OTHER, OTHER, "404")],
        )
        self._http_seconds = self._histogram(
            "http_request_duration_seconds",
            "From an HTTP request's headers to its answer's last byte, by path template.",
            HTTP_SECONDS,
            ["handler"],
            [(path,) for path in (*routes, OTHER)],
        )

    def _counter(self, name: str, *arguments: Any) -> Counter:
        counter = Counter(f"pagedkv:{name}", *arguments)
        self._series.append(counter)
        return counter

    def _histogram(self, name: str, *arguments: Any) -> Histogram:
        histogram = Histogram(f"pagedkv:{name}", *arguments)
        self._series.append(histogram)
        return histogram

    # -- what the engine says ------------------------------------------------------------------------------------------

    def describe(self, facts: Facts) -> None:
        """Remember what the engine said of itself when it had started."""
        self._facts = facts

    def submitted(self, key: int) -> None:
        """A request is on its way to the engine: its latencies begin here."""
        self._open[key] = _Open(self._clock())

    def news(self, news: News) -> None:
        """Take in a message of the running engine; they come in order."""
        if news.step_seconds is not None:
            self._step.add(news.step_seconds)
            self._last_step = self._wall()
        if news.pieces:
            self._take(news.pieces)
        for key, _ in news.refused:
            if key in self._open:
                del self._open[key]
        for ending in news.endings:
            self._end(ending, self._open.pop(ending.key, _Open()))
        if news.metrics is not None:
            self.snapshot(news.metrics)

    def _take(self, pieces: Sequence[Piece]) -> None:
        """Count tokens, and the time since those before; rows of one step mostly waited equally long."""
        now, requests, total = self._clock(), self._open, 0
        gaps: dict[float, int] = {}
        for piece in pieces:
            request, count = requests[piece.key], len(piece.token_ids)
            if piece.finish_reason is not None:
                request.reasons.append(piece.finish_reason)
            if not count:
                continue
            total += count
            request.tokens += count
            last = request.last.get(piece.index)
            request.last[piece.index] = now
            if last is not None:
                gap = (now - last) / count
                gaps[gap] = gaps.get(gap, 0) + count
            elif count > 1:
                request.early += count - 1
                request.longest = max(request.longest, count)
        self._generation_tokens.add(amount=total)
        for gap, times in gaps.items():
            self._between.add(gap, times)

    def _end(self, ending: Ending, request: _Open) -> None:
        moments = ending.metrics
        arrived = moments.arrival_time if request.arrived is None else request.arrived
        for reason in request.reasons:
            self._finished.add(reason)
        if moments.first_scheduled_time is not None:
            self._queued.add(moments.first_scheduled_time - arrived)
            self._count_prompt(ending)
        if moments.first_token_time is not None:
            self._first.add(moments.first_token_time - arrived)
        if moments.finished_time is not None and "abort" not in request.reasons:
            self._whole.add(moments.finished_time - arrived)
            self._prompt_length.add(ending.num_prompt_tokens)
            self._answer_length.add(request.tokens)
        self._spread(ending, request)

    def _count_prompt(self, ending: Ending) -> None:
        self._prompt_tokens.add(amount=ending.num_prompt_tokens)
        self._queries.add(amount=ending.num_prompt_tokens)
        self._hits.add("device", amount=ending.num_cached_tokens - ending.num_host_cached_tokens)
        self._hits.add("host", amount=ending.num_host_cached_tokens)

    def _spread(self, ending: Ending, request: _Open) -> None:
        """Tokens that came all at once, of a request without `stream`: the mean stands for each."""
        moments = ending.metrics
        if request.early and moments.first_token_time is not None and moments.finished_time is not None:
            mean = (moments.finished_time - moments.first_token_time) / (request.longest - 1)
            self._between.add(mean, request.early)

    def snapshot(self, metrics: EngineMetrics) -> None:
        """Remember the numbers of the running engine; `news` does so too where they are part of it."""
        self._now = metrics

    def engine_restarted(self) -> None:
        """An engine was lost: its counts stay in ours, its requests have failed, and the next one begins at 0."""
        self._restarts.add()
        self._before = {name: self._total(name) for name in _GROWING}
        self._now = None
        self._open.clear()

    def engine_up(self, up: bool) -> None:
        """Whether the engine takes requests now; while it does not, nothing runs, waits, or holds blocks."""
        self._up = up

    # -- what the front does -------------------------------------------------------------------------------------------

    def refused(self, error: BaseException) -> None:
        """An error was sent to a client, as an answer or as the last event of a stream."""
        http = as_http(error)
        self._errors.add(next((kind for kind in (http.code or "", http.type) if kind in KINDS), OTHER))

    def aborted(self, reason: str) -> None:
        """A request was given up."""
        self._aborted.add(reason if reason in ABORTED else OTHER)

    def http(self, handler: str | None, method: str, status: int, seconds: float) -> None:
        """A request was answered; `handler` is the path template, None where no route matched."""
        known = handler if handler in self._handlers and handler is not None else OTHER
        self._http.add(known, method if method in METHODS else OTHER, str(status) if status in STATUSES else OTHER)
        self._http_seconds.add(seconds, labels=(known,))

    # -- what Prometheus reads -----------------------------------------------------------------------------------------

    def text(self) -> tuple[bytes, str]:
        """The exposition and its content type.

        It is the one format that all collectors read. As OpenMetrics, which Prometheus would rather have, the library
        writes an underscore for the colon of every name unless it is asked not to: the same series under two names.
        """
        return generate_latest(self.registry), CONTENT_TYPE

    def _families(self) -> Iterator[Metric]:
        for series in self._series:
            yield series.family(self._model)
        yield from self._engine_counters()
        yield from self._requests()
        yield from self._cache()
        yield self._gauge("engine_up", "1 while the engine takes requests.", int(self._up))
        yield self._gauge("engine_last_step_timestamp_seconds", "When the last step ended, 0 before.", self._last_step)
        yield from self._infos()

    def _engine_counters(self) -> Iterator[Metric]:
        for name, (_, documentation) in _GROWING.items():
            counter = CounterMetricFamily(f"pagedkv:{name}", documentation, labels=[MODEL])
            counter.add_metric([self._model], self._total(name))
            yield counter

    def _total(self, name: str) -> int:
        """What all engines counted so far."""
        now: int = 0 if self._now is None else getattr(self._now, _GROWING[name][0])
        return self._before[name] + now

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"pagedkv:{name}", documentation, labels=[MODEL])
        gauge.add_metric([self._model], value)
        return gauge

    def _requests(self) -> Iterator[Metric]:
        now = self._now if self._up else None
        for state, documentation in _STATES.items():
            yield self._gauge(f"num_requests_{state}", documentation, getattr(now, state, 0))
        yield self._gauge(
            "num_requests_open",
            "Requests sent to the engine that have not ended, as the front knows them, even of a stuck engine.",
            len(self._open) if self._up else 0,
        )

    def _cache(self) -> Iterator[Metric]:
        now = self._now if self._up else None
        blocks = GaugeMetricFamily(
            "pagedkv:kv_cache_blocks", "Blocks by tier and state.", labels=[MODEL, "tier", "state"]
        )
        for tier in ("device", "host"):
            pool = getattr(now, tier, None)
            for state in ("used", "cached", "free", "moving"):
                blocks.add_metric([self._model, tier, state], getattr(pool, state, 0))
        yield blocks
        yield self._gauge("kv_cache_usage_perc", "Part of the device's blocks in use, 0 to 1.", _usage(now))

    def _infos(self) -> Iterator[Metric]:
        facts = self._facts
        build = {"version": __version__, "backend": getattr(facts, "backend", ""), "model": self._model}
        names = ("block_size", "num_blocks", "kv_dtype", "max_model_len")
        cache = {name: str(getattr(facts, name, "")) for name in names}
        for name, documentation, labels in (
            ("build", "What serves which model, and on what.", build),
            ("cache_config", "The cache as it was set up, the null block in num_blocks.", cache),
        ):
            info = InfoMetricFamily(f"pagedkv:{name}", documentation, labels=[MODEL])
            info.add_metric([self._model], labels)
            yield info


def _usage(now: EngineMetrics | None) -> float:
    """Blocks that no request could get now, of all: cached ones are as good as free, as in vLLM's series."""
    if now is None:
        return 0.0
    pool = now.device
    taken = pool.used + pool.moving
    return taken / max(1, taken + pool.cached + pool.free)
