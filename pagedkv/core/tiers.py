"""Blocks on two levels: the device's pool, the host's behind it, and what is on its way between them.

                       save          a preempted sequence's blocks, which it keeps a reference to
     device pool   ──────────────▶   host pool
                       save_oldest   cached blocks, before they are evicted
                   ◀──────────────
                       fetch         blocks of a sequence that starts or comes back

A transfer holds a reference of its own to both ends of each pair until it has landed, so that neither is reused while
bytes move. What arrives becomes findable then, never earlier. Whoever moves the bytes takes transfers from `outbox`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagedkv.api.errors import InternalError
from pagedkv.api.records import Int32
from pagedkv.core.block_pool import BlockPool
from pagedkv.core.prefix_index import PrefixIndex

Digest = bytes | None
_MOST_SAVED = 64  # cached blocks that begin to move in one step


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """Blocks on their way: `pairs` [N, 2] of (source, target), `digests` [N] what each is found by once it is there."""

    to_host: bool
    pairs: Int32
    digests: list[Digest]
    owner: str
    cached: bool = False

    @property
    def device_blocks(self) -> list[int]:
        """The blocks on the device, one for each pair."""
        blocks: list[int] = self.pairs[:, 0 if self.to_host else 1].tolist()
        return blocks

    @property
    def host_blocks(self) -> list[int]:
        """The blocks in host memory, one for each pair."""
        blocks: list[int] = self.pairs[:, 1 if self.to_host else 0].tolist()
        return blocks


@dataclass(slots=True, kw_only=True)
class HostMemory:
    """Where host blocks come from: `more` makes some and returns how many, 0 when there is no room for others.

    `caching`: what was saved may be found by anyone, as on the device.
    """

    more: Callable[[], int] = field(default=lambda: 0)
    caching: bool = True


class Tiers:
    """Both pools, their indexes and every transfer between them. Without a `HostMemory` nothing is ever saved."""

    def __init__(self, num_blocks: int, index: PrefixIndex, memory: HostMemory | None = None) -> None:
        self.index = index
        self.device = BlockPool(num_blocks, index)
        self.host_index = PrefixIndex()
        self.host = BlockPool(1, self.host_index)
        self.outbox: deque[Transfer] = deque()
        self.num_saved = self.num_fetched = 0
        self._memory = memory
        self._moving: dict[Transfer, None] = {}

    @property
    def caching(self) -> bool:
        """Whether what lies in host memory is found by others than who saved it."""
        return self._memory is not None and self._memory.caching

    @property
    def swapping(self) -> bool:
        """Whether there is host memory to save to."""
        return self._memory is not None

    @property
    def moving(self) -> bool:
        """Whether a transfer has not landed yet."""
        return bool(self._moving)

    def moving_refs(self) -> Counter[int]:
        """Blocks on the device that transfers refer to, and how often."""
        return Counter(block for transfer in tuple(self._moving) for block in transfer.device_blocks)

    def in_transit(self) -> tuple[int, int]:
        """Blocks on the device and on the host that only transfers refer to: nobody's, but not to be had yet."""
        pools = (self.device, self.moving_refs()), (self.host, self._moving_host_refs())
        device, host = (sum(pool.refs(block) == count for block, count in held.items()) for pool, held in pools)
        return device, host

    def _moving_host_refs(self) -> Counter[int]:
        return Counter(block for transfer in tuple(self._moving) for block in transfer.host_blocks)

    # -- to the host ---------------------------------------------------------------------------------------------------

    def save(self, blocks: Sequence[int], digests: Sequence[Digest], owner: str) -> list[int] | None:
        """Begin to copy `blocks` to the host; returns the host blocks, one reference to each, or None: no room.

        A block whose content lies there already is not copied again.
        """
        known = [self.host_index.get(digest) if digest else None for digest in digests]
        self.host.acquire([block for block in known if block is not None], owner)
        missing = known.count(None)
        if not self._make_room(missing):
            self.host.release(block for block in known if block is not None)
            return None
        new = iter(self.host.allocate(missing, owner))
        saved = [next(new) if block is None else block for block in known]
        moves = zip(blocks, saved, digests, known, strict=True)
        self._send([(block, host, digest) for block, host, digest, there in moves if there is None], owner)
        return saved

    def save_oldest(self, ahead: int) -> None:
        """Begin to copy cached blocks that the next `ahead` allocations would evict and that the host does not have."""
        if not self.caching or self.device.num_free >= ahead:
            return
        moves: list[tuple[int, int, Digest]] = []
        # Nobody can take them while they move: those who run must not wait for that.
        most = min(_MOST_SAVED, self.device.available // 2) if self.device.num_used else _MOST_SAVED
        for block in self.device.oldest(ahead - self.device.num_free):
            digest = self.index.digest(block)
            if self.host_index.get(digest) is not None:
                self.device.copied(block)
                continue
            if len(moves) >= most or not self._make_room(1):
                break
            moves.append((block, self.host.allocate(1, "cache")[0], digest))
        self._send(moves, "cache", cached=True)
        self.host.release(host for _, host, _ in moves)  # the transfer holds it now

    def _make_room(self, count: int) -> bool:
        """Let the host pool grow until `count` blocks are free, or evict what it caches; False: neither is enough."""
        while self.host.num_free < count and self._memory is not None:
            made = self._memory.more()
            if made == 0:
                break
            self.host.grow(made)
        return self._memory is not None and self.host.available >= count

    def _send(self, moves: Sequence[tuple[int, int, Digest]], owner: str, *, cached: bool = False) -> None:
        if not moves:
            return
        self.num_saved += len(moves)
        pairs = np.array([move[:2] for move in moves], np.int32)
        digests = [digest if self.caching else None for _, _, digest in moves]
        self._begin(Transfer(to_host=True, pairs=pairs, digests=digests, owner=owner, cached=cached))

    # -- and back ------------------------------------------------------------------------------------------------------

    def fetch(self, moves: Sequence[tuple[int, int, Digest]], owner: str) -> Transfer:
        """Begin to copy (host block, device block, what it will be found by) of each of `moves`."""
        self.num_fetched += len(moves)
        pairs = np.array([move[:2] for move in moves], np.int32)
        transfer = Transfer(to_host=False, pairs=pairs, digests=[digest for _, _, digest in moves], owner=owner)
        self._begin(transfer)
        return transfer

    def drop(self, saved: Iterable[int]) -> None:
        """Give up what `save` returned."""
        self.host.release(saved)

    # -- transfers -----------------------------------------------------------------------------------------------------

    def _begin(self, transfer: Transfer) -> None:
        self.device.acquire(transfer.device_blocks, transfer.owner)
        self.host.acquire(transfer.host_blocks, transfer.owner)
        self._moving[transfer] = None
        self.outbox.append(transfer)

    def land(self, transfer: Transfer) -> None:
        """The bytes have arrived: make them findable, give up the transfer's references."""
        if transfer not in self._moving:
            raise InternalError(f"a transfer of {transfer.owner!r} landed twice; please report this")
        del self._moving[transfer]
        index = self.host_index if transfer.to_host else self.index
        targets = transfer.pairs[:, 1].tolist()
        for digest, block in zip(transfer.digests, targets, strict=True):
            if digest is not None:
                index.insert(digest, block)
        self.device.release(transfer.device_blocks, copied=transfer.cached)
        self.host.release(transfer.host_blocks)

    def forget(self, digests: Iterable[Digest]) -> None:
        """Let nobody find this content in host memory, nor where it is on its way to."""
        unwanted = set(digests) - {None}
        for digest in unwanted:
            block = self.host_index.get(digest) if digest else None
            if block is not None:
                self.host.discard(block)
        for transfer in self._moving:
            transfer.digests = [None if digest in unwanted else digest for digest in transfer.digests]

    def forget_all(self) -> int:
        """Forget all that no request refers to, on both levels, and what is on its way; returns how many blocks."""
        for transfer in self._moving:
            transfer.digests = [None] * len(transfer.digests)
        for pool, index, held in (
            (self.device, self.index, self.moving_refs()),
            (self.host, self.host_index, self._moving_host_refs()),
        ):
            for block, count in held.items():
                if pool.refs(block) == count and index.holds(block):
                    index.forget(block)
        return self.device.forget_cached() + self.host.forget_cached()

    def check(self, device_refs: dict[int, int], host_refs: dict[int, int]) -> None:
        """Raise `InternalError` unless every reference is one of these or of a transfer; slow, for tests."""
        self.device.check(Counter(device_refs) + self.moving_refs())
        self.host.check(Counter(host_refs) + self._moving_host_refs())
