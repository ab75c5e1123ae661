"""A terminal for tests: what is written to it is read all the time, so a writer never waits and nothing is cut."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import termios
import threading


class Terminal:
    """``end`` is a descriptor to write to or hand to a process; close every copy of it, then ask what was shown."""

    def __init__(self, rows: int = 24, columns: int = 150) -> None:
        self._ours, self.end = pty.openpty()
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._blocks: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while block := os.read(self._ours, 65536):
                self._blocks.append(block)

    def shown(self) -> str:
        """Everything written, once the other end is closed."""
        self._reader.join(timeout=60)
        if self._reader.is_alive():
            raise RuntimeError("the end of the terminal is still open: close it before asking what was shown")
        os.close(self._ours)
        return b"".join(self._blocks).decode()
