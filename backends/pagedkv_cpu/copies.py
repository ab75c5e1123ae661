"""Copies of blocks: what one takes, and the thread that carries copies between pools out beside compute.

copy_blocks ── within a pool, or small and nothing before it ── at once
          └─── else a queue, first in first out ── one thread, started by the first copy, ended by close
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api import DeviceError, Event

_log = logging.getLogger("pagedkv.backends.cpu")

AT_ONCE = 1 << 18
"""Bytes up to which a copy takes no longer than handing it to the thread would."""

CHUNK = 1 << 18
"""Bytes that torch gathers before it scatters them: they stay in the cache, and torch wakes no threads for so few."""

Planes = list[tuple[torch.Tensor, torch.Tensor]]
"""(planes to read, planes to write) of each region, uint8 [planes, blocks, block bytes]."""


def copy_with_torch(planes: Planes, pairs: npt.NDArray[np.int32]) -> None:
    """Copy blocks pairs[:, 0] to pairs[:, 1], int32 [N, 2], at most `CHUNK` bytes at a time."""
    sources, targets = torch.from_numpy(pairs.T.astype(np.int64, order="C"))
    for mine, theirs in planes:
        size = mine.shape[2]
        blocks = max(1, min(CHUNK // size, len(pairs)))
        step = max(1, CHUNK // (size * blocks))
        for first in range(0, len(mine), step):
            for start in range(0, size, CHUNK):
                part = slice(first, first + step), slice(None), slice(start, start + CHUNK)
                _move(mine[part], theirs[part], sources.split(blocks), targets.split(blocks))


def _move(
    mine: torch.Tensor, theirs: torch.Tensor, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> None:
    words, into = mine.view(torch.int64), theirs.view(torch.int64)  # a block is a multiple of 8 numbers of 2 bytes
    for source, target in zip(sources, targets, strict=True):
        into.index_copy_(1, target, words.index_select(1, source))


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Blocks pairs[:, 0] to pairs[:, 1], int32 [N, 2], in all planes. `run` computes it, and keeps nothing."""

    planes: Planes
    pairs: npt.NDArray[np.int32]
    run: Callable[[Planes, npt.NDArray[np.int32]], None]

    @property
    def nbytes(self) -> int:
        """Bytes to be moved."""
        return len(self.pairs) * sum(len(mine) * mine.shape[2] for mine, _ in self.planes)

    def __call__(self) -> None:
        self.run(self.planes, self.pairs)


class CopyEvent(Event):
    """The end of a copy that the thread carries out."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True

    def join(self, timeout: float | None = None) -> None:
        if wait([self._future], timeout).done:
            self._future.result()


class CopyThread:
    """Carries copies out in the order they come. After the first `failure` all others fail too."""

    def __init__(self) -> None:
        self.failure: DeviceError | None = None
        self._last: Future[None] | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pagedkv-copies")

    @property
    def idle(self) -> bool:
        """Whether all that was begun has ended."""
        return self._last is None or self._last.done()

    def begin(self, copy: Copy, after: Event | None) -> CopyEvent:
        """Enqueue a copy, which starts after `after`."""
        self._last = self._executor.submit(self.run, copy, after)
        return CopyEvent(self._last)

    def drain(self) -> None:
        """Wait for all that was begun, whether it fails or not."""
        if self._last is not None:
            wait([self._last])

    def close(self) -> None:
        """Wait for all that was begun and end the thread. Idempotent."""
        self._executor.shutdown()

    def run(self, copy: Copy, after: Event | None) -> None:
        """Carry a copy out in the thread that calls, once `after` is done."""
        if self.failure is not None:
            raise DeviceError(str(self.failure))
        try:
            if after is not None:
                after.join()
            copy()
        except Exception as error:
            self.failure = DeviceError(f"a copy of blocks failed ({error}): close this instance and create a new one")
            _log.error("%s", self.failure)
            raise self.failure from error
