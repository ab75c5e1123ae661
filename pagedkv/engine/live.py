"""What the engine knows of a request between `add` and its last output: one group, of one or several samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pagedkv.core.request import Reason, Request
from pagedkv.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagedkv.engine.prompts import Prompt
from pagedkv.models.tokenizer import Tokenizer
from pagedkv.sampling.detokenizer import IncrementalDetokenizer
from pagedkv.sampling.guided import Grammar, Guide
from pagedkv.sampling.logprobs import Scored
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.stop import StopStrings

Logprobs = dict[int, Logprob]


class Text:
    """An answer's text as its tokens come: whole characters, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self.text = ""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stops is None else self._stops.found

    def push(self, ids: Sequence[int], armed: bool = True) -> None:
        """Take the next tokens; stop strings count if `armed`."""
        new = self._detokenizer.push(ids)
        self.text += new if self._stops is None else self._stops.push(new, armed)

    def finish(self) -> None:
        """Take in what was held back, unless a stop string was found."""
        if self._stops is None:
            self.text += self._detokenizer.finish()
        elif self._stops.found is None:
            self.text += self._stops.push(self._detokenizer.finish(), False) + self._stops.finish()


@dataclass(slots=True, eq=False, kw_only=True)
class Sample:
    """One answer of a group. `request` is None until the prompt has been computed, for all but the first.

    `ids` and `logprobs` are kept up token by token where that is needed: for a stream, stop strings, log-probabilities.
    """

    group: Group
    index: int
    text: Text | None
    request: Request | None = None
    guide: Guide | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    told: int = 0
    ended: CompletionOutput | None = None

    def take(self, token: int, index: int, armed: bool, ends: bool) -> bool:
        """Take output token `index`; returns whether it completes a stop string. A second time changes nothing."""
        if index == len(self.ids):
            self.ids.append(token)
            if self.text is not None and not ends:
                self.text.push([token], armed)
        return self.text is not None and self.text.stopped is not None

    def describe(self) -> CompletionOutput:
        """What there is so far, `new_text` since the last time."""
        if self.ended is not None:
            return self.ended
        return self._completion(list(self.ids))

    def end(self, reason: Reason) -> CompletionOutput:
        """Complete the answer; `describe` gives it from now on, without the news."""
        ids = self.request.output_ids if self.request is not None else []
        stopped = self.text.stopped if self.text is not None else None
        by_id = reason is Reason.STOP and stopped is None
        if self.text is not None and stopped is None:
            spoken = ids[:-1] if by_id else ids
            self.text.push(spoken[len(self.ids) :])
            self.text.finish()
        completion = self._completion(ids)
        completion.finish_reason = reason.value
        if reason is Reason.STOP:
            own = by_id and ids[-1] in self.group.params.stop_token_ids
            completion.stop_reason = ids[-1] if own else stopped
        self.ended = replace(completion, new_text="")
        return completion

    def _completion(self, ids: list[int]) -> CompletionOutput:
        text = self.text.text if self.text is not None else ""
        new, self.told = text[self.told :], len(text)
        asked = self.group.params.logprobs is not None
        own = self.logprobs[: len(ids)]
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=ids,
            cumulative_logprob=sum(at[token].logprob for token, at in zip(ids, own, strict=False)) if asked else None,
            logprobs=own if asked else None,
            new_text=new,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """One request of a caller's: its prompt, and as many samples as were asked for."""

    id: int
    label: str
    prompt: Prompt
    params: SamplingParams
    seed: int
    stream: bool
    bad_words: tuple[tuple[int, ...], ...]
    grammar: Grammar | None
    metrics: RequestMetrics
    samples: list[Sample] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] | None = None
    prompt_ids: list[int] = field(init=False)  # made once, since a streamed group is described at every token

    def __post_init__(self) -> None:
        self.prompt_ids = self.prompt.ids.tolist()

    @property
    def follows(self) -> bool:
        """Whether each token is looked at when it comes, rather than all at the end."""
        return self.stream or bool(self.params.stop) or self.params.logprobs is not None

    @property
    def unforked(self) -> list[Sample]:
        """Samples that wait for the prompt."""
        return [sample for sample in self.samples if sample.request is None]

    @property
    def complete(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.ended is not None for sample in self.samples)

    def output(self, news: Sequence[CompletionOutput] = ()) -> RequestOutput:
        """All samples as they are, those of `news` as given there."""
        requests = [sample.request for sample in self.samples if sample.request is not None]
        self.metrics.num_preemptions = sum(request.num_preemptions for request in requests)
        self.metrics.num_swaps = sum(request.num_swaps for request in requests)
        given = {completion.index: completion for completion in news}
        return RequestOutput(
            request_id=self.label,
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt_ids,
            outputs=[given.get(sample.index) or sample.describe() for sample in self.samples],
            finished=self.complete,
            num_cached_tokens=requests[0].num_cached_tokens or 0,
            num_host_cached_tokens=requests[0].num_host_cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.metrics,
        )


class TokenTexts:
    """The text of single tokens, as `Logprob.decoded_token` shows it."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def logprobs(self, scores: Sequence[Scored]) -> Logprobs:
        """Records by id; the first of `scores` comes first."""
        return {s.token: Logprob(logprob=s.logprob, rank=s.rank, decoded_token=self._of(s.token)) for s in scores}

    def _of(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._known.get(token)
        if text is None:
            # Where a text's first word loses its leading space, the second keeps it.
            once, twice = (self._tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
            text = self._known[token] = twice[len(once) :]
        return text
