"""POST /v1/chat/completions: the next message of a conversation, n times, whole or as a stream, with calls of tools."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import Response

from pagedkv.api.errors import RequestInvalid
from pagedkv.sampling.params import SamplingParams
from pagedkv.server.answers import Answer, chat_logprobs, check, collected, fingerprint, usage
from pagedkv.server.bodies import ChatBody
from pagedkv.server.errors import told_as
from pagedkv.server.front import Caller, Front
from pagedkv.server.messages import Piece
from pagedkv.server.prompts import Prompt, conversation
from pagedkv.server.replies import EventReply, JsonReply, event, written
from pagedkv.server.stream import Stream
from pagedkv.server.tool_parsers import Delta, ToolCall, ToolParser, check_tool_choice, check_tools, get_parser

_MOST_TOP_LOGPROBS = 20
_GOES_ON = ',"logprobs":null,"finish_reason":null}]}\n\n'
"""How most chunks end, which is written once."""


async def chat(front: Front, body: ChatBody, caller: Caller) -> Response:
    """Check, queue, and answer. Raises what is wrong with the request before anything is sent."""
    model = front.check_model(body.model)
    body.check_names(caller.label)
    body.check_stream()
    front.admit(body.n or 1)
    tokenizer, salt, config = front.tokenizer, caller.salt(body.cache_salt), front.config

    def read() -> tuple[_Tools, SamplingParams, Prompt]:
        tools = _Tools(body, config.tool_call_parser)
        params = _params(body, tools)
        return tools, params, conversation(body, tokenizer, salt, config.chat_template, tools.shown)

    with told_as("messages", body.names()):
        tools, params, prompt = await front.in_thread(read)
        front.log_request(caller, "chat", body, len(prompt["prompt_token_ids"]))
        streams = await front.submit([prompt], params, caller, priority=body.priority, stream=bool(body.stream))
    writing = _Writing(front, body, model, caller, streams[0], tools)
    if body.stream:
        return EventReply(streams, front.metrics.refused, writing.events())
    return JsonReply(streams, front.metrics.refused, writing.whole)


def _params(body: ChatBody, tools: _Tools) -> SamplingParams:
    given = body.sampling()
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestInvalid("top_logprobs needs logprobs: set logprobs to true", field="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= _MOST_TOP_LOGPROBS:
        raise RequestInvalid(
            f"top_logprobs must be from 0 to {_MOST_TOP_LOGPROBS}, got {body.top_logprobs}", field="top_logprobs"
        )
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise RequestInvalid(
            "max_tokens is the old name of max_completion_tokens: give one of them", field="max_completion_tokens"
        )
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return SamplingParams(**tools.guide(given), max_tokens=limit)


class _Tools:
    """What a request says of tools: which ones the model sees, whether it must call one, who reads its calls."""

    def __init__(self, body: ChatBody, parser: str | None) -> None:
        self._tools = body.tools or []
        check_tools(self._tools)
        self._choice = check_tool_choice(body.tool_choice, self._tools)
        self._parallel = body.parallel_tool_calls is not False
        self._parser = None if parser is None or self._choice.mode == "none" else get_parser(parser)
        if self._must and self._parser is None:
            raise RequestInvalid(
                "tool_choice asks for a call, and this server reads none: start it with --tool-call-parser",
                field="tool_choice",
            )

    @property
    def _must(self) -> bool:
        return self._choice.mode in ("required", "function")

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """What the chat template is given."""
        return None if self._choice.mode == "none" else self._tools

    def guide(self, given: dict[str, Any]) -> dict[str, Any]:
        """Sampling settings that hold the model to what its calls may be, where anything is asked of them."""
        form = given.get("guided_decoding")
        if self._parser is None or not (self._must or form is not None or self._bound):
            return given
        if self._must and form is not None:
            raise RequestInvalid(
                "a call that must be made has a form already: leave the other out", field="tool_choice"
            )
        grammar = self._parser.grammar(
            self._tools, name=self._choice.name, required=self._must, parallel=self._parallel, form=form
        )
        return {**given, "guided_decoding": {"grammar": grammar}}

    @property
    def _bound(self) -> bool:
        """Whether a call that need not be made is held to a rule all the same."""
        return not self._parallel or any(tool["function"].get("strict") for tool in self._tools)

    def reader(self) -> ToolParser | None:
        """Who reads the calls of one answer."""
        return None if self._parser is None else self._parser(self._tools)


class _Writing:
    """The answer of one call, in its two forms."""

    def __init__(self, front: Front, body: ChatBody, model: str, caller: Caller, stream: Stream, tools: _Tools) -> None:
        self._body, self._stream, self._tools = body, stream, tools
        self._head = {
            "id": f"chatcmpl-{caller.label}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint(front.facts),
        }

    # -- whole ---------------------------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """The response object. Raises what ended the request."""
        answers = await collected(self._stream)
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        count = sum(len(answer.token_ids) for answer in answers)
        return {**self._head, "choices": choices, "usage": usage([self._stream], count)}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        content, calls = self._read(answer.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        logprobs = None
        if self._body.logprobs:
            logprobs = chat_logprobs(answer.token_ids, answer.logprobs, self._body.top_logprobs or 0)
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": _reason(answer.finish_reason, bool(calls)),
            "stop_reason": answer.stop_reason,
        }

    def _read(self, text: str) -> tuple[str | None, list[ToolCall]]:
        reader = self._tools.reader()
        if reader is None:
            return text, []
        first, last = reader.push(text), reader.finish()
        calls = [*first.calls, *last.calls]
        content = first.content + last.content
        return (content or None if calls else content), calls

    # -- streamed ------------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[bytes]:
        """Who speaks, then news of any choice as they come, then the counts."""
        shared = {**self._head, "usage": None} if self._body.include_usage else self._head
        choices = [
            _StreamedChoice(written(shared)[:-1], index, self._body, self._tools)
            for index in range(self._stream.choices)
        ]
        yield b"".join(choice.begin() for choice in choices)
        count = 0
        async for pieces in self._stream:
            count += sum(len(piece.token_ids) for piece in pieces)
            yield b"".join(choices[piece.index].take(piece) for piece in pieces)
        if self._body.include_usage:
            yield event({**self._head, "choices": [], "usage": usage([self._stream], count)})


class _StreamedChoice:
    """One choice of a stream. What is the same in every chunk is written once."""

    def __init__(self, head: str, index: int, body: ChatBody, tools: _Tools) -> None:
        self._before = f'data: {head},"choices":[{{"index":{index},"delta":'
        self._body, self._reader = body, tools.reader()
        self._calls = 0

    def begin(self) -> bytes:
        """The chunk that says who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def take(self, piece: Piece) -> bytes:
        """The chunks of a piece; none where its text waits for what may complete a call."""
        check(piece)
        logprobs = None
        if self._body.logprobs:
            logprobs = chat_logprobs(piece.token_ids, piece.logprobs or [], self._body.top_logprobs or 0)
        delta = self._read(piece)
        data = b""
        if delta.content or logprobs is not None or (self._reader is None and piece.finish_reason is None):
            data += self._chunk({"content": delta.content}, logprobs)
        for call in delta.calls:
            data += self._chunk({"tool_calls": [{"index": self._calls, **_call(call)}]})
            self._calls += 1
        if piece.finish_reason is not None:
            data += self._chunk({}, None, _reason(piece.finish_reason, self._calls > 0), piece.stop_reason)
        return data

    def _read(self, piece: Piece) -> Delta:
        if self._reader is None:
            return Delta(content=piece.text)
        delta = self._reader.push(piece.text)
        if piece.finish_reason is None:
            return delta
        last = self._reader.finish()
        return Delta(content=delta.content + last.content, calls=[*delta.calls, *last.calls])

    def _chunk(
        self, delta: Mapping[str, Any], logprobs: Any = None, reason: str | None = None, stop: int | str | None = None
    ) -> bytes:
        if logprobs is None and reason is None:
            return f"{self._before}{written(delta)}{_GOES_ON}".encode()
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            rest["stop_reason"] = stop
        return f"{self._before}{written(delta)},{written(rest)[1:]}]}}\n\n".encode()


def _reason(reason: str | None, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
