"""What crosses the pipe between the front and the engine process: plain records, nothing that holds a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from pagedkv.api.errors import EngineDead, PagedKVError, RequestInvalid
from pagedkv.engine.metrics import EngineMetrics
from pagedkv.engine.outputs import Logprob, RequestMetrics
from pagedkv.models.tokenizer import Tokenizer

# -- to the engine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Queue a request under the front's number `key`; `params`: SamplingParams, or PoolingParams.

    With `stream`, every step that gives it a token is news; else only its end is.
    """

    key: int
    prompt: Mapping[str, Any]
    params: Any
    label: str
    priority: int = 0
    stream: bool = True


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, whatever it does; one that is over is no matter."""

    key: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Say something between two steps, and how things are."""

    number: int


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Forget what no request refers to."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End."""


Command: TypeAlias = "Submit | Abort | Ping | ResetCache | Stop"

# -- from the engine ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the front has to know of its engine; the tokenizer travels too, so that no file is read twice."""

    backend: str
    dtype: str
    kv_dtype: str
    quantization: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    capacity: int
    vocab_size: int
    pooling: bool
    tokenizer: Tokenizer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error of ours on its way: its type's name, its words, and the field it is about."""

    kind: str
    message: str
    field: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The record of an error."""
        kind = type(error).__name__
        return cls(kind=kind, message=str(error) or kind, field=getattr(error, "field", ""))

    def error(self) -> PagedKVError:
        """The error again; one that is none of ours ended the engine."""
        if self.kind == RequestInvalid.__name__:
            return RequestInvalid(self.message, field=self.field)
        return _KINDS.get(self.kind, EngineDead)(self.message)


def _all_kinds(kind: type[PagedKVError]) -> dict[str, type[PagedKVError]]:
    found = {kind.__name__: kind}
    for below in kind.__subclasses__():
        found |= _all_kinds(below)
    return found


_KINDS = {name: kind for name, kind in _all_kinds(PagedKVError).items() if kind.__module__ == PagedKVError.__module__}


class Piece(NamedTuple):
    """News of one choice of one request; a tuple, since there is one a token and tuples cross a pipe fastest.

    `text` and `token_ids` are new, the id that ended it included; `logprobs` has one record a new token, if asked for;
    `prompt_logprobs` come with the first news of the first choice.
    """

    key: int
    index: int  # type: ignore[assignment]  # in place of the search in tuples, which nobody needs here
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is said once of a request, with its last pieces; moments are those of `time.monotonic()`."""

    key: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_host_cached_tokens: int
    metrics: RequestMetrics
    embedding: list[float] | None = None


@dataclass(slots=True, kw_only=True)
class News:
    """What happened since the last of them: between steps, and in one step of `step_seconds`, if there was one."""

    accepted: list[int] = field(default_factory=list)
    refused: list[tuple[int, Failure]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    step_seconds: float | None = None
    pong: int | None = None
    metrics: EngineMetrics | None = None

    def __bool__(self) -> bool:
        return bool(
            self.accepted
            or self.refused
            or self.pieces
            or self.endings
            or self.step_seconds is not None
            or self.pong is not None
        )


Told: TypeAlias = "Facts | News | Failure"
"""First `Facts`, or the `Failure` that kept the engine from starting; then `News`; a `Failure` is the last word."""
