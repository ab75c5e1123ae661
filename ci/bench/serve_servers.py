"""Servers of the OpenAI API, each started as its users start it, in a process of its own, and what they cost.

pagedkv and vLLM get token ids as the prompt; llama.cpp's takes text only, so it gets the text of the same ids, which it
may cut into a few tokens more or less. It answers one request after the other: it batches nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from engines import END_SECONDS, LOAD_SECONDS, Child, Engine, NotMeasured, ended, last_line
from models import Model, tokenizer_in

from pagedkv.models.checkpoint import open_checkpoint

sys.path.append(str(Path(__file__).resolve().parent / "peers"))
from protocol import cache_bytes

HOST = "127.0.0.1"
POLL_SECONDS = 0.1
NAME = "bench"
"""The model's name at every server."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a server is started on `port` and asked. `health` is a path that answers 200 once it serves."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    health: str = "/v1/models"
    text_of: Callable[[list[int]], str] | None = None


def pagedkv(model: str, settings: Mapping[str, Any], port: int, further: Sequence[str] = ()) -> Plan:
    """Ours, by its command."""
    command = [sys.executable, "-m", "pagedkv.entrypoints.api_server", "--model", model, "--host", HOST]
    command += ["--port", str(port), "--served-model-name", NAME, *_flags(settings), *further]
    return Plan(command=command, body={"temperature": 0, "ignore_eos": True})


def _flags(settings: Mapping[str, Any]) -> list[str]:
    flags = []
    for name, value in settings.items():
        words = name.replace("_", "-")
        if name == "backend_options":
            flags += [f"--backend-option={option}={given}" for option, given in value.items()]
        elif isinstance(value, bool):
            flags.append(f"--{words}" if value else f"--no-{words}")
        else:
            flags.append(f"--{words}={value}")
    return flags


def vllm(engine: Engine, model: Model, given: Mapping[str, Any], port: int) -> Plan:
    """vLLM's for CPU, prefix caching off, its threads not bound: bound, it keeps a core of two for other work."""
    limits, folder = given["limits"], str(model.folder_in(engine.dtype))
    room = -(-cache_bytes(given, BYTES[engine.dtype]) // 2**30)
    command = [str(engine.python), "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--tokenizer", str(tokenizer_in(model)), "--served-model-name", NAME, "--dtype", engine.dtype]
    command += ["--max-model-len", str(limits["tokens"]), "--max-num-seqs", str(limits["requests"])]
    command += ["--max-num-batched-tokens", str(max(4096, limits["tokens"])), "--no-enable-prefix-caching"]
    command += ["--disable-log-stats", "--disable-uvicorn-access-log", "--host", HOST, "--port", str(port)]
    environment = {"VLLM_CPU_KVCACHE_SPACE": str(room), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    body = {"temperature": 0, "ignore_eos": True}
    return Plan(command=command, environment={**environment, "VLLM_NO_USAGE_STATS": "1"}, body=body)


def llama_cpp(engine: Engine, model: Model, given: Mapping[str, Any], port: int) -> Plan:
    """llama.cpp's Python server. It would cut a stream off when the next request comes; here it does not."""
    checkpoint = open_checkpoint(model.name)
    tokenizer, ends = checkpoint.tokenizer(), checkpoint.config.eos_token_ids
    checkpoint.close()
    threads = str(given["threads"])
    command = [str(engine.python), "-m", "llama_cpp.server", "--model", str(model.path), "--model_alias", NAME]
    # Its context is one request's; the text of ids may be cut into more tokens than there were.
    command += ["--n_ctx", str(2 * given["limits"]["tokens"]), "--n_threads", threads, "--n_threads_batch", threads]
    command += ["--interrupt_requests", "false", "--verbose", "false", "--host", HOST, "--port", str(port)]
    body = {"temperature": 0, "logit_bias": {str(end): -100 for end in ends}}
    return Plan(command=command, body=body, text_of=lambda ids: tokenizer.decode(ids, False))


PEERS: Mapping[str, Callable[[Engine, Model, Mapping[str, Any], int], Plan]] = {"vllm": vllm, "llama_cpp": llama_cpp}


class Server:
    """A server's process, from its start to its end. Raises `NotMeasured` when it does not come up."""

    def __init__(self, name: str, plan: Plan, port: int, threads: int, log: Path) -> None:
        self.name, self.port, self._log = name, port, log
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **plan.environment}
        began = time.monotonic()
        with log.open("w") as output:
            self._process = subprocess.Popen(plan.command, stdout=output, stderr=output, env=environment)
        try:
            self._wait(plan.health)
        except BaseException:
            self.close()
            raise
        self.ready_seconds = time.monotonic() - began

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, path: str) -> None:
        end = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < end:
            code = self._process.poll()
            if code is not None:
                raise NotMeasured(f"{self.name}'s server {ended(code)}: {last_line(self._log)} (see {self._log})")
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=5).close()
                return
            time.sleep(POLL_SECONDS)
        raise NotMeasured(f"{self.name}'s server was not ready within {LOAD_SECONDS:.0f} s, see {self._log}")

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The one that was started, called front, and those that it started, called engine."""
        front = psutil.Process(self._process.pid)
        return {"front": [front], "engine": front.children(recursive=True)}

    def cpu(self) -> dict[str, float]:
        """Processor seconds so far, of front and engine; of a server in one process, all of them are the front's."""
        return {role: sum(map(_seconds, processes)) for role, processes in self.processes().items() if processes}

    def memory(self) -> dict[str, int]:
        """Resident bytes of front and engine."""
        return {role: sum(each.memory_info().rss for each in them) for role, them in self.processes().items() if them}

    def close(self) -> None:
        """Ask it to end, and end by force what does not, with all that it started."""
        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


class Served:
    """A server and its clients, as the rounds ask an engine."""

    def __init__(self, server: Server, clients: Child, text_of: Callable[[list[int]], str] | None) -> None:
        self.name, self._server, self._clients, self._text_of = server.name, server, clients, text_of
        self.facts = {"load_seconds": server.ready_seconds, "prompt": "ids" if text_of is None else "text"}

    def run(self, prompts: Sequence[list[int]], output_len: int, **how: Any) -> dict[str, Any]:
        """Figures as the clients have them, with the processor seconds of each part."""
        given = prompts if self._text_of is None else [self._text_of(prompt) for prompt in prompts]
        before = self._server.cpu()
        answer = self._clients.run(given, output_len, **how)
        spent = {role: seconds - before.get(role, 0.0) for role, seconds in self._server.cpu().items()}
        return {**answer, "cpu": {**spent, **answer["cpu"]}}


@contextlib.contextmanager
def served(name: str, plan: Plan, port: int, threads: int, prompt: list[int], logs: Path) -> Iterator[Served]:
    """Start a server and its clients, which ask for one token first. Raises `NotMeasured`."""
    script = Path(__file__).resolve().parent / "serve_client.py"
    with Server(name, plan, port, threads, logs / f"serve-{_file(name)}.log") as server:
        given = json.dumps({"host": HOST, "port": port, "body": {"model": NAME, **plan.body}, "threads": 1})
        first: Any = prompt if plan.text_of is None else plan.text_of(prompt)
        log = logs / f"serve-{_file(name)}-clients.log"
        with Child(name, [sys.executable, str(script), given], 1, first, log) as clients:
            yield Served(server, clients, plan.text_of)


def _file(name: str) -> str:
    return name.replace(":", "-")


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port
