"""Clients of a server, in a process of their own: C at once over raw connections, each sending requests in turn.

    python serve_client.py '{"host": ..., "port": ..., "body": {...}, "threads": 1}'

Speaks the JSON lines of peers/protocol.py. `body` is what every request says beside its prompt. A job is
{"prompts": token ids [requests][n] or texts, "output_len", "clients", "stream"}; its answer has `serve_figures.figures`
and, under "cpu", the processor seconds that these clients took.

The clients share two cores with the server, so they do little: requests are encoded before the clock starts, while it
runs each arrival is only put down with its moment, and answers are read when all have come. News of a stream is an
event with a choice in it; events that arrive together have one moment.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httptools
from serve_figures import Answered, figures

sys.path.append(str(Path(__file__).resolve().parent / "peers"))
from protocol import Run, serve

PATH = "/v1/completions"
DONE = b"[DONE]"
_GLANCE = 0.001  # seconds


@dataclass(slots=True)
class Reply:
    """What came for one request: its status, and parts of the body with their moments."""

    sent: float
    status: int = 0
    ended: float = 0.0
    parts: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(part for _, part in self.parts)

    def events(self) -> Iterator[tuple[float, bytes]]:
        """Server-sent events: when the last byte of each came, and its data."""
        rest = b""
        for moment, part in self.parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield moment, line[5:].strip()


class Connection(asyncio.Protocol):
    """A connection that stays open from request to request, and is made again where the server closed it."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._reply = Reply(0.0)
        self._parser: Any = None
        self._now = 0.0

    async def open(self) -> None:
        """Connect, if there is no open connection."""
        if self._transport is None or self._transport.is_closing():
            await asyncio.get_running_loop().create_connection(lambda: self, self._host, self._port)

    async def ask(self, request: bytes) -> Reply:
        """Send a request and wait for the whole answer. Raises `ConnectionError` when the server hangs up first."""
        await self.start(request)
        if self._waiting is not None:
            await self._waiting
        return self._reply

    async def start(self, request: bytes) -> None:
        """Send a request."""
        await self.open()
        self._parser = httptools.HttpResponseParser(self)
        self._waiting = asyncio.get_running_loop().create_future()
        self._reply = Reply(time.perf_counter())
        cast(asyncio.Transport, self._transport).write(request)

    async def news(self) -> None:
        """Wait until a part of the answer is there. Raises `ConnectionError` when none comes."""
        while not self._reply.parts:
            if self._transport is None:
                raise ConnectionError("the server hung up before its answer began")
            await asyncio.sleep(_GLANCE)

    def close(self) -> None:
        """Hang up, whatever is still to come."""
        self._waiting = None
        if self._transport is not None:
            self._transport.abort()

    # -- what the event loop calls -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Something came: all that is in it has this moment."""
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        """The server hung up."""
        self._transport = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error or ConnectionError("the server hung up before its answer was complete"))

    # -- what the parser calls -----------------------------------------------------------------------------------------

    def on_body(self, part: bytes) -> None:
        """A part of the answer."""
        self._reply.parts.append((self._now, part))

    def on_message_complete(self) -> None:
        """The answer has ended."""
        self._reply.status, self._reply.ended = self._parser.get_status_code(), self._now
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def encoded(host: str, port: int, path: str, body: Mapping[str, Any]) -> bytes:
    """A request as it is sent."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def asked(host: str, port: int, requests: Sequence[bytes], clients: int) -> list[Reply]:
    """The answers to all requests, sent by so many clients; each takes the next request when its last one has ended."""
    connections = [Connection(host, port) for _ in range(min(clients, len(requests)))]
    await asyncio.gather(*(connection.open() for connection in connections))
    replies: list[Reply] = []
    left = iter(requests)

    async def client(connection: Connection) -> None:
        for request in left:
            replies.append(await connection.ask(request))

    await asyncio.gather(*map(client, connections))
    for connection in connections:
        connection.close()
    return replies


def answered(reply: Reply, stream: bool, wanted: int) -> Answered:
    """What one reply says. Raises `SystemExit` for an error, and for another number of tokens than was asked for."""
    if reply.status != 200:
        raise SystemExit(f"the server answered {reply.status}: {reply.body[:500].decode(errors='replace')}")
    told = [(reply.ended, reply.body)] if not stream else [pair for pair in reply.events() if pair[1] != DONE]
    objects = [(moment, json.loads(data)) for moment, data in told]
    errors = [each["error"] for _, each in objects if each.get("error")]
    if errors:
        raise SystemExit(f"the server ended a stream: {errors[0]}")
    tokens = _tokens([each for _, each in objects], wanted)
    if tokens != wanted:
        raise SystemExit(f"{tokens} tokens came instead of {wanted}")
    news = [moment for moment, each in objects if each["choices"]] if stream else []
    return Answered(sent=reply.sent, ended=reply.ended, news=news, tokens=tokens)


def _tokens(objects: Sequence[Mapping[str, Any]], wanted: int) -> int:
    """As its `usage` counts them; a server that streams none says at least whether the limit was reached."""
    for each in objects:
        if each.get("usage"):
            return int(each["usage"]["completion_tokens"])
    ends = [choice["finish_reason"] for each in objects for choice in each["choices"] if choice.get("finish_reason")]
    return wanted if ends == ["length"] else 0


def load(given: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """Clients of the server at `host` and `port`."""
    host, port = given["host"], given["port"]

    def run(
        prompts: Sequence[Any], output_len: int, *, clients: int = 1, stream: bool = False, path: str = PATH
    ) -> dict[str, Any]:
        fixed = {**given["body"], "max_tokens": output_len, "stream": stream}
        if stream:
            fixed["stream_options"] = {"include_usage": True}
        requests = [encoded(host, port, path, {**fixed, "prompt": prompt}) for prompt in prompts]
        began = time.process_time()
        try:
            replies = _loop_run(asked(host, port, requests, clients))
        except OSError as error:
            raise SystemExit(f"the server does not answer: {error}") from error
        spent = time.process_time() - began
        return {**figures([answered(reply, stream, output_len) for reply in replies]), "cpu": {"clients": spent}}

    return run, {}


def _loop_run(work: Any) -> Any:
    try:
        import uvloop
    except ImportError:  # not made for every system
        return asyncio.run(work)
    return uvloop.run(work)


if __name__ == "__main__":
    serve(load)
