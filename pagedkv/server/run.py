"""A server from its first socket to its exit code.

bind ─▶ engine starts ─▶ listen ─▶ serve ─┬─ signal: drain, up to a limit ─▶ stop ─▶ 0
                                          └─ engine lost for good: say so a while ─▶ stop ─▶ 1
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pagedkv.api.errors import ConfigError
from pagedkv.server import worker
from pagedkv.server.app import ROUTES, Access, create_app
from pagedkv.server.errors import Unavailable
from pagedkv.server.front import Front
from pagedkv.server.guard import check_names, guarded
from pagedkv.server.keys import Keys
from pagedkv.server.metrics import ServerMetrics
from pagedkv.server.remote import RemoteEngine
from pagedkv.server.settings import ServerConfig
from pagedkv.server.tool_parsers import get_parser

_log = logging.getLogger("pagedkv.server")
_POLL = 0.05  # seconds
_LAST_WORDS = 2.0  # seconds for streams to send why they end
_BACKLOG = 2048
_FILES = 65536
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(
    settings: Mapping[str, Any], config: ServerConfig, *, level: str = "INFO", target: Callable[..., None] = worker.main
) -> int:
    """Serve the model of `settings` until a signal, and return the exit code. Raises what keeps it from starting."""
    keys = Keys.of(config.api_keys, config.api_key_file)
    check_names(config)
    if config.tool_call_parser is not None:
        get_parser(config.tool_call_parser)
    check_certificate(config)
    listener = bind(config)
    _allow_many_connections()
    try:
        return _loop_factory()(Server(settings, config, keys, listener, level, target).run())
    finally:
        listener.close()


def _loop_factory() -> Callable[[Any], int]:
    try:
        import uvloop
    except ImportError:  # not made for every system
        return asyncio.run
    return uvloop.run


def _allow_many_connections() -> None:
    """Each open stream is a file to the system, whose soft limit is meant for other programs."""
    try:
        import resource
    except ImportError:  # not every system has such limits
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        _log.debug("up to %d files may be open, %d before", wanted, soft)


def check_certificate(config: ServerConfig) -> None:
    """Raise `ConfigError` for a certificate or key that cannot be served with, before a model is loaded."""
    if config.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:  # of which the first says which file is missing
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} with --ssl-keyfile {config.ssl_keyfile}: {error}; give a "
            "certificate and its own private key, both in PEM form"
        ) from error


def bind(config: ServerConfig) -> socket.socket:
    """The socket that will listen, so that a taken port is known before a model is loaded. Raises `ConfigError`."""
    host = config.host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}; choose another --host or "
            "--port"
        ) from error
    return listener


class Server:
    """One run of a server."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        config: ServerConfig,
        keys: Keys,
        listener: socket.socket,
        level: str,
        target: Callable[..., None],
    ) -> None:
        self._settings, self._config, self._keys, self._listener = settings, config, keys, listener
        self._level, self._target = level, target
        self._stop = asyncio.Event()
        self._fatal = False
        self._signals = 0
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Start, serve, drain, stop."""
        config = self._config
        names = config.served_model_names or (str(self._settings["model"]),)
        metrics = ServerMetrics(names[0], ROUTES)
        engine = RemoteEngine(
            self._settings,
            self._target,
            level=self._level,
            watchdog=config.watchdog_timeout,
            restarts=config.restart_engine,
            observer=metrics,
            on_dead=self._on_dead,
        )
        front = Front(config, engine, names, metrics)
        try:
            with self._signals_taken():
                if await self._started(engine):
                    await self._serve(front)
        finally:
            await engine.stop()
            front.close()
        return 1 if self._fatal else 0

    async def _started(self, engine: RemoteEngine) -> bool:
        """Wait for the engine, or for a signal to stop. Raises what kept it from starting."""
        starting, stopping = asyncio.ensure_future(engine.start()), asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            return False
        await starting
        return True

    async def _serve(self, front: Front) -> None:
        server = _Uvicorn(self._uvicorn(front))
        serving = asyncio.ensure_future(server.serve(sockets=[self._listener]))
        stopping = asyncio.ensure_future(self._stop.wait())
        while not server.started and not serving.done():
            await asyncio.sleep(_POLL / 10)
        self._say_where(front)
        gc.collect()
        gc.freeze()  # what is loaded now stays: no collection has to go through it
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._fatal:
            await self._linger()
        else:
            await self._drain(front)
        server.should_exit = True
        await serving

    def _uvicorn(self, front: Front) -> uvicorn.Config:
        config = self._config
        metrics = front.metrics
        app: ASGIApp = guarded(create_app(front), config, self._keys, count=metrics.refused)
        app = Access(app, metrics.http)
        return uvicorn.Config(
            app,
            backlog=_BACKLOG,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            root_path=config.root_path,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            timeout_graceful_shutdown=int(_LAST_WORDS),
        )

    def _say_where(self, front: Front) -> None:
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._config.ssl_certfile else "http"
        shown = f"[{host}]" if ":" in host else host
        names, model = ", ".join(front.names), str(self._settings["model"])
        named = names if model in front.names else f"{names} ({model})"
        _log.info("serving %s on %s://%s:%d/v1", named, scheme, shown, port)
        if self._keys.names:
            _log.info("keys of %s are let in", ", ".join(self._keys.names))
        if not self._config.loopback and not self._keys.names:
            _log.warning(
                "anyone who reaches %s can use this server: it listens beyond this machine and has no --api-key", shown
            )
        if self._config.log_prompts:
            _log.warning("--log-prompts: what users write goes into the log")

    # -- the end -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals_taken(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, lambda got, _: loop.call_soon_threadsafe(self._signalled, got))
        if hasattr(signal, "SIGHUP"):
            before[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)
            signal.signal(signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(self._keys.reload))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int) -> None:
        self._signals += 1
        _log.info("%s: %s", signal.Signals(number).name, "stopping" if self._signals == 1 else "stopping at once")
        self._stop.set()

    def _on_dead(self) -> None:
        self._fatal = True
        self._stop.set()

    async def _linger(self) -> None:
        """Say that there is no engine for a while, so that whoever looks after this server sees why it ends."""
        _log.error("the engine is gone: /health says so for %g s, then this server ends", self._config.exit_delay)
        await self._wait(self._config.exit_delay, lambda: False)

    async def _drain(self, front: Front) -> None:
        """Take nothing new, and let what runs go on up to the limit; then end it, with a word to its clients."""
        front.draining = True
        if front.engine.num_open:
            _log.info("waiting up to %g s for %d answers", self._config.drain_timeout, front.engine.num_open)
        await self._wait(self._config.drain_timeout, lambda: not front.engine.num_open)
        if front.engine.num_open:
            _log.warning("%d answers are not complete and end here", front.engine.num_open)
            front.engine.cancel_all(
                "shutdown", Unavailable("the server stopped before this was complete", code="stopping")
            )
            await asyncio.sleep(_POLL)

    async def _wait(self, seconds: float, over: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not over() and self._signals < 2:
            await asyncio.sleep(_POLL)


class _Uvicorn(uvicorn.Server):
    """Without signal handlers of its own: a first signal drains here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield
