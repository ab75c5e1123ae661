"""Finds blocks whose keys and values are already there, by the tokens that led to them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

DIGEST = 32


class PrefixIndex:
    """A map from chained block hashes to block ids.

    The hash of a block is BLAKE2b-256 over its parent's hash and its packed int32 token ids. The chain starts at a root
    that is keyed with a secret and bound to `fingerprint` (model, dtypes, block size) and to the tenant's salt, so that
    hashes can neither be predicted nor met from another model or tenant. Only a full, written block is inserted.
    """

    def __init__(self, fingerprint: bytes = b"", key: bytes | None = None) -> None:
        self._base = hashlib.blake2b(fingerprint, digest_size=DIGEST, key=key or secrets.token_bytes(DIGEST))
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def root(self, salt: bytes = b"") -> bytes:
        """The hash that a tenant's chains start from."""
        hasher = self._base.copy()
        hasher.update(len(salt).to_bytes(8, "little") + salt)
        return hasher.digest()

    def extend(self, hashes: list[bytes], root: bytes, packed: bytes, block_bytes: int) -> None:
        """Append to `hashes` the chain over `packed` int32 token ids, one hash for each whole `block_bytes`."""
        parent, blake, append = (hashes[-1] if hashes else root), hashlib.blake2b, hashes.append
        for start in range(0, len(packed) - block_bytes + 1, block_bytes):
            parent = blake(parent + packed[start : start + block_bytes], digest_size=DIGEST).digest()
            append(parent)

    def find(self, hashes: Sequence[bytes], most: int) -> list[int]:
        """The blocks of the longest known prefix of `hashes`, at most `most` of them."""
        found: list[int] = []
        get = self._blocks.get
        for digest in hashes[:most]:
            block = get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def get(self, digest: bytes) -> int | None:
        """The block that holds this content."""
        return self._blocks.get(digest)

    def digest(self, block: int) -> bytes:
        """What a findable block is found by."""
        return self._hashes[block]

    def insert(self, digest: bytes, block: int) -> None:
        """Make `block` findable, unless another block already holds the same content."""
        if digest not in self._blocks and block not in self._hashes:
            self._blocks[digest] = block
            self._hashes[block] = digest

    def forget(self, block: int) -> None:
        """Remove exactly the entry of `block`."""
        del self._blocks[self._hashes.pop(block)]

    def holds(self, block: int) -> bool:
        """Whether `block` is findable."""
        return block in self._hashes
