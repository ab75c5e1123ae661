"""What a request gives back, in the field's names."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Moments of one request in seconds of `time.monotonic()`; None until they have come."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds between arrival and the first step that worked on the request."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds between arrival and the first generated token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated continuation. `text` leaves out the token that ended it, `token_ids` does not.

    `finish_reason`: "stop" (an end id), "length" (max_tokens, or the model's or cache's limit), "abort", "error" (the
    model gave no usable logits), None while it runs. `stop_reason` is the id of `stop_token_ids` that ended it.
    `new_text` is what came with this output when the request is streamed.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    new_text: str = ""

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """One request's result so far. `request_id` is the caller's label, or the engine's id as text."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics
