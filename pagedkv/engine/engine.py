"""The step loop: schedule, run, sample, publish. One thread at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api.errors import EngineDead, RequestInvalid
from pagedkv.api.records import Int32, Int64
from pagedkv.core.request import Reason, Request
from pagedkv.core.step import Step
from pagedkv.engine.embedding import Embedder
from pagedkv.engine.live import Group, Sample, Text, TokenTexts
from pagedkv.engine.metrics import EngineMetrics, EngineStats, metrics_of
from pagedkv.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagedkv.engine.prompts import Prompt, PromptType, read_prompt
from pagedkv.engine.setup import Parts
from pagedkv.models.pooling import Pooling
from pagedkv.sampling.bad_words import word_ids
from pagedkv.sampling.guided import Grammar, Grammars
from pagedkv.sampling.logprobs import score
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.pooling import PoolingParams
from pagedkv.sampling.sampler import Sampler

_log = logging.getLogger("pagedkv.engine")
_PRICED_TOKENS = 64  # a step with fewer prompt tokens says little about how fast they are computed
_NO_TOKENS: Int32 = np.zeros(0, np.int32)
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that consecutive requests get far-apart seeds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sampling:
    """Draws of one step: logits [n, V], table rows [n], output tokens that each has [n], and whose they are."""

    logits: torch.Tensor
    rows: Int64
    index: Int64
    producers: list[Request | None]

    def extended(self, parents: Sequence[int], forks: Sequence[Request]) -> _Sampling:
        """The same and one more draw for each fork, from the logits of its parent, given by place."""
        at = np.array([*range(len(self.rows)), *parents], np.int64)
        rows = np.array([fork.row for fork in forks], np.int64)
        return _Sampling(
            logits=self.logits[torch.from_numpy(at).to(self.logits.device)],
            rows=np.concatenate([self.rows, rows]),
            index=self.index[at],
            producers=[*self.producers, *forks],
        )


def _grammars(parts: Parts) -> Grammars | None:
    tokenizer = parts.tokenizer
    if tokenizer is None:
        return None
    return Grammars(tokenizer.to_json, tokenizer.vocab_size, parts.vocab_size, parts.end_ids)


def _trouble(sample: Sample) -> str:
    """Why a sample ended with an error."""
    if sample.guide is not None and sample.guide.trouble:
        return f"its grammar cannot go on: {sample.guide.trouble}"
    return "no usable logits (the model gave NaN, or the request's settings mask every token)"


class LLMEngine:
    """Owns the scheduler, the runner and every live request; `LLM` and the command line stand on it."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.scheduler = parts.scheduler
        self.tokenizer = parts.tokenizer
        self.stats = EngineStats()
        self._runner = parts.runner
        self._swap = parts.swap
        self._sampler = Sampler(parts.config.max_num_seqs, parts.vocab_size, parts.config.seed, parts.device_ops)
        self._token_texts = TokenTexts(parts.tokenizer)
        self._grammars = _grammars(parts)
        self._groups: dict[int, Group] = {}
        self._samples: dict[int, Sample] = {}  # by the scheduler's id of their request
        self._unforked: set[int] = set()  # groups whose other samples wait for the prompt
        self._following: set[int] = set()  # groups whose tokens are looked at when they come
        self._embedder = None if parts.pooling is None else Embedder(parts.scheduler, parts.pooling)
        self._dead: BaseException | None = None

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def pooling(self) -> Pooling | None:
        """How the model makes vectors; None where it generates text."""
        return self.parts.pooling

    def prepare(self, prompt: PromptType, params: SamplingParams | PoolingParams) -> Prompt:
        """Tokenize and check a request without queueing it. Raises `RequestError`."""
        ready = read_prompt(prompt, self.tokenizer, self.parts.vocab_size)
        if isinstance(params, PoolingParams):
            self._pooler().check(ready, params)
        else:
            self._check(ready, params)
        return ready

    def _pooler(self) -> Embedder:
        if self._embedder is None:
            raise RequestInvalid(
                "this model declares no pooling, so it makes no vectors: use generate, or load an embedding model (a "
                "folder with modules.json and a pooling config, or a GGUF file with a pooling_type)",
                field="model",
            )
        return self._embedder

    def _check_generates(self) -> None:
        if self.pooling is not None:
            raise RequestInvalid(
                f"this model makes vectors ({self.pooling.kind} pooling) and generates no text: use embed, or "
                "/v1/embeddings of the server, or load a model that generates",
                field="model",
            )

    def _check(self, ready: Prompt, params: SamplingParams) -> None:
        self._check_generates()
        params.check_ids(self.parts.vocab_size)
        if self.tokenizer is None and params.stop:
            raise RequestInvalid("stop looks for text, but there is no tokenizer: use stop_token_ids", field="stop")
        self._bad_words(params)
        self._check_some_token_is_left(params)
        self._grammar(params)
        self.scheduler.limit(len(ready.ids), params.max_tokens)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        sequences: list[tuple[int, ...]] = []
        for word in params.bad_words:
            if not isinstance(word, str):
                sequences.append(word)
            elif self.tokenizer is None:
                raise RequestInvalid("bad_words as text need a tokenizer: give lists of token ids", field="bad_words")
            else:
                sequences += word_ids(word, partial(self.tokenizer.encode, add_special_tokens=False))
        # Some tokenizers know ids that the model does not: it cannot write those words.
        return tuple(dict.fromkeys(ids for ids in sequences if max(ids) < self.parts.vocab_size))

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """What guides the request, compiled."""
        if params.guided_decoding is None:
            return None
        if self._grammars is None:
            raise RequestInvalid(
                "guided_decoding needs to know the tokens, and skip_tokenizer_init left the tokenizer out: make the "
                "engine with its tokenizer",
                field="guided_decoding",
            )
        return self._grammars.compiled(params.guided_decoding)

    def _check_some_token_is_left(self, params: SamplingParams) -> None:
        """Refuse what `allowed_token_ids` allows only to be masked at once."""
        if params.allowed_token_ids is None:
            return
        ends = self._end_ids(params) if params.min_tokens else ()
        never = {word[0] for word in self._bad_words(params) if len(word) == 1}
        if never.issuperset(set(params.allowed_token_ids) - set(ends)):
            raise RequestInvalid(
                "allowed_token_ids allows nothing that bad_words or min_tokens leave: allow another id",
                field="allowed_token_ids",
            )

    def add_request(
        self,
        prompt: PromptType | Prompt,
        params: SamplingParams | PoolingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = False,
    ) -> int:
        """Queue a request and return the engine's own id for it; `request_id` is only a label on its outputs.

        With `stream`, every step that gives it a token gives an output. `PoolingParams` ask for the prompt's vector.
        Raises `RequestError`; nothing is queued then.
        """
        self._check_alive()
        ready = prompt if isinstance(prompt, Prompt) else self.prepare(prompt, params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestInvalid(f"priority={priority!r} must be a whole number; lower runs first", field="priority")
        if isinstance(params, PoolingParams):
            return self._pooler().add(ready, params, request_id or "", priority)
        self._check_generates()
        bad_words, texts = self._bad_words(params), self._texts(ready, params)
        grammar = self._grammar(params)
        request = self.scheduler.add(
            ready.ids,
            label=request_id or "",
            max_tokens=params.max_tokens,
            end_ids=self._end_ids(params),
            priority=priority,
            salt=ready.salt,
            wanted=range(0 if params.prompt_logprobs is None else len(ready.ids) - 1),
        )
        group = Group(
            id=request.id,
            label=request.label,
            prompt=ready,
            params=params,
            seed=self._seed(request, params),
            stream=stream,
            bad_words=bad_words,
            grammar=grammar,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(ready.ids),
        )
        group.samples = [Sample(group=group, index=i, text=text) for i, text in enumerate(texts)]
        self._keep(group, request)
        return group.id

    def _keep(self, group: Group, first: Request) -> None:
        self._groups[group.id] = group
        self._register(group.samples[0], first)
        if group.params.n > 1:
            self._unforked.add(group.id)
        if group.follows:
            self._following.add(group.id)

    def _register(self, sample: Sample, request: Request) -> None:
        sample.request = request
        self._samples[request.id] = sample

    def _seed(self, request: Request, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        mixed = (self.parts.config.seed + (request.id + 1) * _SEED_STEP) % 2**64
        return mixed - 2**63

    def _end_ids(self, params: SamplingParams) -> tuple[int, ...]:
        model = () if params.ignore_eos else self.parts.end_ids
        return tuple(dict.fromkeys((*model, *params.stop_token_ids)))

    def _texts(self, prompt: Prompt, params: SamplingParams) -> list[Text | None]:
        """One for each sample, None without a tokenizer or on request."""
        if self.tokenizer is None or not params.detokenize:
            return [None] * params.n
        ids = prompt.ids.tolist()
        return [Text(self.tokenizer, ids, params) for _ in range(params.n)]

    def abort_request(self, request_id: int) -> RequestOutput | None:
        """End a request in any state, all its samples, and return what it had; None if unknown or finished."""
        if self._embedder is not None:
            return self._embedder.abort(request_id)
        group = self._groups.get(request_id)
        if group is None:
            return None
        ended = []
        for sample in group.samples:
            if sample.ended is None:
                if sample.request is not None:
                    self.scheduler.abort(sample.request)
                ended.append(self._end(sample, Reason.ABORT))
        return self._output(group, ended)

    def has_unfinished_requests(self) -> bool:
        """Whether another `step` is needed."""
        return bool(self._groups or self._embedder)

    def metrics(self) -> EngineMetrics:
        """What it does, in numbers."""
        graphs = self._runner.graphs
        return metrics_of(self.scheduler, self.stats, 0 if graphs is None else graphs.replays)

    def settle(self) -> None:
        """Wait until every block that is on its way between device and host has arrived."""
        while self._swap is not None and self.scheduler.tiers.moving:
            self._swap.begin(self.scheduler.tiers.outbox)
            self._swap.land(self.scheduler.landed, wait=True)

    def weights_changed(self) -> None:
        """Use nothing that was computed so far, on the device or in host memory: open requests are computed anew."""
        self._check_alive()
        self.scheduler.flush()
        if self._embedder is not None:
            self._embedder.start_over()

    def reset_prefix_cache(self) -> int:
        """Forget all that no request refers to, on the device and in host memory; returns how many blocks."""
        self._check_alive()
        return self.scheduler.reset_prefix_cache()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[int, RequestOutput]]:
        """Compute one step; returns (engine id, output) of what finished and of each streamed request that got a token.

        A failure of the device or of the engine itself ends every live request and raises `EngineDead`. An interrupt
        passes through: what was running is computed again.
        """
        self._check_alive()
        try:
            return self._step()
        except Exception as error:
            self._die(error)
            raise EngineDead(f"the engine stopped: {error}") from error
        except BaseException:
            self.scheduler.restart()
            raise

    def _step(self) -> list[tuple[int, RequestOutput]]:
        step = self._schedule()
        if step is None:
            return []
        self._admit(step)
        began = time.perf_counter()
        given = self._runner.run(step)
        outputs = (
            self._sample(step, given, began)
            if self._embedder is None
            else self._pool(self._embedder, step, given, began)
        )
        if self._swap is not None:
            self._swap.begin(self.scheduler.tiers.outbox)
        if self.scheduler.idle:
            self.scheduler.check_idle()
        return outputs

    def _pool(
        self, embedder: Embedder, step: Step, states: torch.Tensor, began: float
    ) -> list[tuple[int, RequestOutput]]:
        """Add the hidden states of a step to their vectors, and give those that are complete."""
        failed = embedder.take(step, states)
        self.scheduler.commit(step)
        finished = [self.scheduler.fail(request) for request in failed]
        finished += self.scheduler.append(step, _NO_TOKENS)
        self._count(step, _NO_TOKENS, time.perf_counter() - began)
        self.stats.finished += len(finished)
        return [(request.id, embedder.end(request)) for request in finished]

    def _sample(self, step: Step, logits: torch.Tensor, began: float) -> list[tuple[int, RequestOutput]]:
        """Draw the tokens that the logits of a step give, and tell what came of them."""
        failed = self._score_prompts(step, logits) if len(step.scored) else []
        self.scheduler.commit(step)
        finished = [self.scheduler.fail(request) for request in failed]
        sampling, forks = self._sampling(step, logits[: len(step.sample)])
        sampled = self._sampler(sampling.logits, sampling.rows, sampling.index)
        stopped = self._follow(sampling, sampled)
        finished += self.scheduler.append(step, sampled, stopped=stopped, forks=forks)
        self._count(step, sampled, time.perf_counter() - began)
        return self._publish(sampling, sampled, finished)

    def _schedule(self) -> Step | None:
        """The next step, transfers begun and taken in on the way; None when all there is to do is wait for one."""
        if self._swap is None:
            return self.scheduler.schedule()
        self._swap.land(self.scheduler.landed)
        step = self.scheduler.schedule()
        self._swap.begin(self.scheduler.tiers.outbox)
        if step is None:
            self._swap.land(self.scheduler.landed, wait=True)
        return step

    def _admit(self, step: Step) -> None:
        now = time.monotonic()
        for request in step.admitted:
            if self._embedder is not None:
                self._embedder.admit(request, now)
                continue
            sample = self._samples[request.id]
            self._set_row(sample, request)
            if sample.group.metrics.first_scheduled_time is None:
                sample.group.metrics.first_scheduled_time = now
        for request in step.preempted:
            _log.info("request %s preempted: no block left; %s", request.label, self._fate(request))

    def _fate(self, request: Request) -> str:
        """What becomes of a preempted request, and at what price."""
        price, size = self.scheduler.price, self.scheduler.config.block_size
        if request.saved_len:
            copying, computing = price.copying(len(request.saved)), price.computing(request.saved_len)
            costs = "" if copying is None else f" ({2e3 * copying:.1f} ms there and back"
            costs += f", {1e3 * computing:.1f} ms to compute again)" if costs and computing else ")" if costs else ""
            return f"{request.saved_len} tokens, {len(request.saved)} blocks of {size}, go to host memory{costs}"
        return "it will be computed again"

    def _set_row(self, sample: Sample, request: Request) -> None:
        group, tokens = sample.group, self.scheduler.tokens_of(request).tolist()
        sample.guide = None if group.grammar is None else group.grammar.start(tokens[request.prompt_len :])
        self._sampler.set_row(
            request.row,
            group.params,
            request.end_ids,
            group.seed,
            sample.index,
            tokens[: request.prompt_len],
            tokens[request.prompt_len :],
            group.bad_words,
            sample.guide,
        )

    def _score_prompts(self, step: Step, logits: torch.Tensor) -> list[Request]:
        """Fill in prompt log-probabilities; returns the requests whose logits are unusable."""
        owners = self.scheduler.owners(step.scored_rows)
        at = np.arange(len(step.sample), len(step.sample) + len(owners))
        groups = [self._samples[request.id].group for request in owners]
        positions = (step.positions.take(step.scored) + 1).tolist()
        tokens = np.array([g.prompt.ids[p] for g, p in zip(groups, positions, strict=True)], np.int64)
        counts = [group.params.prompt_logprobs or 0 for group in groups]
        failed = {}
        found = score(logits, at, tokens, counts)
        for request, group, position, scores in zip(owners, groups, positions, found, strict=True):
            if scores is None:
                failed[request.id] = request
            elif group.prompt_logprobs is not None:
                group.prompt_logprobs[position] = self._token_texts.logprobs(scores)
        return list(failed.values())

    def _sampling(self, step: Step, logits: torch.Tensor) -> tuple[_Sampling, list[Request]]:
        """Whose tokens are drawn: those whose logits the step gave, and the samples that are made of them now."""
        producers = self.scheduler.holders(step)
        own = _Sampling(logits=logits, rows=step.sample_rows, index=step.output_index, producers=producers)
        if not self._unforked:
            return own, []
        parents, forks = [], []
        for at, request in enumerate(producers):
            if request is not None and request.id in self._unforked:
                made = self._fork(self._samples[request.id].group, request)
                forks += made
                parents += [at] * len(made)
        return own.extended(parents, forks), forks

    def _fork(self, group: Group, parent: Request) -> list[Request]:
        """Make the other samples of a group whose prompt has been computed; returns those that found a row."""
        placed = []
        for sample in group.unforked:
            child = self.scheduler.fork(parent, f"{group.label}/{sample.index}")
            self._register(sample, child)
            if child.row:
                self._set_row(sample, child)
                placed.append(child)
        self._unforked.discard(parent.id)
        return placed

    def _follow(self, sampling: _Sampling, sampled: Int32) -> npt.NDArray[np.bool_] | None:
        """Take in tokens where text or log-probabilities are kept up; returns which ones completed a stop string."""
        if not self._following:
            return None
        stopped = np.zeros(len(sampled), np.bool_)
        scored: list[tuple[int, Sample]] = []
        for at, (request, token) in enumerate(zip(sampling.producers, sampled.tolist(), strict=True)):
            sample = None if request is None or token < 0 else self._samples[request.id]
            if request is None or sample is None or not sample.group.follows:
                continue
            index, params = int(sampling.index[at]), sample.group.params
            if params.logprobs is not None and index == len(sample.logprobs):
                scored.append((at, sample))
            stopped[at] = sample.take(token, index, index >= params.min_tokens, token in request.end_ids)
        if scored:
            self._score_samples(sampling, sampled, scored)
        return stopped

    def _score_samples(self, sampling: _Sampling, sampled: Int32, scored: list[tuple[int, Sample]]) -> None:
        at = np.array([at for at, _ in scored])
        counts = [sample.group.params.logprobs or 0 for _, sample in scored]
        for (_, sample), scores in zip(
            scored, score(sampling.logits, at, sampled[at].astype(np.int64), counts), strict=True
        ):
            sample.logprobs.append(self._token_texts.logprobs(scores or []))

    def _count(self, step: Step, sampled: Int32, seconds: float) -> None:
        prompt_tokens = step.batch.num_tokens - step.batch.num_decode
        if prompt_tokens >= _PRICED_TOKENS and 2 * prompt_tokens >= step.batch.num_tokens:
            self.scheduler.price.saw_prefill(prompt_tokens, seconds)
        self.stats.steps += 1
        self.stats.computed_tokens += step.batch.num_tokens
        self.stats.output_tokens += int((sampled >= 0).sum())

    def _publish(self, sampling: _Sampling, sampled: Int32, finished: list[Request]) -> list[tuple[int, RequestOutput]]:
        """End what finished and describe every group that is complete, or streamed and has news."""
        now = time.monotonic()
        news: dict[int, list[CompletionOutput]] = {}
        for request, token in zip(sampling.producers, sampled.tolist(), strict=True):
            sample = None if request is None else self._samples.get(request.id)
            if sample is None or token < 0:
                continue
            group = sample.group
            if group.metrics.first_token_time is None:
                group.metrics.first_token_time = now
            if group.stream:
                news.setdefault(group.id, [])
        for request in finished:
            sample = self._samples[request.id]
            ending = [sample, *(sample.group.unforked if request.id in self._unforked else [])]
            ended = [self._end(each, request.reason or Reason.ERROR) for each in ending]
            news.setdefault(sample.group.id, []).extend(ended)
        groups = [(self._groups[key], ended) for key, ended in news.items()]
        return [(group.id, self._output(group, ended)) for group, ended in groups if group.stream or group.complete]

    def _end(self, sample: Sample, reason: Reason) -> CompletionOutput:
        """Complete a sample, whose request is forgotten."""
        if sample.request is not None:
            self._samples.pop(sample.request.id, None)
        if reason is Reason.ERROR:
            _log.error("request %s ended: %s", sample.group.label, _trouble(sample))
        return sample.end(reason)

    def _output(self, group: Group, ended: list[CompletionOutput]) -> RequestOutput:
        """Describe a group, which is forgotten if it is complete."""
        if group.complete:
            group.metrics.finished_time = time.monotonic()
            del self._groups[group.id]
            self._unforked.discard(group.id)
            self._following.discard(group.id)
            self.stats.finished += 1
        return group.output(ended)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the engine stopped earlier: {self._dead}; make a new one") from self._dead

    def _die(self, error: BaseException) -> None:
        self._dead = error
        count = len(self._groups) if self._embedder is None else len(self._embedder)
        _log.error("the engine stopped; %d open requests fail: %r", count, error)
        self._forget()

    def close(self) -> None:
        """End every request and give the device back. Idempotent."""
        if self._dead is None:
            self._dead = RuntimeError("it was closed")
            self._forget()
        if self._swap is not None:
            self._swap.close()
        self._runner.close()

    def _forget(self) -> None:
        if self._embedder is not None:
            self._embedder.clear()
        self._groups.clear()
        self._samples.clear()
        self._unforked.clear()
        self._following.clear()
