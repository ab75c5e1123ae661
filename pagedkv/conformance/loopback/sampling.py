"""`greedy` and `sample` in float64, one row at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]


def greedy(logits: Tensor) -> Tensor:
    """The lowest of the most probable ids of each row, -1 where there is none: logits [n, V] -> int32 [n]."""
    return _ids([_best(row) for row in logits.double().numpy()])


def sample(logits: Tensor, numbers: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Top-k, top-p of what is left, and the draw in the order of ids: logits [n, V], the others [n] -> int32 [n]."""
    columns = (column.tolist() for column in (numbers, temperature, top_k, top_p))
    return _ids([_drawn(*row) for row in zip(logits.double().numpy(), *columns, strict=True)])


def _ids(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def _best(row: Floats) -> int:
    usable = bool(row.max() > -np.inf)  # a NaN compares as nothing
    return int(row.argmax()) if usable else -1


def _drawn(row: Floats, number: float, temperature: float, top_k: int, top_p: float) -> int:
    best = _best(row)
    if best < 0 or temperature == 0 or row[best] == np.inf:
        return best
    weights = np.exp((row - row[best]) / temperature)
    ranked = np.lexsort((np.arange(len(row)), -row))[:top_k]
    held = np.cumsum(weights[ranked])
    enough = int(np.searchsorted(held, top_p * held[-1])) + 1
    kept = np.sort(ranked[:enough])
    ends: npt.NDArray[Any] = np.cumsum(weights[kept])
    return int(kept[np.searchsorted(ends, number * ends[-1], side="right")])
