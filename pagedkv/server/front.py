"""What every endpoint stands on: the engine, the tokenizer in its threads, and who is let in."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from pagedkv.api.errors import EngineDead, PagedKVError, RequestInvalid
from pagedkv.models.tokenizer import Tokenizer
from pagedkv.server.errors import HTTPError, QueueFull, TimedOut, Unavailable
from pagedkv.server.messages import Facts
from pagedkv.server.metrics import ServerMetrics
from pagedkv.server.remote import RemoteEngine
from pagedkv.server.settings import ServerConfig
from pagedkv.server.stream import Stream

_log = logging.getLogger("pagedkv.server")
_log_requests = logging.getLogger("pagedkv.server.requests")
_ENCODERS = 4
_MOST_WAIT = 60  # seconds, of what Retry-After says
_READY_FOR = 1.0  # seconds that one readiness probe answers for those after it
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: a label for logs, and the salt that keeps tenants' cached prefixes apart."""

    label: str
    salt: Callable[[str | None], str | None]


class Front:
    """The server's state. Everything but tokenizing happens in its event loop."""

    def __init__(
        self, config: ServerConfig, engine: RemoteEngine, names: Sequence[str], metrics: ServerMetrics
    ) -> None:
        self.config, self.engine, self.names, self.metrics = config, engine, tuple(names), metrics
        self.created = int(time.time())
        self.draining = False
        self._encoders = ThreadPoolExecutor(_ENCODERS, "pagedkv-encode")
        self._ended: deque[float] = deque(maxlen=64)  # when requests ended, lately
        self._probe: asyncio.Task[None] | None = None
        self._probed = -math.inf

    # -- the model -----------------------------------------------------------------------------------------------------

    @property
    def facts(self) -> Facts:
        """What the engine said of itself. Raises `Unavailable` before it did."""
        if self.engine.facts is None:
            self.engine.check()
            raise Unavailable("the engine has not started yet", retry_after=5)
        return self.engine.facts

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's. Raises `HTTPError` where there is none."""
        if self.facts.tokenizer is None:
            raise HTTPError(
                400, "this server has no tokenizer: send token ids as prompt to /v1/completions", code="unsupported"
            )
        return self.facts.tokenizer

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises `HTTPError` 404: a name is only compared, never opened."""
        if name is None or name in self.names:
            return name or self.names[0]
        shown = ascii(name[:128])
        raise HTTPError(
            404,
            f"there is no model {shown} here; there is {', '.join(self.names)}",
            param="model",
            code="model_not_found",
        )

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Tokenize, or write a conversation, without holding up anybody."""
        return await asyncio.get_running_loop().run_in_executor(self._encoders, work)

    # -- requests ------------------------------------------------------------------------------------------------------

    def admit(self, choices: int, field: str = "n") -> None:
        """Raise unless so many more answers may be asked for now."""
        if self.draining:
            raise Unavailable("the server is stopping: no new request is taken", code="stopping")
        self.engine.check()
        if choices > self.config.max_choices:
            raise RequestInvalid(
                f"{choices} answers in one request, and {self.config.max_choices} is the most (--max-choices): "
                "send several requests",
                field=field,
            )
        waiting = self.engine.num_open + choices - self.facts.max_num_seqs
        if waiting > self.config.max_queue:
            raise QueueFull(
                f"the queue is full: {self.engine.num_open} answers are open, {self.facts.max_num_seqs} of which can "
                f"run while {self.config.max_queue} wait; try again",
                retry_after=self._retry_after(),
            )

    def _retry_after(self) -> int:
        """Seconds until about one place is free, as fast as requests ended lately."""
        if len(self._ended) < 2:
            return 1
        each = (time.monotonic() - self._ended[0]) / len(self._ended)
        return min(max(1, math.ceil(each)), _MOST_WAIT)

    async def submit(
        self, prompts: Sequence[Mapping[str, Any]], params: Any, caller: Caller, *, priority: int, stream: bool
    ) -> list[Stream]:
        """Queue one request a prompt and wait until the engine has them all. Raises what it refuses one for."""
        streams = [
            self.engine.submit(prompt, params, label=caller.label, priority=priority, stream=stream)
            for prompt in prompts
        ]
        self._follow(streams)
        try:
            for made in streams:
                await made.accepted()
        except BaseException as error:
            for made in streams:
                made.cancel("client", error if isinstance(error, PagedKVError) else EngineDead("cancelled"))
            raise
        return streams

    def _follow(self, streams: Sequence[Stream]) -> None:
        """End them when their time is over, and remember when they ended."""
        limit, left = self.config.request_timeout, len(streams)

        def expire() -> None:
            for stream in streams:
                stream.cancel("timeout", TimedOut(f"the request took longer than {limit:g} s (--request-timeout)"))

        timer = None if limit is None else asyncio.get_running_loop().call_later(limit, expire)

        def over() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._ended.append(time.monotonic())
                if timer is not None:
                    timer.cancel()

        for stream in streams:
            stream.on_over(over)

    def log_request(self, caller: Caller, what: str, body: Any, prompt_tokens: int) -> None:
        """One line a request if asked for; its words only if those were asked for too."""
        if self.config.log_requests or self.config.log_prompts:
            words = f": {json.dumps(body.model_dump(exclude_none=True))}" if self.config.log_prompts else ""
            _log_requests.info("request %s: %s, %d prompt tokens%s", caller.label, what, prompt_tokens, words)

    # -- health --------------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Let the engine write one token. Raises `Unavailable`; one probe answers for all that ask meanwhile."""
        if self.draining:
            raise Unavailable("the server is stopping", code="stopping")
        self.engine.check()
        if time.monotonic() - self._probed < _READY_FOR:
            return
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._write_one_token())
        await asyncio.shield(self._probe)

    async def _write_one_token(self) -> None:
        try:
            await asyncio.wait_for(self.engine.probe(), self.config.ready_timeout)
        except asyncio.TimeoutError as error:
            raise Unavailable(
                f"one token took longer than {self.config.ready_timeout:g} s", code="not_ready"
            ) from error
        self._probed = time.monotonic()

    def close(self) -> None:
        """End the threads."""
        self._encoders.shutdown(wait=False, cancel_futures=True)
