"""A server for tests of its API: the front in a thread of this process, its engine in one of its own.

The model says what the prompt asks it to: the text between its first `<<` and its last `>>`, then the end token. Where
a prompt asks for nothing, the tiny model's own logits count.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from pagedkv.config import EngineConfig
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.setup import build
from pagedkv.server import run, worker
from pagedkv.server.front import Front
from pagedkv.server.keys import Keys
from pagedkv.server.settings import ServerConfig
from tests.helpers.engine_rig import SETTINGS, folder
from tests.helpers.tiny_models import EOS

NAME = "tiny"


def asked_for(prompt: str) -> str | None:
    """What a prompt wants to be said."""
    _, mark, rest = prompt.partition("<<")
    return rest.rpartition(">>")[0] if mark and ">>" in rest else None


class Obedient:
    """The logits of requests that ask for something."""

    def __init__(self, engine: LLMEngine) -> None:
        self._run, self._scheduler = engine.parts.runner.run, engine.scheduler
        engine.parts.runner.run = self.run  # type: ignore[method-assign]

    def run(self, step: Any) -> torch.Tensor:
        logits = self._run(step).clone()
        for at, request in enumerate(self._scheduler.holders(step)):
            wanted = None if request is None else self._wanted(request)
            if wanted is not None:
                index = int(step.output_index[at])
                logits[at] = 0.0
                logits[at, wanted[index] if index < len(wanted) else EOS] = 90.0
        return logits

    def _wanted(self, request: Any) -> bytes | None:
        ids = self._scheduler.tokens_of(request)[: request.prompt_len]
        text = asked_for(bytes(int(i) for i in ids if i < 256).decode("utf-8", "replace"))
        return None if text is None else text.encode()


def make_obedient(settings: Mapping[str, Any]) -> LLMEngine:
    """An engine whose model says what prompts ask it to."""
    torch.set_num_threads(1)
    engine = LLMEngine(build(EngineConfig.of(**settings)))
    Obedient(engine)
    return engine


def obedient(connection: Connection, settings: Mapping[str, Any], level: str) -> None:
    """What the engine process runs."""
    worker.main(connection, settings, level, make_obedient)


class Api(run.Server):
    """A running server, until it is closed."""

    def __init__(self, **config: Any) -> None:
        settings = {**SETTINGS, "model": str(folder(max_position_embeddings=1024)), "num_blocks": 513}
        given = {"port": 0, "served_model_names": (NAME,), "drain_timeout": 0.0, "exit_delay": 0.0, **config}
        made = ServerConfig(**given)
        super().__init__(settings, made, Keys.of(made.api_keys, None), run.bind(made), "WARNING", obedient)
        self.front: Front | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self.run()))
        self._thread.start()
        assert self._up.wait(60) and self.front is not None

    async def run(self) -> int:
        """The same in a thread."""
        self.loop = asyncio.get_running_loop()
        try:
            return await super().run()
        finally:
            self._up.set()

    @contextlib.contextmanager
    def _signals_taken(self) -> Iterator[None]:
        yield

    def _say_where(self, front: Front) -> None:
        self.front = front
        super()._say_where(front)
        self._up.set()

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """End it, and wait for the end."""
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._listener.close()
        assert not self._thread.is_alive()
