"""The step loop: schedule, run, sample, publish. One thread at a time."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from pagedkv.api.errors import EngineDead, RequestInvalid
from pagedkv.api.records import Int32
from pagedkv.core.request import Reason, Request, State
from pagedkv.core.step import Step
from pagedkv.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagedkv.engine.prompts import Prompt, PromptType, read_prompt
from pagedkv.engine.setup import Parts
from pagedkv.sampling.detokenizer import IncrementalDetokenizer
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.sampler import Sampler

_log = logging.getLogger("pagedkv.engine")
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that consecutive requests get far-apart seeds


@dataclass(slots=True, eq=False)
class _Live:
    """One request between `add` and its last output."""

    request: Request
    prompt: Prompt
    params: SamplingParams
    seed: int
    stream: bool
    metrics: RequestMetrics
    detokenizer: IncrementalDetokenizer | None
    spoken: int = 0
    text: str = ""
    ids: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since start; tokens are counted when computed."""

    steps: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0


class LLMEngine:
    """Owns the scheduler, the runner and every live request; `LLM` and the command line stand on it."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.scheduler = parts.scheduler
        self.tokenizer = parts.tokenizer
        self.stats = EngineStats()
        self._runner = parts.runner
        self._sampler = Sampler(parts.config.max_num_seqs, parts.vocab_size, parts.config.seed)
        self._live: dict[int, _Live] = {}
        self._dead: BaseException | None = None

    # -- requests ------------------------------------------------------------------------------------------------------

    def prepare(self, prompt: PromptType, params: SamplingParams) -> Prompt:
        """Tokenize and check a request without queueing it. Raises `RequestError`."""
        ready = read_prompt(prompt, self.tokenizer, self.parts.vocab_size)
        params.check_ids(self.parts.vocab_size)
        self.scheduler.limit(len(ready.ids), params.max_tokens)
        return ready

    def add_request(
        self,
        prompt: PromptType | Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = False,
    ) -> int:
        """Queue a request and return the engine's own id for it; `request_id` is only a label on its outputs.

        With `stream`, every step that gives it a token gives an output. Raises `RequestError`; nothing is queued then.
        """
        self._check_alive()
        ready = prompt if isinstance(prompt, Prompt) else self.prepare(prompt, params)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestInvalid(f"priority={priority!r} must be a whole number; lower runs first", field="priority")
        request = self.scheduler.add(
            ready.ids,
            label=request_id or "",
            max_tokens=params.max_tokens,
            end_ids=self._end_ids(params),
            priority=priority,
            salt=ready.salt,
        )
        self._live[request.id] = _Live(
            request=request,
            prompt=ready,
            params=params,
            seed=self._seed(request, params),
            stream=stream,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            detokenizer=self._detokenizer(ready, params),
        )
        return request.id

    def _seed(self, request: Request, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        mixed = (self.parts.config.seed + (request.id + 1) * _SEED_STEP) % 2**64
        return mixed - 2**63

    def _end_ids(self, params: SamplingParams) -> tuple[int, ...]:
        model = () if params.ignore_eos else self.parts.end_ids
        return tuple(dict.fromkeys((*model, *params.stop_token_ids)))

    def _detokenizer(self, prompt: Prompt, params: SamplingParams) -> IncrementalDetokenizer | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        return IncrementalDetokenizer(self.tokenizer, prompt.ids.tolist(), params.skip_special_tokens)

    def abort_request(self, request_id: int) -> RequestOutput | None:
        """End a request in any state and return what it had; None if it is unknown or has finished."""
        live = self._live.get(request_id)
        if live is None or not self.scheduler.abort(live.request):
            return None
        return self._output(live)

    def has_unfinished_requests(self) -> bool:
        """Whether another `step` is needed."""
        return bool(self._live)

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
        step = self.scheduler.schedule()
        if step is None:
            return []
        self._admit(step)
        logits = self._runner.run(step)
        sampled = self._sampler(logits, step.sample_rows, step.output_index)
        producers = self.scheduler.holders(step)
        finished = self.scheduler.update(step, sampled)
        self._count(step, sampled)
        outputs = self._publish(producers, sampled, finished)
        if self.scheduler.idle:
            self.scheduler.check_idle()
        return outputs

    def _admit(self, step: Step) -> None:
        now = time.monotonic()
        for request in step.admitted:
            live = self._live[request.id]
            self._sampler.set_row(request.row, live.params, request.end_ids, live.seed)
            if live.metrics.first_scheduled_time is None:
                live.metrics.first_scheduled_time = now
        for request in step.preempted:
            _log.info("request %s preempted: no block left; it will be computed again", request.label)

    def _count(self, step: Step, sampled: Int32) -> None:
        self.stats.steps += 1
        self.stats.computed_tokens += step.batch.num_tokens
        self.stats.output_tokens += int((sampled >= 0).sum())

    def _publish(
        self, producers: list[Request | None], sampled: Int32, finished: list[Request]
    ) -> list[tuple[int, RequestOutput]]:
        now = time.monotonic()
        outputs = []
        for request, token in zip(producers, sampled.tolist(), strict=True):
            live = None if request is None else self._live.get(request.id)
            if live is None or token < 0:
                continue
            if live.metrics.first_token_time is None:
                live.metrics.first_token_time = now
            if live.stream:
                live.ids.append(token)
                if live.request.state is not State.FINISHED:
                    outputs.append((live.request.id, self._delta(live, token)))
        for request in finished:
            self.stats.finished += 1
            outputs.append((request.id, self._output(self._live[request.id])))
        return outputs

    def _delta(self, live: _Live, token: int) -> RequestOutput:
        new = live.detokenizer.push([token]) if live.detokenizer is not None else ""
        live.text += new
        live.spoken += 1
        return self._describe(live, CompletionOutput(index=0, text=live.text, token_ids=list(live.ids), new_text=new))

    def _output(self, live: _Live) -> RequestOutput:
        """The last output of a request, which is forgotten with it."""
        request = self._live.pop(live.request.id).request
        live.metrics.finished_time = time.monotonic()
        ids, reason = request.output_ids, request.reason or Reason.ERROR
        spoken = ids[:-1] if reason is Reason.STOP else ids
        new = ""
        if live.detokenizer is not None:
            new = live.detokenizer.push(spoken[live.spoken :]) + live.detokenizer.finish()
        if reason is Reason.ERROR:
            _log.error("request %s ended: the model gave no usable logits (NaN)", request.label)
        completion = CompletionOutput(
            index=0,
            text=live.text + new,
            token_ids=ids,
            finish_reason=reason.value,
            stop_reason=ids[-1] if reason is Reason.STOP and ids[-1] in live.params.stop_token_ids else None,
            new_text=new,
        )
        return self._describe(live, completion)

    def _describe(self, live: _Live, completion: CompletionOutput) -> RequestOutput:
        live.metrics.num_preemptions = live.request.num_preemptions
        return RequestOutput(
            request_id=live.request.label,
            prompt=live.prompt.text,
            prompt_token_ids=live.prompt.ids.tolist(),
            outputs=[completion],
            finished=completion.finished(),
            num_cached_tokens=live.request.num_cached_tokens or 0,
            metrics=live.metrics,
        )

    # -- the end -------------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the engine stopped earlier: {self._dead}; make a new one") from self._dead

    def _die(self, error: BaseException) -> None:
        self._dead = error
        _log.error("the engine stopped; %d open requests fail: %r", len(self._live), error)
        self._live.clear()

    def close(self) -> None:
        """End every request and give the device back. Idempotent."""
        if self._dead is None:
            self._dead = RuntimeError("it was closed")
            self._live.clear()
        self._runner.close()
