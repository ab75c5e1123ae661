"""From a request's news to what both endpoints say of it: whole answers, counts, and log-probabilities."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedkv import __version__
from pagedkv.engine.outputs import Logprob
from pagedkv.server.errors import HTTPError
from pagedkv.server.messages import Facts, Piece
from pagedkv.server.stream import Stream

Logprobs = Mapping[int, Logprob]


@dataclass(slots=True, kw_only=True)
class Answer:
    """One choice, put together from its pieces."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def add(self, piece: Piece) -> None:
        """Take in what is new."""
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs or []
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.stop_reason = piece.stop_reason if piece.stop_reason is not None else self.stop_reason

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


async def collected(stream: Stream) -> list[Answer]:
    """The whole answers of one request. Raises what ended it."""
    answers = [Answer() for _ in range(stream.choices)]
    async for pieces in stream:
        for piece in pieces:
            check(piece)
            answers[piece.index].add(piece)
    return answers


def check(piece: Piece) -> None:
    """Raise `HTTPError` for the end of an answer that the model could not go on with."""
    if piece.finish_reason == "error":
        raise HTTPError(
            500,
            "the model gave no usable logits (NaN or infinite) for this request: another prompt, or a wider dtype of "
            "the server, may help",
            type="server_error",
            code="no_usable_logits",
        )


def fingerprint(facts: Facts) -> str:
    """What a seed's answers depend on beside the request: the same text, the same answers."""
    parts = (__version__, facts.backend, facts.dtype, facts.kv_dtype, facts.quantization, facts.block_size)
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:10]}"


async def merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, list[Piece]]]:
    """News of several requests as they come, with the number of the request. Raises what ended one of them."""
    if len(streams) == 1:
        async for pieces in streams[0]:
            yield 0, pieces
        return
    news: asyncio.Queue[tuple[int, list[Piece]] | BaseException | None] = asyncio.Queue()

    async def pump(number: int, stream: Stream) -> None:
        try:
            async for pieces in stream:
                news.put_nowait((number, pieces))
            news.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised where the news are read
            news.put_nowait(error)

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await news.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


def usage(streams: Sequence[Stream], completion_tokens: int) -> dict[str, Any]:
    """Counts as the OpenAI API has them; each prompt counts once, however many answers it has."""
    endings = [stream.ending for stream in streams if stream.ending is not None]
    prompt = sum(ending.num_prompt_tokens for ending in endings)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(ending.num_cached_tokens for ending in endings)},
    }


def chat_logprobs(token_ids: Sequence[int], records: Sequence[Logprobs], most: int) -> dict[str, Any]:
    """Log-probabilities as the chat API has them, with the `most` most probable beside each token."""
    content = []
    for token, record in zip(token_ids, records, strict=True):
        best = sorted(record.values(), key=lambda each: each.rank)[:most]
        content.append({**_described(record[token]), "top_logprobs": [_described(each) for each in best]})
    return {"content": content}


def _described(record: Logprob) -> dict[str, Any]:
    text = record.decoded_token or ""
    whole = "\ufffd" not in text  # a part of a character: which bytes it is, its text does not say
    return {"token": text, "logprob": record.logprob, "bytes": list(text.encode()) if whole else None}


class CompletionLogprobs:
    """Log-probabilities as the completions API has them; offsets go on from chunk to chunk."""

    def __init__(self) -> None:
        self._offset = 0

    def of(
        self, token_ids: Sequence[int], records: Sequence[Logprobs | None], first: str = "", *, unseen: bool = False
    ) -> dict[str, Any]:
        """The next tokens; None is the record of a prompt's first one, whose text is `first`.

        `unseen`: that text is not in the answer, so what follows begins where it does.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets = []
        for token, record in zip(token_ids, records, strict=True):
            found = None if record is None else record[token]
            text = first if found is None else found.decoded_token or ""
            tokens.append(text)
            values.append(None if found is None else found.logprob)
            tops.append(None if record is None else _by_text(record))
            offsets.append(self._offset)
            self._offset += 0 if found is None and unseen else len(text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _by_text(record: Logprobs) -> dict[str, float]:
    """The most probable first; of tokens with one text, such as parts of characters, all but the first by their id."""
    found: dict[str, float] = {}
    for token, each in sorted(record.items(), key=lambda item: item[1].rank):
        text = each.decoded_token or ""
        found[f"token_id:{token}" if text in found else text] = each.logprob
    return found
