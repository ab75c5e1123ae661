"""The child process of a probe or check: how it is started, how it answers, how it is ended.

It answers in JSON lines on a channel of its own; whatever the plugin prints goes elsewhere and is cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, cast

_LINE_LIMIT = 1 << 20
_OUTPUT_TAIL = 600
_COMMAND = (
    "import sys, importlib; module, _, name = sys.argv[1].partition(':'); payload = sys.argv[2]; "
    "sys.path[:] = sys.argv[3:]; sys.argv[1:] = []; getattr(importlib.import_module(module), name)(payload)"
)
PROBE = "pagedkv.plugins.probing:probe_child"


def open_channel() -> Callable[[Mapping[str, Any]], None]:
    """In the child: keep standard output for answers, send everything else that is printed to standard error."""
    sys.stdout.flush()
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def send(message: Mapping[str, Any]) -> None:
        channel.write(json.dumps(message).encode() + b"\n")

    return send


class Child:
    """A process that runs one function ("module:name") on the payload, its answers and the end of what it printed."""

    def __init__(self, payload: str, function: str = PROBE) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND, function, payload, *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._tail = b""
        self._readers = [
            threading.Thread(target=self._read_answers, args=(cast(BinaryIO, self._process.stdout),), daemon=True),
            threading.Thread(target=self._read_output, args=(cast(BinaryIO, self._process.stderr),), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def answer(self, key: str, timeout: float) -> Any:
        """The value that the child sends under `key`. Raises `TimeoutError`, or `EOFError` when it ended before."""
        until = time.monotonic() + timeout
        try:
            line = self._lines.get(timeout=timeout)
            while key not in (message := json.loads(line or b"null") or {"end": True}):
                if "end" in message:
                    raise EOFError
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(f"no answer to {key!r} within {timeout:g} s, so it was stopped") from None
        except ValueError:
            raise EOFError from None
        return message[key]

    def how_it_ended(self) -> str:
        """One clause on the exit status, for a child that ended without an answer."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "its probe closed the answer channel without an answer"
        if code < 0:
            return f"its probe was ended by signal {signal.Signals(-code).name}"
        return f"its probe ended the process with exit code {code}"

    def last_output(self) -> str:
        """The end of what the plugin printed, on one line; empty when it printed nothing."""
        self._readers[1].join(0.1)
        text = " ".join(self._tail.decode(errors="replace").split())
        return f"; its last output: ...{text[-200:]}" if text else ""

    def end(self) -> None:
        """Kill the child with its children. Safe: until `wait` has reaped it, its process group id is its own."""
        if self._process.returncode is None:
            _kill_group(self._process)
            self._process.wait()

    def _read_answers(self, stream: BinaryIO) -> None:
        with stream:
            while line := stream.readline(_LINE_LIMIT):
                self._lines.put(line)
        self._lines.put(b"")

    def _read_output(self, stream: BinaryIO) -> None:
        with stream:
            while chunk := os.read(stream.fileno(), 65536):
                self._tail = (self._tail + chunk)[-_OUTPUT_TAIL:]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        process.kill()
    else:
        # Some systems refuse the signal when all that is left of the group is the ended leader.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
