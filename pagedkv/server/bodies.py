"""What requests may say, under the names of the OpenAI API and those that users of such servers know beside them.

Types are strict: a number in quotes is no number. A name that nobody knows is accepted and logged, since clients send
what they like; one that is known and not built is refused by name.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from pagedkv.api.errors import RequestInvalid

_log = logging.getLogger("pagedkv.server")
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
_LOGGED_NAMES = 8
_LOGGED_LENGTH = 64
_FORMS = ("json", "regex", "choice", "grammar")
Priority = Annotated[int, Field(gt=-(2**31), lt=2**31)]
"""The lowest runs first; the least number of 32 bits belongs to the readiness probe."""


class Body(BaseModel):
    """A request's body. `unsupported`: known names, and the values of theirs that ask for nothing."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    without_effect: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None
    user: str | None = None

    def check_names(self, label: str) -> None:
        """Refuse what is known and not built, and log what is unknown, by name."""
        extra = self.model_extra or {}
        for name, neutral in self.unsupported.items():
            if name in extra and not any(type(extra[name]) is type(v) and extra[name] == v for v in neutral):
                raise RequestInvalid(f"{name} is not supported by this server: leave it out", field=name)
        unknown = [name for name in extra if name not in self.unsupported and name not in self.without_effect]
        unknown += [f"{name}.{inner}" for name, part in self._parts() for inner in part.model_extra or ()]
        if unknown:
            shown = ", ".join(self._hinted(name) for name in unknown[:_LOGGED_NAMES])
            more = f" and {len(unknown) - _LOGGED_NAMES} more" if len(unknown) > _LOGGED_NAMES else ""
            _log.warning("request %s: unknown fields are ignored: %s%s", label, shown, more)

    def _parts(self) -> list[tuple[str, BaseModel]]:
        named = ((name, getattr(self, name)) for name in type(self).model_fields)
        return [(name, part) for name, part in named if isinstance(part, BaseModel)]

    def _hinted(self, name: str) -> str:
        near = difflib.get_close_matches(name[:_LOGGED_LENGTH], list(type(self).model_fields), n=1)
        shown = ascii(name[:_LOGGED_LENGTH])
        return f"{shown} (did you mean {near[0]}?)" if near else shown


def _example(**body: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [body]})


class StreamOptions(BaseModel):
    """What a stream tells beside its text."""

    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool | None = False
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


class JSONSchema(BaseModel):
    """A schema, and its name."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What form an answer must have."""

    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class StructuredOutputs(BaseModel):
    """What form an answer must have, one of these, as newer versions of vLLM call it."""

    model_config = ConfigDict(strict=True, extra="forbid")
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Generating(Body):
    """What both ways of asking for text share."""

    unsupported = {
        "best_of": (None, 1),
        "use_beam_search": (None, False),
        "length_penalty": (None, 1, 1.0),
        "truncate_prompt_tokens": (None,),
        "logits_processors": _NOTHING,
        "return_tokens_as_token_ids": (None, False),
        "spaces_between_special_tokens": (None, True),
        "return_token_ids": (None, False),
        "guided_whitespace_pattern": (None,),
        "guided_decoding_backend": (None, "auto", "guidance", "llguidance"),
    }
    without_effect = frozenset({"metadata", "service_tier", "store", "safety_identifier", "prompt_cache_key"})

    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    response_format: ResponseFormat | None = None
    # Names that other engines' users bring with them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Priority = 0
    cache_salt: str | None = None
    request_id: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_stream(self) -> None:
        """Refuse options of a stream where there is none."""
        if self.stream_options is not None and not self.stream:
            raise RequestInvalid("stream_options belong to a stream: set stream to true", field="stream_options")

    def sampling(self) -> dict[str, Any]:
        """The settings of `SamplingParams` that were given."""
        names = (
            "temperature top_p n stop presence_penalty frequency_penalty logit_bias seed top_k min_p "
            "repetition_penalty min_tokens ignore_eos stop_token_ids bad_words allowed_token_ids skip_special_tokens "
            "include_stop_str_in_output prompt_logprobs"
        )
        given = {name: value for name in names.split() if (value := getattr(self, name)) is not None}
        asked = self.guided()
        return given if asked is None else {**given, "guided_decoding": asked[1]}

    def names(self) -> dict[str, str]:
        """The engine's name of a field -> the client's, where they differ."""
        asked = self.guided()
        return {} if asked is None else {"guided_decoding": asked[0]}

    def guided(self) -> tuple[str, dict[str, Any]] | None:
        """The field that asks for a form, and that form. Raises `RequestInvalid` when several do."""
        asked = [(f"guided_{name}", name, getattr(self, f"guided_{name}")) for name in _FORMS]
        if self.structured_outputs is not None:
            outputs = self.structured_outputs.model_dump(by_alias=True)
            asked += [
                (f"structured_outputs.{name}", name, None if value is False else value)
                for name, value in outputs.items()
            ]
        asked.append(("response_format", *self._response_form()))
        given = [(field, {name: value}) for field, name, value in asked if value is not None]
        if len(given) > 1:
            fields = [field for field, _ in given]
            raise RequestInvalid(f"{' and '.join(fields)} exclude each other: give one", field=fields[1])
        return given[0] if given else None

    def _response_form(self) -> tuple[str, Any]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return "json", None
        if wanted.type == "json_object":
            return "json_object", True
        if wanted.json_schema is None:
            raise RequestInvalid("response_format of type json_schema needs json_schema", field="response_format")
        return "json", wanted.json_schema.schema_


class CompletionBody(Generating):
    """POST /v1/completions."""

    model_config = _example(prompt="The capital of France is", max_tokens=8, temperature=0)

    unsupported = {**Generating.unsupported, "suffix": (None, "")}

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatBody(Generating):
    """POST /v1/chat/completions."""

    model_config = _example(messages=[{"role": "user", "content": "Hello"}], max_completion_tokens=64)

    unsupported = {
        **Generating.unsupported,
        "functions": _NOTHING,
        "function_call": (None, "none"),
        "audio": (None,),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "web_search_options": (None,),
        "chat_template": (None,),
        "documents": _NOTHING,
        "echo": (None, False),
        "continue_final_message": (None, False),
    }

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    model_config = _example(input=["A text.", "Another one."])

    without_effect = Generating.without_effect

    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    priority: Priority = 0
    cache_salt: str | None = None


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation as the chat template writes it."""

    model_config = _example(prompt="Hello", return_token_strs=True)

    unsupported = {"chat_template": (None,), "continue_final_message": (None, False), "mm_processor_kwargs": (None,)}

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model_config = _example(tokens=[1, 2])

    tokens: list[int]
    skip_special_tokens: bool = False
