"""One thread that owns an engine and steps it; others send it requests and read what comes out.

any thread      open, submit, abort, drop  ->  commands
engine's thread   commands between steps, one step, outputs  ->  Channel of each request
event loops       a reader takes what its channel holds, or is woken when there is something
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from pagedkv.api.errors import EngineDead, PagedKVError
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.prompts import Prompt
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.pooling import PoolingParams

_log = logging.getLogger("pagedkv.engine")


class Channel:
    """What one request has to say and nobody has read yet: at most one output, newer ones merged into it."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.key: int | None = None  # the engine's id, once it has the request
        self.aborted = False  # before the engine had it
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._reader: Reader | None = None

    def put(self, output: RequestOutput | None = None, error: BaseException | None = None) -> Reader | None:
        """Add news; returns who has to be woken."""
        with self._lock:
            if output is not None:
                self._output = output if self._output is None else merged(self._output, output)
            self._error = self._error or error
            reader, self._reader = self._reader, None
            return reader

    def take(self, reader: Reader) -> RequestOutput | None:
        """What there is, else None, and `reader` is woken later. An error is raised after the outputs before it."""
        with self._lock:
            output, self._output = self._output, None
            if output is None and self._error is not None:
                raise self._error
            self._reader = reader if output is None else None
            return output


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """Somebody in an event loop who waits for a channel."""

    loop: asyncio.AbstractEventLoop
    woken: asyncio.Future[None]
    channel: Channel


def merged(old: RequestOutput, new: RequestOutput) -> RequestOutput:
    """`new`, with the pieces of text that nobody has read from `old` in front of its own."""
    answers = {answer.index: answer for answer in old.outputs}
    for answer in new.outputs:
        before = answers.get(answer.index)
        text = (before.new_text if before is not None else "") + answer.new_text
        answers[answer.index] = dataclasses.replace(answer, new_text=text)
    return dataclasses.replace(new, outputs=[answers[index] for index in sorted(answers)])


class Background:
    """The engine's thread. Every method but `stop` returns at once; only the thread itself touches the engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self.last_step_time: float | None = None
        self._engine = engine
        self._news = threading.Condition()  # reentrant: a dropped stream may be collected anywhere
        self._commands: deque[Callable[[], None]] = deque()
        self._open: dict[Channel, None] = {}
        self._by_key: dict[int, Channel] = {}
        self._stopping = False
        self._death: EngineDead | None = None
        self._thread = threading.Thread(target=self._run, name="pagedkv-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are still taken and computed."""
        return self._death is None and not self._stopping and self._thread.is_alive()

    # -- from any thread -----------------------------------------------------------------------------------------------

    def open(self, label: str) -> Channel:
        """The channel of a request that is on its way; one of a dead engine has its error in it."""
        channel = Channel(label)
        with self._news:
            if self._death is None and not self._stopping:
                self._open[channel] = None
                return channel
        channel.put(error=self._dead())
        return channel

    def submit(self, channel: Channel, prompt: Prompt, params: SamplingParams | PoolingParams, priority: int) -> None:
        """Queue a request that was checked."""
        self._send(lambda: self._add(channel, prompt, params, priority))

    def refuse(self, channel: Channel, error: BaseException) -> None:
        """End a request that never reached the engine."""
        self._send(lambda: self._finish(channel, error=error))

    def abort(self, channel: Channel) -> Future[bool]:
        """End a request; its reader gets what it had, with the reason "abort". The result: whether it was open."""
        return self._ending(channel, read=True)

    def drop(self, channel: Channel) -> Future[bool]:
        """End a request that nobody reads any more."""
        return self._ending(channel, read=False)

    def _ending(self, channel: Channel, *, read: bool) -> Future[bool]:
        done: Future[bool] = Future()
        if not self._send(lambda: done.set_result(self._end(channel, read=read))):
            done.set_result(False)
        return done

    def labelled(self, label: str) -> list[Channel]:
        """The open requests of this label."""
        with self._news:
            return [channel for channel in self._open if channel.label == label]

    def _send(self, command: Callable[[], None]) -> bool:
        with self._news:
            if self._death is not None:
                return False
            self._commands.append(command)
            self._news.notify()
            return True

    def stop(self) -> None:
        """End every request and the thread, and close the engine. Idempotent; waits for the step that runs."""
        with self._news:
            self._stopping = True
            self._news.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        why: BaseException = EngineDead("the engine stopped: it was closed; make a new one")
        try:
            while self._wait():
                while self._commands:
                    self._commands.popleft()()
                if self._engine.has_unfinished_requests():
                    self._deliver(self._engine.step())
                    self.last_step_time = time.monotonic()
        except EngineDead as error:
            why = error
        except Exception as error:  # noqa: BLE001 - said here, and handed to every stream
            _log.exception("the engine's thread failed")
            why = EngineDead(f"the engine stopped: {error!r}; please report this")
        finally:
            self._die(why)

    def _wait(self) -> bool:
        with self._news:
            while not (self._stopping or self._commands or self._engine.has_unfinished_requests()):
                self._news.wait()
            return not self._stopping

    def _add(self, channel: Channel, prompt: Prompt, params: SamplingParams | PoolingParams, priority: int) -> None:
        if channel not in self._open:  # dropped meanwhile
            return
        try:
            channel.key = self._engine.add_request(
                prompt, params, request_id=channel.label, priority=priority, stream=True
            )
        except EngineDead:
            raise
        except PagedKVError as error:
            self._finish(channel, error=error)
            return
        self._by_key[channel.key] = channel
        if channel.aborted:
            self._end(channel, read=True)

    def _end(self, channel: Channel, *, read: bool) -> bool:
        if channel not in self._open:
            return False
        if channel.key is not None:
            output = self._engine.abort_request(channel.key)
            self._finish(channel, output if read else None)
        elif read:
            channel.aborted = True  # still being encoded: its output comes when the engine has it
        else:
            self._forget(channel)
        return True

    def _finish(
        self, channel: Channel, output: RequestOutput | None = None, error: BaseException | None = None
    ) -> None:
        self._forget(channel)
        self._wake([channel.put(output, error)])

    def _forget(self, channel: Channel) -> None:
        with self._news:
            self._open.pop(channel, None)
        if channel.key is not None:
            self._by_key.pop(channel.key, None)

    def _deliver(self, outputs: Iterable[tuple[int, RequestOutput]]) -> None:
        readers = []
        for key, output in outputs:
            channel = self._by_key[key]
            if output.finished:
                self._forget(channel)
            readers.append(channel.put(output))
        self._wake(readers)

    def _wake(self, readers: Iterable[Reader | None]) -> None:
        """Wake readers, with one call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Reader]] = {}
        for reader in readers:
            if reader is not None:
                by_loop.setdefault(reader.loop, []).append(reader)
        for loop, waiting in by_loop.items():
            try:
                loop.call_soon_threadsafe(_set, waiting)
            except RuntimeError:  # that loop has been closed with streams open: nobody will ever read them
                _log.warning("an event loop ended with %d streams open; their requests are aborted", len(waiting))
                for reader in waiting:
                    self._end(reader.channel, read=False)

    def _die(self, why: BaseException) -> None:
        with self._news:
            self._death = EngineDead(str(why))
            left, self._open = list(self._open), {}
            commands, self._commands = list(self._commands), deque()
        for channel in left:
            self._wake([channel.put(error=self._dead())])
        for command in commands:  # whoever waits for the end of a request gets an answer: it has ended
            command()
        self._engine.close()

    def _dead(self) -> EngineDead:
        return EngineDead(str(self._death or "the engine stopped: it was closed; make a new one"))


def _set(readers: Iterable[Reader]) -> None:
    for reader in readers:
        if not reader.woken.done():
            reader.woken.set_result(None)
