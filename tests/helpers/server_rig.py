"""A server in processes of its own, as `pagedkv serve` runs it, whose model does what prompts ask for.

The model says what stands between `<<` and `>>` (tests/helpers/api_rig.py). Where a prompt begins with one of `FAULTS`,
the backend misbehaves in the step in which that request's third token is due.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

NAME = "tiny"
RAISE, SLEEP, PACE = "!raise", "!sleep", "!pace"
FAULTS = (RAISE, SLEEP, PACE)
"""Raise in `attend`; sleep a minute in it; and, from the third token on, 10 ms in every step."""
REPOSITORY = Path(__file__).parents[2]
_START = "from tests.helpers.server_rig import main; main()"


# -- in the server's processes -----------------------------------------------------------------------------------------


def main() -> None:
    """The front: serve what the first argument says, in JSON."""
    from pagedkv.logs import start_command_logging
    from pagedkv.server.run import serve
    from pagedkv.server.settings import ServerConfig

    start_command_logging("INFO")
    given = json.loads(sys.argv[1])
    config: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given["config"].items()
    }
    sys.exit(serve(given["settings"], ServerConfig(**config), target=faulty))


def faulty(connection: Connection, settings: Mapping[str, Any], level: str) -> None:
    """The engine process."""
    from pagedkv.server import worker

    worker.main(connection, settings, level, _make)


def _make(settings: Mapping[str, Any]) -> Any:
    from tests.helpers.api_rig import make_obedient

    engine = make_obedient(settings)
    backend = Faulty(engine.parts.runner.backend)
    engine.parts.runner.backend = backend  # type: ignore[assignment]
    run, scheduler = engine.parts.runner.run, engine.scheduler

    def looking(step: Any) -> Any:
        backend.due = None
        for at, request in enumerate(scheduler.holders(step)):
            if request is not None and int(step.output_index[at]) >= 2:
                begin = bytes(int(i) for i in scheduler.tokens_of(request)[:8] if i < 256).decode("utf-8", "replace")
                backend.due = next((fault for fault in FAULTS if begin.startswith(fault)), backend.due)
        return run(step)

    engine.parts.runner.run = looking  # type: ignore[method-assign]
    return engine


class Faulty:
    """A backend whose first `attend` of a step does what is `due`."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.due: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def attend(self, *args: Any, **names: Any) -> None:
        """What is due, then the backend's own."""
        due, self.due = self.due, None
        if due == RAISE:
            raise RuntimeError("the backend fails as it was asked to")
        if due is not None:
            time.sleep(60.0 if due == SLEEP else 0.01)
        self._backend.attend(*args, **names)


# -- in the test's process ---------------------------------------------------------------------------------------------


def settings_of(**given: Any) -> dict[str, Any]:
    """Settings of an engine with room for long answers."""
    from tests.helpers.engine_rig import SETTINGS, folder

    return {**SETTINGS, "model": str(folder(max_position_embeddings=1024)), "num_blocks": 513, **given}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Served:
    """A server that has said where it listens. Close it."""

    def __init__(self, settings: Mapping[str, Any] | None = None, **config: Any) -> None:
        given = {"port": 0, "served_model_names": [NAME], "drain_timeout": 0.0, "exit_delay": 0.5, **config}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `close`
        asked = json.dumps({"settings": settings_of(**(settings or {})), "config": given})
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, asked], cwd=REPOSITORY, env=environment, stderr=self._log, stdout=self._log
        )
        try:
            wait_for(lambda: "/v1\n" in self.log or self.process.poll() is not None, 120)
            found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.log)
            assert found is not None, self.log
            self.port = int(found[1])
            self.children = psutil.Process(self.process.pid).children(recursive=True)
        except BaseException:
            self.process.kill()
            raise
        self.shared = self._shared_memory()

    @property
    def log(self) -> str:
        """All it has said."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode()

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"http://127.0.0.1:{self.port}"

    def client(self, **given: Any) -> httpx.Client:
        """A client that waits long enough for a busy machine."""
        return httpx.Client(base_url=self.url, timeout=60, **given)

    def engine(self) -> psutil.Process:
        """The engine's process, of now."""
        children = psutil.Process(self.process.pid).children()
        (found,) = (each for each in children if "spawn_main" in " ".join(_command(each)))
        self.children = [*self.children, *(each for each in children if each not in self.children)]
        return found

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send one to the front."""
        self.process.send_signal(number)

    def ended(self, timeout: float = 60) -> int:
        """Its exit code, once it and everything of it is gone."""
        code = self.process.wait(timeout)
        wait_for(lambda: all(map(gone, self.children)))
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0, "its port is still open"
        assert not [path for path in self.shared if path.exists()], "shared memory is left"
        return code

    def close(self) -> None:
        """End it, however it is."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        wait_for(lambda: all(map(gone, self.children)))
        self._log.close()

    def _shared_memory(self) -> list[Path]:
        processes = [psutil.Process(self.process.pid), *self.children]
        maps = {mapped.path for each in processes for mapped in each.memory_maps()}
        return [Path(path) for path in maps if path.startswith("/dev/shm/")]


def gone(process: psutil.Process) -> bool:
    """Whether it runs no more; at most its exit code waits for whoever looks after orphans here."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


@contextlib.contextmanager
def served(settings: Mapping[str, Any] | None = None, **config: Any) -> Iterator[Served]:
    """A server for a block."""
    made = Served(settings, **config)
    try:
        yield made
    finally:
        made.close()


def wait_for(done: Callable[[], bool], timeout: float = 30) -> None:
    """Look until it is so."""
    end = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def scrape(client: httpx.Client) -> dict[str, float]:
    """Every series of ours, its labels but the model's name behind its name."""
    text = client.get("/metrics").raise_for_status().text
    found = {}
    for sample in (one for family in text_string_to_metric_families(text) for one in family.samples):
        labels = [f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "model_name"]
        found[" ".join([sample.name.removeprefix("pagedkv:"), *labels])] = sample.value
    return found


def at_rest(client: httpx.Client, timeout: float = 30) -> dict[str, float]:
    """The metrics once nothing runs or waits; no block is in use then."""
    found: dict[str, float] = {}

    def rests() -> bool:
        found.update(scrape(client))
        return not any(found[f"num_requests_{state}"] for state in ("open", "running", "waiting"))

    wait_for(rests, timeout)
    assert found["kv_cache_blocks state=used tier=device"] == 0
    return found


def events(lines: Iterator[bytes]) -> Generator[Any, None, None]:
    """What each event of a stream says: its JSON, or "[DONE]". To let go of it closes the connection."""
    rest = b""
    for data in lines:
        whole, end, rest = (rest + data).rpartition(b"\n\n")
        yield from split_events(whole + end)
    assert rest == b""


def split_events(data: bytes) -> list[Any]:
    """The same of a part of a stream that ends with an event."""
    *whole, rest = data.split(b"\n\n")
    assert rest == b""
    texts = [each.removeprefix(b"data: ").decode() for each in whole]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]
