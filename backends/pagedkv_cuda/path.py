"""The two ways to compute attention here, Triton's kernels and torch's operators, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api import GroupSpec, OpSpec, PoolSpec

if TYPE_CHECKING:
    from pagedkv_cuda.plans import CudaPlan
    from pagedkv_cuda.pool import Layer

Arrays = Mapping[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """A batch in arrays of our own, after every check, as both paths read it.

    counts, contexts [S]: query tokens and context of each row; table [S, W] their blocks; slots int64 [A].
    In a static plan all are padded to `shape`, and `most_context` is the shape's.
    """

    num_tokens: int
    counts: Ints
    contexts: Ints
    table: Ints
    slots: npt.NDArray[np.int64]
    block_size: int
    most_context: int
    decode_q: int
    static: bool

    @property
    def starts(self) -> Ints:
        """cu_q [S + 1]."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)

    @property
    def num_decode(self) -> int:
        """Leading rows of at most `decode_q` query tokens."""
        if self.static:
            return len(self.counts)
        more = np.flatnonzero(self.counts > self.decode_q)
        return int(more[0]) if len(more) else len(self.counts)


class Path(ABC):
    """Appends to and attends over the rows of a pool; arguments were checked before."""

    name: str
    discard_blocks: int
    """Blocks behind the pool's own that take what is not to be kept."""
    decode_q: int
    """Query tokens up to which a row counts as decoding."""

    @abstractmethod
    def working_bytes(self, spec: PoolSpec) -> int:
        """Bytes of working memory for a pool like `spec`, temporaries included: pure arithmetic."""

    @abstractmethod
    def working(self, spec: PoolSpec, device: str) -> Any:
        """That part of it which is kept."""

    @abstractmethod
    def staging_bytes(self, spec: PoolSpec, group: GroupSpec) -> int:
        """The most that `arrays` can take for one plan of the group."""

    @abstractmethod
    def arrays(self, batch: Staged, num_blocks: int) -> Arrays:
        """What the device must know of a batch. Always of the same shapes for a static plan."""

    @abstractmethod
    def bounds(self, batch: Staged) -> Any:
        """What the host must know of it."""

    @abstractmethod
    def append(self, plan: CudaPlan, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the first rows of k, v [A, kv_heads, dim] to the plan's slots."""

    @abstractmethod
    def attend(
        self, plan: CudaPlan, layer: Layer, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Attention of q into out, natural log of the denominators into lse; rows past the tokens are left alone."""

    @abstractmethod
    def copy(self, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, device: str) -> None:
        """Copy rows source[pairs[:, 0]] to target[pairs[:, 1]], uint8; pairs int64 [N, 2] in staging memory, N >= 1."""

    def op(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        """An op of this path, or None for the reference's."""
        return None


def table_bytes(spec: PoolSpec, group: GroupSpec, row_fields: int, token_fields: int) -> int:
    """Bytes of the arrays of one plan: block table and slots, and int32 fields for each row and each token."""
    limits = spec.limits
    columns = max(1, -(-limits.context // group.block_size))
    return 4 * limits.rows * (columns + row_fields) + (8 + 4 * token_fields) * limits.tokens + 1024
