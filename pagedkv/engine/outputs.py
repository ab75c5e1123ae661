"""What a request gives back, in the field's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedkv.api.errors import ModelError, RequestAborted


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Moments of one request in seconds of `time.monotonic()`; None until they have come.

    `num_preemptions` counts how often it had to stop for others, `num_swaps` how often its blocks then went to host
    memory rather than being computed again.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_swaps: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds between arrival and the first step that worked on the request."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds between arrival and the first generated token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """How probable the model found one token, before sampling parameters changed anything.

    `logprob` is the natural logarithm, at least -9999; `rank` counts from 1, the most probable; `decoded_token` is None
    without a tokenizer, and a replacement mark for a part of a character.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated continuation. `text` leaves out the token that ended it, `token_ids` does not.

    `finish_reason`: "stop" (an end id or a stop string), "length" (max_tokens, or the model's or cache's limit),
    "abort", "error" (no usable logits), None while it runs. `stop_reason` is the id of `stop_token_ids` or the stop
    string that ended it. `new_text` is what came with this output when the request is streamed. `logprobs` has for each
    token, if asked for, its own record and those of the most probable, by id; `cumulative_logprob` sums up the former.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    new_text: str = ""

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """One request's result so far. `request_id` is the caller's label, or the engine's id as text.

    `outputs` has one entry for each of the `n` samples. `prompt_logprobs` has one for each prompt token, if asked for:
    None for the first, then the token's own record and those of the most probable, by id. `num_cached_tokens` of the
    prompt were found in a cache, `num_host_cached_tokens` of these in host memory. `embedding` is the prompt's vector
    where one was asked for, and then the one entry of `outputs` only tells how the request ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    embedding: list[float] | None = None
    metrics: RequestMetrics


@dataclass(slots=True, kw_only=True)
class EmbeddingOutput:
    """One text's vector, numbers of float32."""

    embedding: list[float]


@dataclass(slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """What `embed` gives for one text; fields as in `RequestOutput`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0
    metrics: RequestMetrics

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """The same of an output of the engine. Raises `RequestAborted`, or `ModelError` where there is no vector."""
        if output.embedding is None and output.outputs[0].finish_reason == "abort":
            raise RequestAborted(f"request {output.request_id} was aborted before its vector was there")
        if output.embedding is None:
            raise ModelError(
                f"request {output.request_id}: the model gives no usable hidden states (NaN or infinite) for this "
                "text; a wider dtype may help (float32)"
            )
        return cls(
            request_id=output.request_id,
            prompt=output.prompt,
            prompt_token_ids=output.prompt_token_ids,
            outputs=EmbeddingOutput(embedding=output.embedding),
            num_cached_tokens=output.num_cached_tokens,
            num_host_cached_tokens=output.num_host_cached_tokens,
            metrics=output.metrics,
        )
