"""The engine process: commands between two steps, one step, and one message of all that came of it.

    front ── Submit, Abort, Ping, Stop ──▶ take ─▶ step ─▶ tell ── Facts, then News ... ──▶ front

One thread does all of it, so whatever holds up the steps holds up the answer to a Ping: that is how a front knows.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from pagedkv.api.errors import EngineDead, PagedKVError
from pagedkv.config import EngineConfig
from pagedkv.engine.outputs import CompletionOutput, RequestOutput
from pagedkv.logs import start_command_logging
from pagedkv.server.messages import Abort, Command, Ending, Facts, Failure, News, Piece, Ping, ResetCache, Stop, Submit

if TYPE_CHECKING:
    from pagedkv.engine.engine import LLMEngine

_log = logging.getLogger("pagedkv.server")
_OVER = -1  # told to the end

Make = Callable[[Mapping[str, Any]], "LLMEngine"]
"""An engine of the settings of `EngineConfig`."""


def main(connection: Connection, settings: Mapping[str, Any], level: str, make: Make | None = None) -> None:
    """What the engine process runs, until it is told to stop or its front is gone."""
    _belong_to_the_front()
    start_command_logging(level)
    try:
        engine = (make or make_engine)(settings)
    except PagedKVError as error:
        _log.debug("traceback of what kept the engine from starting", exc_info=True)
        connection.send(Failure.of(error))
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - said here, and handed to the front
        _log.exception("the engine did not start")
        connection.send(Failure.of(EngineDead(f"the engine did not start: {error!r}; please report this")))
        sys.exit(1)
    sys.exit(Worker(connection, engine).run())


def make_engine(settings: Mapping[str, Any]) -> LLMEngine:
    """Load a model; its modules are loaded here too, so that the front, which imports this one, has none of them."""
    from pagedkv.engine.engine import LLMEngine
    from pagedkv.engine.setup import build
    from pagedkv.progress import loading_bar

    with loading_bar() as progress:
        return LLMEngine(build(EngineConfig.of(**settings), progress))


def _belong_to_the_front() -> None:
    """Leave signals to the front, which drains first, and end with it, even out of a step that never does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    front = multiprocessing.parent_process()
    if front is not None:
        threading.Thread(target=_end_with, args=(front,), name="pagedkv-front", daemon=True).start()


def _end_with(front: Any) -> None:
    front.join()
    os._exit(1)


def facts_of(engine: LLMEngine) -> Facts:
    """What the front has to know."""
    parts = engine.parts
    return Facts(
        backend=parts.backend_name,
        dtype=parts.choice.dtype,
        kv_dtype=parts.choice.kv_dtype,
        quantization=parts.quantization,
        block_size=parts.choice.block_size,
        num_blocks=parts.memory.num_blocks,
        max_model_len=parts.max_model_len,
        max_num_seqs=parts.config.max_num_seqs,
        capacity=engine.scheduler.capacity(),
        vocab_size=parts.vocab_size,
        pooling=getattr(engine, "pooling", None) is not None,
        tokenizer=engine.tokenizer,
    )


class Worker:
    """An engine behind a pipe. The front's numbers of requests are keys here, the engine's own are ids."""

    def __init__(self, connection: Connection, engine: LLMEngine) -> None:
        self._connection = connection
        self._engine = engine
        self._ids: dict[int, int] = {}
        self._keys: dict[int, int] = {}
        self._told: dict[int, list[int]] = {}  # by key: how many tokens of each choice the front knows
        self._news = News()

    def run(self) -> int:
        """Serve until told to stop, or until the pipe or the engine ends; returns the exit code."""
        try:
            self._connection.send(facts_of(self._engine))
            gc.collect()
            gc.freeze()  # what is loaded now stays: no collection has to go through it
            while self._take():
                if self._engine.has_unfinished_requests():
                    self._step()
                self._tell()
            return 0
        except (EOFError, BrokenPipeError, ConnectionResetError):
            _log.warning("the engine's front is gone: it ends too")
            return 1
        except Exception as error:  # noqa: BLE001 - said here, and handed to the front
            if not isinstance(error, EngineDead):
                _log.exception("the engine process failed")
            self._connection.send(Failure.of(error))
            return 1
        finally:
            self._engine.close()

    def _take(self) -> bool:
        """Do what the front asked for; waits only where there is nothing else to do. False: stop."""
        while self._connection.poll(0) or not (self._engine.has_unfinished_requests() or self._news):
            command: Command = self._connection.recv()
            if isinstance(command, Stop):
                return False
            self._do(command)
        return True

    def _do(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Abort):
            self._abort(command.key)
        elif isinstance(command, Ping):
            self._news.pong = command.number
        elif isinstance(command, ResetCache):
            self._engine.reset_prefix_cache()

    def _submit(self, command: Submit) -> None:
        try:
            number = self._engine.add_request(
                command.prompt,
                command.params,
                request_id=command.label,
                priority=command.priority,
                stream=command.stream,
            )
        except EngineDead:
            raise
        except PagedKVError as error:
            self._news.refused.append((command.key, Failure.of(error)))
            return
        self._ids[command.key], self._keys[number] = number, command.key
        self._told[command.key] = [0] * getattr(command.params, "n", 1)
        self._news.accepted.append(command.key)

    def _abort(self, key: int) -> None:
        number = self._ids.get(key)
        if number is not None:
            output = self._engine.abort_request(number)
            if output is not None:
                self._describe(key, output)
            self._forget(key)

    def _step(self) -> None:
        began = time.perf_counter()
        outputs = self._engine.step()
        self._news.step_seconds = time.perf_counter() - began
        for number, output in outputs:
            self._describe(self._keys[number], output)

    def _describe(self, key: int, output: RequestOutput) -> None:
        told = self._told[key]
        for choice in output.outputs:
            known = told[choice.index]
            if known != _OVER and (len(choice.token_ids) > known or choice.finish_reason is not None):
                first = output.prompt_logprobs if choice.index == 0 and known == 0 else None
                self._news.pieces.append(_piece(key, choice, known, first))
                told[choice.index] = len(choice.token_ids) if choice.finish_reason is None else _OVER
        if output.finished:
            self._news.endings.append(_ending(key, output))
            self._forget(key)

    def _forget(self, key: int) -> None:
        number = self._ids.pop(key, None)
        self._told.pop(key, None)
        if number is not None:
            self._keys.pop(number, None)

    def _tell(self) -> None:
        if self._news:
            if self._news.pong is not None:
                self._news.metrics = self._engine.metrics()
            self._connection.send(self._news)
            self._news = News()


def _piece(key: int, choice: CompletionOutput, known: int, prompt_logprobs: Any) -> Piece:
    return Piece(
        key=key,
        index=choice.index,
        # Of a request that is not streamed, a choice that ended before the others has no news left, only its text.
        text=choice.new_text if known else choice.text,
        token_ids=choice.token_ids[known:],
        logprobs=None if choice.logprobs is None else choice.logprobs[known:],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        prompt_logprobs=prompt_logprobs,
    )


def _ending(key: int, output: RequestOutput) -> Ending:
    return Ending(
        key=key,
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        num_host_cached_tokens=output.num_host_cached_tokens,
        metrics=output.metrics,
        embedding=output.embedding,
    )
