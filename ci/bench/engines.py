"""The engines of a comparison, each in a process of its own that keeps its model loaded and computes when it is asked.

A name is an engine with its dtype behind a colon: "pagedkv", "transformers:bfloat16". Without one, pagedkv chooses, and
transformers and vLLM take bfloat16 where the processor multiplies it and float32 elsewhere; llama.cpp and OpenVINO
compute as they please on the weights of the GGUF file.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from models import ROOT, Model

SCRIPTS = Path(__file__).resolve().parent / "peers"
LOAD_SECONDS, JOB_SECONDS, END_SECONDS = 900.0, 3600.0, 30.0
"""How long an engine may take to load, to answer a job, and to end."""


class NotMeasured(Exception):
    """An engine that cannot be measured here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An engine: whether it has an environment of its own, what it reads, and whether it takes a dtype."""

    own_environment: bool = True
    needs_gguf: bool = False
    needs_folder: bool = False
    takes_dtype: bool = True


KINDS = {
    "pagedkv": Kind(own_environment=False),
    "transformers": Kind(own_environment=False, needs_folder=True),
    "vllm": Kind(needs_folder=True),
    "llama_cpp": Kind(needs_gguf=True, takes_dtype=False),
    "openvino": Kind(needs_gguf=True, takes_dtype=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine by name."""

    name: str
    kind: str
    dtype: str

    @classmethod
    def of(cls, name: str) -> Engine:
        """Read a name."""
        kind, _, dtype = name.partition(":")
        if kind not in KINDS:
            raise click.BadParameter(f"{kind!r} is no engine; use {', '.join(KINDS)}, with a dtype behind a colon")
        if dtype and not KINDS[kind].takes_dtype:
            raise click.BadParameter(f"{name!r}: {kind} takes no dtype; leave {':' + dtype!r} out")
        return cls(name=name, kind=kind, dtype=dtype or ("auto" if kind == "pagedkv" else native_dtype()))

    @property
    def python(self) -> Path:
        """Its interpreter."""
        if not KINDS[self.kind].own_environment:
            return Path(sys.executable)
        return ROOT / ".peers" / self.kind / "bin" / "python"

    def given(self, model: Model, threads: int, limits: Mapping[str, int]) -> dict[str, Any]:
        """What its process is told. Raises `NotMeasured` where it has no environment or cannot read the model."""
        kind = KINDS[self.kind]
        if not self.python.exists():
            raise NotMeasured(f"there is no environment; make one: bash ci/bench/peers/setup.sh {self.kind}")
        if kind.needs_gguf and not model.is_gguf:
            raise NotMeasured(f"{self.kind} reads GGUF files, and {model.name} is a folder")
        folder = str(model.folder_in(self.dtype)) if kind.needs_folder else None
        path = str(model.path) if kind.needs_gguf else model.name
        return {"model": path, "folder": folder, "dtype": self.dtype, "threads": threads, "limits": dict(limits)}


def native_dtype() -> str:
    """bfloat16 where the processor has products in it."""
    try:
        words = set(Path("/proc/cpuinfo").read_text(errors="replace").split())
    except OSError:  # only Linux has the file
        words = set()
    return "bfloat16" if words & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


class Child:
    """An engine in its own process. What it prints goes to the file `log`.

    `facts`: what it says of itself, with "first_token_seconds", from the start of its process to the first token of
    `prompt`. Raises `NotMeasured` when it does not start; so do its runs when it ends or gives no answer.
    """

    def __init__(self, name: str, command: Sequence[str], threads: int, prompt: list[int], log: Path) -> None:
        self.name = name
        self._log = log
        began = time.monotonic()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": str(threads),
                    "HF_HUB_OFFLINE": "1",
                    "PAGEDKV_LOG_LEVEL": "INFO",
                },
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            loaded = self._answer(LOAD_SECONDS)
            self.run([prompt], 1)
        except BaseException:
            self.close()
            raise
        self.facts = {"first_token_seconds": time.monotonic() - began, **loaded}

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS if hasattr(self, "facts") else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(self, prompts: Sequence[Any], output_len: int, **how: Any) -> dict[str, Any]:
        """Its answer: figures, and of an engine the tokens. `how` are further words of the job."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.write(json.dumps({"prompts": prompts, "output_len": output_len, **how}) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended: the answer says so, and why
        return self._answer(JOB_SECONDS)

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise NotMeasured(f"{self.name} gave no answer within {seconds:.0f} s, see {self._log}") from None
        if not line:
            raise NotMeasured(f"{self.name} {ended(self._process.wait())}: {last_line(self._log)} (see {self._log})")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(engine: Engine, given: Mapping[str, Any], prompt: list[int], log: Path) -> Child:
    """Start an engine's process, wait until it is loaded, and let it give one token."""
    command = [str(engine.python), str(SCRIPTS / f"run_{engine.kind}.py"), json.dumps(given)]
    return Child(engine.name, command, given["threads"], prompt, log)


def ended(code: int) -> str:
    """How a process ended, from its exit code."""
    return f"ended with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"


def last_line(log: Path) -> str:
    """The last line with something on it."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
