"""The front's hold on the engine process: started, fed, watched, restarted, stopped.

    starting ──Facts──▶ running ──pipe ends, or no sign of life──▶ starting again, `restarts` times, else dead
                           └── stop ──▶ stopped

A writer and a reader thread stand at the pipe, so that an engine that hangs never holds up the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import itertools
import logging
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from pagedkv.api.errors import EngineDead
from pagedkv.engine.metrics import EngineMetrics
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.pooling import PoolingParams
from pagedkv.server.errors import Unavailable
from pagedkv.server.messages import Abort, Command, Facts, Failure, News, Ping, ResetCache, Stop, Submit, Told
from pagedkv.server.stream import Stream

_log = logging.getLogger("pagedkv.server")
_PINGS = 4  # in the time after which an engine without a sign of life is given up
_SHORTEST, _LONGEST = 0.05, 1.0  # seconds between two pings
_FIRST = -(2**31)  # the priority of what runs before everything else
_TERMINATE = 5.0  # seconds for a process that was told to stop, before it is killed


class State(enum.Enum):
    """Where an engine is."""

    STARTING = "starting"
    RUNNING = "running"
    DEAD = "dead"
    STOPPED = "stopped"


class Observer(Protocol):
    """Who wants to know how requests fare: the metrics. Called in the event loop, in order."""

    def submitted(self, key: int) -> None:
        """A request is on its way."""

    def news(self, news: News) -> None:
        """What the engine says."""

    def aborted(self, reason: str) -> None:
        """A request was given up: "disconnect", "timeout", "shutdown" or "client"."""

    def describe(self, facts: Facts) -> None:
        """An engine has started."""

    def engine_up(self, up: bool) -> None:
        """Whether it takes requests now."""

    def engine_restarted(self) -> None:
        """An engine was lost, and another one starts."""


class _Nobody:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class RemoteEngine:
    """An engine in a process of its own. Make it and call it in one event loop.

    `target(connection, settings, level)` runs in the process. `watchdog` seconds without a word between two steps end
    it; None waits for ever. `on_dead` is called when it was lost and no restart is left.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        target: Callable[..., None],
        *,
        level: str = "INFO",
        watchdog: float | None = 300.0,
        restarts: int = 0,
        observer: Observer | None = None,
        on_dead: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = State.STARTING
        self.facts: Facts | None = None
        self.why = "the engine is starting"
        self.metrics: EngineMetrics | None = None
        self.last_sign: float = time.monotonic()
        self.restarts_left = restarts
        self._settings, self._target, self._level = dict(settings), target, level
        self._watchdog, self._on_dead = watchdog, on_dead
        self._observer: Observer = observer or _Nobody()
        self._keys, self._pings = itertools.count(1), itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._pongs: dict[int, asyncio.Future[EngineMetrics | None]] = {}
        self._process: BaseProcess | None = None
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._started: asyncio.Future[Facts] | None = None
        self._watching: asyncio.Task[None] | None = None

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Answers that have not ended, each of n by itself."""
        return sum(stream.choices for stream in self._streams.values())

    def check(self) -> None:
        """Raise `Unavailable` unless requests are taken."""
        if self.state is not State.RUNNING:
            raise Unavailable(f"no request is taken: {self.why}", code=f"engine_{self.state.value}", retry_after=5)

    def submit(
        self, prompt: Mapping[str, Any], params: Any, *, label: str, priority: int = 0, stream: bool = True
    ) -> Stream:
        """Send a request on its way. Raises `Unavailable`; what the engine says of it comes through the stream."""
        self.check()
        made = Stream(next(self._keys), label, getattr(params, "n", 1), self._abort)
        self._streams[made.key] = made
        self._observer.submitted(made.key)
        self._commands.put(
            Submit(key=made.key, prompt=prompt, params=params, label=label, priority=priority, stream=stream)
        )
        return made

    def _abort(self, key: int, why: str) -> None:
        if self._streams.pop(key, None) is not None:
            self._commands.put(Abort(key))
            if key > 0:
                self._observer.aborted(why)

    def cancel_all(self, why: str, error: BaseException) -> None:
        """End every open request with `error`."""
        for stream in list(self._streams.values()):
            stream.cancel(why, error)

    def reset_prefix_cache(self) -> None:
        """Let the engine forget what no request refers to."""
        self.check()
        self._commands.put(ResetCache())

    async def probe(self) -> None:
        """Let the engine write one token, ahead of what waits. Raises what it says, or `Unavailable`."""
        self.check()
        made = Stream(-next(self._keys), "readiness probe", 1, self._abort)
        self._streams[made.key] = made
        params: SamplingParams | PoolingParams = PoolingParams()
        if self.facts is None or not self.facts.pooling:
            params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
        self._commands.put(
            Submit(key=made.key, prompt={"prompt_token_ids": [0]}, params=params, label=made.label, priority=_FIRST)
        )
        try:
            async for _ in made:
                pass
        finally:
            made.cancel("probe", EngineDead("the probe was given up"))

    async def fresh_metrics(self, timeout: float) -> EngineMetrics | None:
        """The engine's numbers of now, or those of before if it does not answer in `timeout` seconds."""
        if self.state is State.RUNNING:
            with contextlib.suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(self._ping(), timeout)
        return self.metrics

    def _ping(self) -> asyncio.Future[EngineMetrics | None]:
        number = next(self._pings)
        pong: asyncio.Future[EngineMetrics | None] = asyncio.get_running_loop().create_future()
        self._pongs[number] = pong
        pong.add_done_callback(lambda _: self._pongs.pop(number, None))
        self._commands.put(Ping(number))
        return pong

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> Facts:
        """Start the process and wait for its engine. Raises what kept it from starting."""
        self._started = asyncio.get_running_loop().create_future()
        self._spawn()
        return await self._started

    def _spawn(self) -> None:
        loop = asyncio.get_running_loop()
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(
            target=self._target, args=(there, self._settings, self._level), name="pagedkv-engine", daemon=True
        )
        process.start()
        there.close()  # so that the pipe ends when the process does
        self._process, self._commands = process, queue.SimpleQueue()

        def tell(told: Told | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is over, and with it whoever would listen
                loop.call_soon_threadsafe(self._take, process, told)

        for target, arguments in ((_read, (here, tell)), (_write, (here, self._commands, tell))):
            threading.Thread(target=target, args=arguments, name="pagedkv-pipe", daemon=True).start()

    def _take(self, process: BaseProcess, told: Told | None) -> None:
        if process is not self._process or self.state in (State.DEAD, State.STOPPED):
            return  # the last words of an engine that was given up
        self.last_sign = time.monotonic()
        if isinstance(told, News):
            self._deliver(told)
        elif isinstance(told, Facts):
            self._begin(told)
        else:
            self._lost(told)

    def _begin(self, facts: Facts) -> None:
        self.facts, self.state, self.why = facts, State.RUNNING, ""
        self._observer.describe(facts)
        self._observer.engine_up(True)
        if self._started is not None and not self._started.done():
            self._started.set_result(facts)
        else:
            _log.warning("the engine runs again")
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    def _deliver(self, news: News) -> None:
        streams = self._streams
        for key in news.accepted:
            if key in streams:
                streams[key].accept()
        for key, failure in news.refused:
            if key in streams:
                streams.pop(key).fail(failure.error())
        for piece in news.pieces:
            if piece.key in streams:
                streams[piece.key].put(piece)
        for ending in news.endings:
            if ending.key in streams:
                streams.pop(ending.key).end(ending)
        if news.metrics is not None:
            self.metrics = news.metrics
        if news.pong is not None:
            self._answer(self._pongs.get(news.pong), news.metrics)
        self._observer.news(_without_probes(news))

    async def _watch(self) -> None:
        """Ask for a sign of life, again and again; without one for too long, give the engine up."""
        every = _LONGEST if self._watchdog is None else min(max(self._watchdog / _PINGS, _SHORTEST), _LONGEST)
        while True:
            self._ping()
            await asyncio.sleep(every)
            silent = time.monotonic() - self.last_sign
            if self._watchdog is not None and silent > self._watchdog:
                self._lost(Failure(kind="EngineDead", message=f"the engine gave no sign of life for {silent:.1f} s"))
                return

    def _lost(self, failure: Failure | None) -> None:
        """The engine is gone, or given up: every open request fails, and another engine starts if one may."""
        process, starting = self._process, self._started is not None and not self._started.done()
        error = EngineDead(f"the engine process ended{_code(process)}") if failure is None else failure.error()
        self._end_watch()
        self._observer.engine_up(False)
        if process is not None:
            self._process = None
            threading.Thread(target=_kill, args=(process, self._commands), daemon=True).start()
        self._fail(error)
        if starting and self._started is not None:
            self.state, self.why = State.DEAD, str(error)
            self._started.set_exception(error)
        elif self.restarts_left > 0:
            self.restarts_left -= 1
            _log.error("%s; it is started again, %d restarts are left after this one", error, self.restarts_left)
            self.state, self.why = State.STARTING, f"the engine is starting again, since: {error}"
            self._observer.engine_restarted()
            self._spawn()
        else:
            self.state, self.why = State.DEAD, str(error)
            _log.error("%s; no restart is left (--restart-engine N allows N)", error)
            self._on_dead()

    def _fail(self, error: BaseException) -> None:
        streams, self._streams = self._streams, {}
        if streams:
            _log.error("%d open requests fail", len(streams))
        for stream in streams.values():
            stream.fail(EngineDead(str(error)))
        for pong in list(self._pongs.values()):
            self._answer(pong, self.metrics)

    @staticmethod
    def _answer(pong: asyncio.Future[EngineMetrics | None] | None, metrics: EngineMetrics | None) -> None:
        if pong is not None and not pong.done():
            pong.set_result(metrics)

    def _end_watch(self) -> None:
        if self._watching is not None and self._watching is not asyncio.current_task():
            self._watching.cancel()
        self._watching = None

    async def stop(self) -> None:
        """End the process, at once if it does not end itself; what is still open fails. Idempotent."""
        if self.state is State.STOPPED:
            return
        self.state, self.why = State.STOPPED, "the server is stopping"
        self._end_watch()
        self._fail(EngineDead("the server stopped"))
        process, self._process = self._process, None
        if process is not None:
            self._commands.put(Stop())
            await asyncio.to_thread(_kill, process, self._commands, _TERMINATE)


def _without_probes(news: News) -> News:
    """The same without the probes, whose numbers are negative: no user asked for them."""
    if not any(ending.key < 0 for ending in news.endings) and not any(piece.key < 0 for piece in news.pieces):
        return news
    return dataclasses.replace(
        news,
        pieces=[piece for piece in news.pieces if piece.key > 0],
        endings=[ending for ending in news.endings if ending.key > 0],
    )


def _code(process: BaseProcess | None) -> str:
    if process is None:
        return ""
    process.join(0.2)  # its pipe has ended, so it is about to
    code = process.exitcode
    return "" if code is None else f" with exit code {code}" if code >= 0 else f", killed by signal {-code}"


def _kill(process: BaseProcess, commands: queue.SimpleQueue[Command | None], patience: float = 0.0) -> None:
    """End a process and the writer at its pipe."""
    process.join(patience)
    if process.is_alive():
        process.kill()
        process.join()
    commands.put(None)
    process.close()


def _read(connection: Connection, tell: Callable[[Told | None], None]) -> None:
    """The reader thread: everything that comes, then None for the end."""
    try:
        while True:
            tell(connection.recv())
    except (EOFError, OSError):
        tell(None)
    except Exception as error:  # noqa: BLE001 - without a reader every request would wait for ever
        tell(_broken(error))


def _write(
    connection: Connection, commands: queue.SimpleQueue[Command | None], tell: Callable[[Told | None], None]
) -> None:
    """The writer thread, until there is nobody to write to."""
    try:
        while (command := commands.get()) is not None:
            connection.send(command)
    except (BrokenPipeError, OSError):
        return  # the reader tells of it
    except Exception as error:  # noqa: BLE001 - without a writer every request would wait for ever
        tell(_broken(error))


def _broken(error: Exception) -> Failure:
    _log.error("a message between front and engine failed", exc_info=error)
    return Failure(kind="EngineDead", message=f"the pipe to the engine failed: {error!r}; please report this")
