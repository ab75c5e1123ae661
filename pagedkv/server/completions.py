"""POST /v1/completions: one or several prompts, n answers each, whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeAlias

from starlette.responses import Response

from pagedkv.api.errors import RequestInvalid
from pagedkv.engine.outputs import Logprob
from pagedkv.sampling.params import SamplingParams
from pagedkv.server.answers import Answer, CompletionLogprobs, check, collected, fingerprint, merged, usage
from pagedkv.server.bodies import CompletionBody
from pagedkv.server.errors import told_as
from pagedkv.server.front import Caller, Front
from pagedkv.server.messages import Piece
from pagedkv.server.prompts import Prompt, encoded, separate
from pagedkv.server.replies import EventReply, JsonReply, event, written
from pagedkv.server.stream import Stream

PromptLogprobs: TypeAlias = "Sequence[Mapping[int, Logprob] | None] | None"


async def complete(front: Front, body: CompletionBody, caller: Caller) -> Response:
    """Check, queue, and answer. Raises what is wrong with the request before anything is sent."""
    model = front.check_model(body.model)
    body.check_names(caller.label)
    body.check_stream()
    entries = separate(body.prompt)
    front.admit(len(entries) * (body.n or 1), "n" if len(entries) == 1 else "prompt")
    salt, tokenizer = caller.salt(body.cache_salt), front.facts.tokenizer

    def read() -> tuple[SamplingParams, list[Prompt]]:
        return _params(body), encoded(entries, tokenizer, salt, body.add_special_tokens)

    with told_as("prompt", body.names()):
        params, prompts = await front.in_thread(read)
        front.log_request(caller, "completion", body, sum(len(prompt["prompt_token_ids"]) for prompt in prompts))
        streams = await front.submit(prompts, params, caller, priority=body.priority, stream=bool(body.stream))
    writing = _Writing(front, body, model, caller, prompts, streams)
    if body.stream:
        return EventReply(streams, front.metrics.refused, writing.events())
    return JsonReply(streams, front.metrics.refused, writing.whole)


def _params(body: CompletionBody) -> SamplingParams:
    given = body.sampling()
    if body.logprobs is not None:
        if body.logprobs < 0:
            raise RequestInvalid(f"logprobs must be at least 0, got {body.logprobs}", field="logprobs")
        given["logprobs"] = body.logprobs
    if body.echo and (body.logprobs is not None or body.max_tokens == 0):
        given.setdefault("prompt_logprobs", body.logprobs or 0)
    return SamplingParams(**given, max_tokens=body.max_tokens)


class _Writing:
    """The answer of one call, in its two forms."""

    def __init__(
        self,
        front: Front,
        body: CompletionBody,
        model: str,
        caller: Caller,
        prompts: Sequence[Prompt],
        streams: Sequence[Stream],
    ) -> None:
        self._front, self._body, self._prompts, self._streams = front, body, prompts, streams
        self._head = {
            "id": f"cmpl-{caller.label}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint(front.facts),
        }

    # -- whole ---------------------------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """The response object. Raises what ended one of the requests."""
        answers = await asyncio.gather(*(collected(stream) for stream in self._streams))
        choices = [
            self._choice(number * len(group) + index, number, answer, group[0].prompt_logprobs)
            for number, group in enumerate(answers)
            for index, answer in enumerate(group)
        ]
        count = sum(len(answer.token_ids) for group in answers for answer in group)
        return {**self._head, "choices": choices, "usage": usage(self._streams, count)}

    def _choice(self, place: int, number: int, answer: Answer, prompt: PromptLogprobs) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": place,
            "text": (self._prompt_text(number) if self._body.echo else "") + answer.text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self._body.logprobs is not None:
            records = CompletionLogprobs()
            before = self._echoed(number, records, prompt)
            choice["logprobs"] = _joined(before, records.of(answer.token_ids, answer.logprobs))
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = _shown(prompt)
        return choice

    def _echoed(self, number: int, records: CompletionLogprobs, prompt: PromptLogprobs) -> dict[str, Any]:
        ids = self._prompts[number]["prompt_token_ids"]
        if not self._body.echo or prompt is None:
            return records.of([], [])
        first = "" if self._front.facts.tokenizer is None else self._front.tokenizer.decode(ids[:1], False)
        # A token that begins every sequence stands before the text that the client sent, and not in it.
        return records.of(ids, prompt, first, unseen=not self._prompt_text(number).startswith(first))

    def _prompt_text(self, number: int) -> str:
        prompt = self._prompts[number]
        if "prompt" in prompt:
            return str(prompt["prompt"])
        return self._front.tokenizer.decode(prompt["prompt_token_ids"], False)

    # -- streamed ------------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[bytes]:
        """Chunks as they come: the prompts where they are echoed, then news of any choice, then the counts."""
        n, count = self._streams[0].choices, 0
        records = [CompletionLogprobs() for _ in range(n * len(self._streams))]
        prompts: list[PromptLogprobs] = [None] * len(self._streams)
        started: set[int] = set()
        # What is the same in every chunk is written once.
        shared = {**self._head, "usage": None} if self._body.include_usage else self._head
        head = f'data: {written(shared)[:-1]},"choices":[{{"index":'
        async for number, pieces in merged(self._streams):
            chunks = []
            for piece in pieces:
                check(piece)
                place = number * n + piece.index
                count += len(piece.token_ids)
                if place not in started:
                    started.add(place)
                    prompts[number] = piece.prompt_logprobs or prompts[number]
                    if self._body.echo:
                        chunks.append(self._chunk(head, place, self._echo(number, records[place], prompts[number])))
                chunks.append(self._chunk(head, place, self._news(piece, records[place])))
            yield b"".join(chunks)
        if self._body.include_usage:
            yield event({**self._head, "choices": [], "usage": usage(self._streams, count)})

    def _echo(self, number: int, records: CompletionLogprobs, prompt: PromptLogprobs) -> dict[str, Any]:
        logprobs = self._echoed(number, records, prompt) if self._body.logprobs is not None else None
        return {"text": self._prompt_text(number), "logprobs": logprobs, "finish_reason": None}

    def _news(self, piece: Piece, records: CompletionLogprobs) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = records.of(piece.token_ids, piece.logprobs or [])
        news = {"text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        return news if piece.finish_reason is None else {**news, "stop_reason": piece.stop_reason}

    @staticmethod
    def _chunk(head: str, place: int, news: dict[str, Any]) -> bytes:
        return f"{head}{place},{written(news)[1:]}]}}\n\n".encode()


def _joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + then[name] for name in first}


def _shown(records: PromptLogprobs) -> list[Any] | None:
    """By position: None for the first token, then by id what is known of it and of the most probable."""
    if records is None:
        return None
    return [
        None
        if record is None
        else {
            str(token): {"logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in record.items()
        }
        for record in records
    ]
