"""Which block ids are free, in use, or unreferenced but still findable."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from pagedkv.api.errors import InternalError
from pagedkv.core.prefix_index import PrefixIndex

NULL_BLOCK = 0


class BlockPool:
    """Reference counts over block ids 1 .. num_blocks - 1; every operation is O(1) a block.

        free    (stack)  never written, or nothing worth finding
        used             one or more references
        cached  (LRU)    no reference, but the prefix index still finds it; evicted when the free stack is empty,
                         those with a copy elsewhere before the others, each in the order of their last use

    free + used + cached = num_blocks - 1 always. Block 0, the null block, is in none of them.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self._index = index
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._copied: OrderedDict[int, None] = OrderedDict()  # cached, with a copy elsewhere
        self._refs = [0] * num_blocks
        self._owner = [""] * num_blocks

    @property
    def usable(self) -> int:
        """Blocks that sequences can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._cached) + len(self._copied)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` hands out without evicting one."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that a prompt may still hit."""
        return len(self._cached) + len(self._copied)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.usable - self.available

    def refs(self, block: int) -> int:
        """The number of references to `block`."""
        return self._refs[block]

    def allocate(self, count: int, owner: str) -> list[int]:
        """Take `count` blocks for one owner; see `allocate_each`."""
        return self.allocate_each([owner] * count)

    def allocate_each(self, owners: Sequence[str]) -> list[int]:
        """Take a block with one reference for each owner, evicting least recently used cached ones if it must."""
        if len(owners) > self.available:
            raise InternalError(f"{len(owners)} blocks asked for, {self.available} available; please report this")
        blocks = []
        for owner in owners:
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            self._owner[block] = owner
            blocks.append(block)
        return blocks

    def _evict(self) -> int:
        block, _ = (self._copied or self._cached).popitem(last=False)
        self._index.forget(block)
        return block

    def _uncache(self, block: int) -> None:
        del (self._copied if block in self._copied else self._cached)[block]

    def acquire(self, blocks: Iterable[int], owner: str) -> None:
        """Add a reference to each block, which is in use or cached."""
        for block in blocks:
            if self._refs[block] == 0:
                self._uncache(block)
                self._owner[block] = owner
            self._refs[block] += 1

    def count_cached(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody references: acquiring them lowers `available` by as much."""
        return sum(self._refs[block] == 0 for block in blocks)

    def oldest(self, count: int) -> list[int]:
        """Of the `count` cached blocks that are evicted next those without a copy elsewhere, the first one first."""
        return list(islice(self._cached, max(0, count - len(self._copied))))

    def copied(self, block: int) -> None:
        """There is a copy of the cached `block` elsewhere: it is evicted before those that have none."""
        del self._cached[block]
        self._copied[block] = None

    def grow(self, count: int) -> None:
        """Add `count` free blocks, whose ids follow on from those there are."""
        ids = range(self.num_blocks, self.num_blocks + count)
        self.num_blocks += count
        self._free[:0] = reversed(ids)
        self._refs += [0] * count
        self._owner += [""] * count

    def release(self, blocks: Iterable[int], *, copied: bool = False) -> None:
        """Drop one reference from each block, in this order: the first released is the first evicted.

        `copied`: there is a copy elsewhere of those that become cached.
        """
        cached = self._copied if copied else self._cached
        for block in blocks:
            refs = self._refs[block]
            if refs <= 0:
                raise InternalError(f"block {block} released once too often; last held by {self._owner[block]!r}")
            self._refs[block] = refs - 1
            if refs == 1:
                if self._index.holds(block):
                    cached[block] = None
                else:
                    self._free.append(block)

    def discard(self, block: int) -> None:
        """Let nobody find `block` any more."""
        self._index.forget(block)
        if self._refs[block] == 0:
            self._uncache(block)
            self._free.append(block)

    def forget_cached(self) -> int:
        """Make every unreferenced block free, so that no prompt hits it any more; returns how many there were."""
        count = self.num_cached
        while self.num_cached:
            self._free.append(self._evict())
        return count

    def leaks(self) -> dict[str, list[int]]:
        """Blocks still referenced, by the request that took them last; empty when the engine is idle and sound."""
        held: dict[str, list[int]] = {}
        for block, refs in enumerate(self._refs):
            if refs:
                held.setdefault(self._owner[block], []).append(block)
        return held

    def check(self, expected_refs: dict[int, int]) -> None:
        """Raise `InternalError` unless references, free stack and cached set agree with `expected_refs`."""
        free, cached = set(self._free), {*self._cached, *self._copied}
        if len(free) != len(self._free) or len(cached) != self.num_cached or free & cached:
            raise InternalError("a block is free twice")
        for block in range(1, self.num_blocks):
            refs, expected = self._refs[block], expected_refs.get(block, 0)
            idle = (block in free) + (block in cached)
            if refs != expected or idle != (refs == 0):
                raise InternalError(
                    f"block {block} of {self._owner[block]!r}: {refs} references counted, {expected} held by tables"
                )
            if block in free and self._index.holds(block):
                raise InternalError(f"block {block} is free, but the prefix index still finds it")
