"""Answers that take their time, and notice when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedkv.api.errors import PagedKVError, RequestAborted
from pagedkv.server.errors import as_http, body_of
from pagedkv.server.stream import Stream

_log = logging.getLogger("pagedkv.server")
DONE = b"data: [DONE]\n\n"


class Left(RequestAborted):
    """The client has gone."""


written = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""A value as JSON text. One encoder for all: `json.dumps` would make one for every chunk."""


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8; what no UTF-8 can say (a lone surrogate) is escaped."""
    try:
        return written(value).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


class Json(Response):
    """An answer that is there already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Its bytes."""
        return json_bytes(content)


def error_reply(error: BaseException) -> Json:
    """An error as its status, its headers and the OpenAI object."""
    http = as_http(error)
    return Json(body_of(error), http.status, headers=http.headers)


class _Reply(Response):
    """The body is made while the client is watched: when it leaves, its requests end at once."""

    def __init__(self, streams: Sequence[Stream], count: Callable[[BaseException], None]) -> None:
        """`count` is told of every error that a client gets."""
        super().__init__()
        self._streams, self._count = streams, count

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for stream in self._streams:
            stream.cancel("disconnect", Left("the client left"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as ASGI has it."""
        watching = asyncio.create_task(self._watch(receive))
        try:
            await self._answer(scope, receive, send)
        except Left:
            _log.debug("a client left before its answer was complete; its request was ended")
        finally:
            watching.cancel()
            for stream in self._streams:  # whatever went wrong here, nothing goes on for nobody
                stream.cancel("client", Left("the answer was given up"))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class JsonReply(_Reply):
    """One JSON object once all is known."""

    def __init__(
        self, streams: Sequence[Stream], count: Callable[[BaseException], None], make: Callable[[], Awaitable[Any]]
    ) -> None:
        super().__init__(streams, count)
        self._make = make

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = Json(await self._make())
        except Left:
            raise
        except PagedKVError as error:
            self._count(error)
            reply = error_reply(error)
        await reply(scope, receive, send)


class EventReply(_Reply):
    """Server-sent events as they come. An error after the start is the last event, and no [DONE] follows it."""

    def __init__(
        self, streams: Sequence[Stream], count: Callable[[BaseException], None], events: AsyncIterator[bytes]
    ) -> None:
        super().__init__(streams, count)
        self._events = events

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # a proxy that collects an answer would undo the stream
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for data in self._events:
                if data:  # where text is held back, there is nothing to send
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            last = DONE
        except Left:
            raise
        except PagedKVError as error:
            self._count(error)
            last = event(body_of(error))
        except Exception as error:  # noqa: BLE001 - said here, and told to the client
            _log.exception("a stream failed")
            self._count(error)
            last = event(body_of(error))
        await send({"type": "http.response.body", "body": last, "more_body": False})
