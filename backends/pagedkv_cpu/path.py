"""The two ways to compute attention here, torch's operators and the kernels in C++, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api import Batch, Plan, PoolSpec
from pagedkv_cpu.copies import Planes
from pagedkv_cpu.pool import CpuPool, Layer


class CpuPlan(Plan):
    """What every plan knows of its batch."""

    def __init__(self, pool: CpuPool, group: int, batch: Batch) -> None:
        self.pool = pool
        self.group = group
        self.num_tokens = batch.num_tokens
        self.num_slots = 0 if batch.slots is None else len(batch.slots)


class Path(ABC):
    """Appends to and attends over the planes of a pool; arguments were checked before."""

    name: str
    steady: bool
    """Whether a row's bits depend on the row alone."""

    @abstractmethod
    def fixed_bytes(self, spec: PoolSpec) -> int:
        """Bytes of working memory and plans for a pool like `spec`: pure arithmetic."""

    @abstractmethod
    def scratch(self, spec: PoolSpec) -> Any:
        """That working memory, allocated."""

    @abstractmethod
    def unsteady(self, spec: PoolSpec) -> list[str]:
        """Reasons why a row's bits would depend on more than the row in such a pool."""

    @abstractmethod
    def plan(self, pool: CpuPool, group: int, batch: Batch) -> CpuPlan:
        """Prepare a batch; raises `ContractViolation` for slots or blocks outside the pool."""

    @abstractmethod
    def append(self, plan: Any, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v [>= num_slots, kv_heads, dim] to the plan's slots."""

    @abstractmethod
    def attend(self, plan: Any, layer: Layer, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Attention of q [>= num_tokens, q_heads, k_dim] into out; natural log of the denominators into lse."""

    @abstractmethod
    def copy(self, planes: Planes, pairs: npt.NDArray[np.int32]) -> None:
        """Copy blocks pairs[:, 0] to pairs[:, 1], int32 [N, 2], in every plane. Any thread, beside everything else."""
