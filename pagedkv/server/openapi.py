"""What /openapi.json says of answers: their fields, and that every error is one object."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Said(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Problem(_Said):
    """What is wrong; `param` is the field of the body that it is about."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(_Said):
    """An error, of any status."""

    error: Problem


class _Cached(_Said):
    cached_tokens: int


class _Usage(_Said):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _Cached


class _Answer(_Said):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: _Usage


class _Choice(_Said):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: int | str | None


# -- completions -------------------------------------------------------------------------------------------------------


class _TextLogprobs(_Said):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _TextChoice(_Choice):
    text: str
    logprobs: _TextLogprobs | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionAnswer(_Answer):
    """POST /v1/completions, whole."""

    object: Literal["text_completion"]
    choices: list[_TextChoice]


# -- chat --------------------------------------------------------------------------------------------------------------


class _Token(_Said):
    token: str
    logprob: float
    bytes: list[int] | None


class _Sampled(_Token):
    top_logprobs: list[_Token]


class _ChatLogprobs(_Said):
    content: list[_Sampled]


class _Function(_Said):
    name: str
    arguments: str


class _Call(_Said):
    id: str
    type: Literal["function"]
    function: _Function


class _Message(_Said):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[_Call] = Field(default_factory=list)


class _ChatChoice(_Choice):
    message: _Message
    logprobs: _ChatLogprobs | None


class ChatAnswer(_Answer):
    """POST /v1/chat/completions, whole."""

    object: Literal["chat.completion"]
    choices: list[_ChatChoice]


# -- the others --------------------------------------------------------------------------------------------------------


class _Embedding(_Said):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class _PromptUsage(_Said):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(_Said):
    """POST /v1/embeddings."""

    object: Literal["list"]
    model: str
    data: list[_Embedding]
    usage: _PromptUsage


class TokenizeAnswer(_Said):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = Field(default_factory=list)


class DetokenizeAnswer(_Said):
    """POST /detokenize."""

    prompt: str


class ModelAnswer(_Said):
    """One name that the server answers to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelsAnswer(_Said):
    """All of them."""

    object: Literal["list"]
    data: list[ModelAnswer]


class StatusAnswer(_Said):
    """GET /health and /ready."""

    status: Literal["ok", "draining", "ready"]


class VersionAnswer(_Said):
    """GET /version."""

    version: str


# -- in the form that FastAPI takes ------------------------------------------------------------------------------------

_EVENTS = {
    "schema": {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}},
    "example": 'data: {"id": "...", "choices": [...]}\n\ndata: [DONE]\n\n',
}
"""A stream: the schema is that of one event, whose data is a chunk or an error as JSON, or [DONE]."""


def answers(model: type[BaseModel], *, events: bool = False) -> dict[int | str, dict[str, Any]]:
    """The answers of a route: `model` for 200, with `events` a stream too, and the error object for all else."""
    ok: dict[str, Any] = {"description": "The answer.", "model": model}
    if events:
        ok |= {"description": "The answer, or with stream its events.", "content": {"text/event-stream": _EVENTS}}
    return {200: ok, "default": {"model": ErrorAnswer, "description": "An error."}}


_ERROR = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorAnswer.__name__}"}}}
TEXT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer."},
    "default": {"content": _ERROR, "description": "An error."},
}
"""The answers of a route whose answer is plain text."""
