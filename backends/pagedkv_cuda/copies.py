"""Copies blocks between pools: one launch for all pairs with Triton's kernel, or torch's own copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api import ContractViolation
from pagedkv_cuda.pool import GRANULE, CudaPool

Pairs = npt.NDArray[np.int64]
BLOCK = 1024
"""int64 of one program: 8 KiB, which keeps a bus busy with few programs."""


def by_kernel(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, device: str) -> None:
    """All pairs in one launch; rows in host memory are read and written over the bus."""
    from pagedkv_cuda.jit_copy import copy_rows

    words = source.shape[1] // 8
    grid = (len(pairs) * -(-words // BLOCK),)
    there = pairs.to(device, non_blocking=True)
    copy_rows[grid](source.view(torch.int64), target.view(torch.int64), there, words, BLOCK=BLOCK, num_warps=4)


def by_torch(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Within one memory by gathering and scattering a few rows at a time; over the bus run by run."""
    if source.device == target.device:
        there = pairs.to(source.device, non_blocking=True)
        for part in torch.split(there, max(1, GRANULE // source.shape[1])):
            target.index_copy_(0, part[:, 1], source.index_select(0, part[:, 0]))
        return
    for first, second, count in _runs(pairs.numpy()):
        target[second : second + count].copy_(source[first : first + count], non_blocking=True)


def _runs(pairs: Pairs) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, rows) of stretches that follow one another on both sides."""
    breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(1)) + 1
    for part in np.split(pairs, breaks):
        if len(part):
            yield int(part[0, 0]), int(part[0, 1]), len(part)


def checked(pairs: Any, source: CudaPool, target: CudaPool) -> Pairs:
    """A copy of the pairs, or `ContractViolation` with what is wrong."""
    array: Pairs = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    sources, targets = array[:, 0], array[:, 1]
    problem = None
    if array.size and not (sources.min() >= 0 and sources.max() < source.num_blocks):
        problem = f"a source outside 0..{source.num_blocks - 1}"
    elif array.size and not (targets.min() > 0 and targets.max() < target.num_blocks):
        problem = f"a destination outside 1..{target.num_blocks - 1} (block 0 is never written)"
    elif len(np.unique(targets)) != len(targets):
        problem = "a destination twice"
    elif source is target and np.intersect1d(sources, targets).size:
        problem = "an id on both sides within one pool"
    if problem is not None:
        raise ContractViolation(f"copy_blocks got {problem}", law="copy_blocks")
    return array
