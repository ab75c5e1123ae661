"""A lock that starves nobody."""

from __future__ import annotations

import threading


class Turns:
    """A lock for `with`: who waits goes before who just had it, and the holder may take it again.

    A plain lock that a thread gives back and takes again in a loop stays with that thread for as long as the loop runs.
    Here the one who waits holds `_next` meanwhile, and the loop has to pass there first.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._next = threading.Lock()
        self._holder: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._holder == me:
            self._lock.acquire()
        else:
            with self._next:
                self._lock.acquire()
        self._holder = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
        self._lock.release()
