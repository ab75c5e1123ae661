"""One request in the front: its news as they come, awaited by the one handler that answers it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from pagedkv.server.messages import Ending, Piece


class Stream(AsyncIterator[list[Piece]]):
    """All methods belong to the front's event loop. Iterating gives what is new, until the request has ended."""

    def __init__(self, key: int, label: str, choices: int, abort: Callable[[int, str], None]) -> None:
        self.key = key
        self.label = label
        self.choices = choices
        self.ending: Ending | None = None
        self._abort = abort
        self._accepted = False
        self._over = False
        self._error: BaseException | None = None
        self._pieces: list[Piece] = []
        self._reader: asyncio.Future[None] | None = None
        self._when_over: list[Callable[[], object]] = []

    # -- what the engine says ------------------------------------------------------------------------------------------

    def accept(self) -> None:
        """The engine has the request."""
        self._accepted = True
        self._wake()

    def put(self, piece: Piece) -> None:
        """Something new."""
        self._pieces.append(piece)
        self._wake()

    def end(self, ending: Ending) -> None:
        """All has been said."""
        self.ending = ending
        self._finish()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come; what came before is still read. Of several errors the first counts."""
        if not self._over:
            self._error = error
            self._finish()

    def on_over(self, call: Callable[[], object]) -> None:
        """Call this when nothing more will come."""
        self._when_over.append(call)

    def _finish(self) -> None:
        self._over = True
        for call in self._when_over:
            call()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # -- what its handler asks -----------------------------------------------------------------------------------------

    async def accepted(self) -> None:
        """Wait until the engine has the request. Raises what it was refused for, or `EngineDead`."""
        while not (self._accepted or self._over):
            await self._news()
        if self._error is not None and not self._accepted:
            raise self._error

    async def __anext__(self) -> list[Piece]:
        while not (self._pieces or self._over):
            await self._news()
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            return pieces
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def _news(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def cancel(self, why: str, error: BaseException) -> None:
        """Let the engine drop the request; its handler gets `error` at once. One that is over stays as it is.

        `why` is what the metrics count it under: "disconnect", "timeout", "shutdown".
        """
        if not self._over:
            self._pieces.clear()
            self.fail(error)
            self._abort(self.key, why)
