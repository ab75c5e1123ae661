"""Which tokens min-p, top-k and top-p leave of a row, and the row's draw among them.

The order is the field's practice (vLLM's sampler): temperature, then min-p on the scaled probabilities, then top-k,
then top-p on the probability that is left. Tokens rank by (logit down, id up), so a tie at the edge keeps the lower ids
and exactly as many as asked. Only *values* are sorted, never ids: sorted values are the same whatever method found
them, which lets each device use its fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_FIRST_WIDTH = 256  # values looked at first where top-p or min-p alone decide
_WIDER = 16


class Cut(NamedTuple):
    """What one row asks for; a plain tuple, as one is made per row and step.

    `top` is the largest logit, finite. `top_k` is the vocabulary size when off. `mass` is the sum of
    exp((logit - top) / temperature) over the vocabulary where top-p alone cuts, NaN elsewhere.
    """

    temperature: float
    top: float
    top_k: int
    top_p: float
    min_p: float
    mass: float

    def weights(self, logits: npt.ArrayLike) -> Floats:
        """Probabilities relative to the most probable token, in float64."""
        scaled: Floats = (np.asarray(logits, np.float64) - self.top) / self.temperature
        return np.exp(scaled)

    def kept(self, values: Float32s) -> int:
        """How many tokens survive, given the row's largest logits, descending; 0 if these are too few to tell."""
        weights = self.weights(values)
        enough = int(np.count_nonzero((weights >= self.min_p) & (weights > 0)))
        survivors = min(self.top_k, enough)
        closed = enough < len(values) or len(values) >= self.top_k  # no survivor lies beyond these values
        if self.top_p == 1 or (not closed and np.isnan(self.mass)):
            return survivors if closed else 0
        cumulative = np.cumsum(weights[:survivors])
        whole = self.mass if self.mass == self.mass else cumulative[-1]
        count = int(np.searchsorted(cumulative, self.top_p * whole)) + 1  # the first prefix that holds top_p of it
        if count > survivors:  # of a closed list only by rounding
            return survivors if closed else 0
        return count

    def draw(self, ids: Ids, logits: Float32s, kept: int, number: float) -> int:
        """Draw among the `kept` first of the candidates `ids`, ascending, all at or above the last kept logit."""
        surplus = len(ids) - kept
        if surplus > 0:  # equal logits at the edge: the highest ids go
            last = np.flatnonzero(logits == logits.min())[-surplus:]
            ids, logits = np.delete(ids, last), np.delete(logits, last)
        cumulative = np.cumsum(self.weights(logits))
        return int(ids[np.searchsorted(cumulative, number * cumulative[-1], side="right")])


def draw_cut(logits: torch.Tensor, rows: Ids, cuts: Sequence[Cut], numbers: Floats) -> list[int]:
    """One id for each of `rows` of logits [n, V], whose cuts [m] and numbers [m] in [0, 1) are given."""
    kept, floors = _limits(logits, rows, cuts)
    candidates = at_least(logits, rows, floors)
    return [
        cut.draw(*candidate, count, number)
        for cut, candidate, count, number in zip(cuts, candidates, kept.tolist(), numbers.tolist(), strict=True)
    ]


def _limits(logits: torch.Tensor, rows: Ids, cuts: Sequence[Cut]) -> tuple[Ids, Float32s]:
    """How many tokens each row keeps, and the logit of the last one.

    The widths tried depend on the row alone, so that its sums run over the same values in any company.
    """
    vocab_size = logits.shape[1]
    top_k = np.array([cut.top_k for cut in cuts])
    widths = np.where(top_k < vocab_size, top_k, min(_FIRST_WIDTH, vocab_size))
    kept, floors = np.zeros(len(cuts), np.int64), np.zeros(len(cuts), np.float32)
    pending = np.arange(len(cuts))
    while pending.size:
        for width in np.unique(widths[pending]).tolist():
            group = pending[widths[pending] == width]
            for i, values in zip(group.tolist(), largest(logits, rows[group], width), strict=True):
                kept[i] = cuts[i].kept(values)
                floors[i] = values[kept[i] - 1]
        pending = pending[kept[pending] == 0]
        widths = np.minimum(widths * _WIDER, vocab_size)
    return kept, floors


def largest(logits: torch.Tensor, rows: Ids, width: int) -> Float32s:
    """The `width` largest logits of each row, descending: logits [n, V], rows [m] -> [m, width]."""
    if logits.device.type != "cpu":
        return _largest_elsewhere(logits, rows, width)
    host = logits.numpy()
    return np.stack([_tail(host[row], width) for row in rows])[:, ::-1]


def _largest_elsewhere(logits: torch.Tensor, rows: Ids, width: int) -> Float32s:
    values: Float32s = torch.topk(logits[torch.from_numpy(rows).to(logits.device)], width).values.cpu().numpy()
    return values


def _tail(row: Float32s, width: int) -> Float32s:
    if row.min() == -np.inf:  # partition can be forty times slower where so many are equal
        row = row[row > -np.inf]
        if len(row) < width:
            return np.concatenate([np.full(width - len(row), -np.inf, np.float32), np.sort(row)])
    start = len(row) - width
    return np.sort(np.partition(row, start)[start:] if start else row)


def at_least(logits: torch.Tensor, rows: Ids, floors: Float32s) -> list[tuple[Ids, Float32s]]:
    """For each row the ids, ascending, and logits that are not below its floor."""
    if logits.device.type != "cpu":
        return _at_least_elsewhere(logits, rows, floors)
    host = logits.numpy()
    found = [np.flatnonzero(host[row] >= floor) for row, floor in zip(rows, floors, strict=True)]
    return [(ids, host[row][ids]) for row, ids in zip(rows, found, strict=True)]


def _at_least_elsewhere(logits: torch.Tensor, rows: Ids, floors: Float32s) -> list[tuple[Ids, Float32s]]:
    """`at_least` with one transfer for all rows."""
    chosen = logits[torch.from_numpy(rows).to(logits.device)]
    mask = chosen >= torch.from_numpy(floors).to(logits.device)[:, None]
    ids = mask.nonzero()[:, 1].cpu().numpy()
    ends = np.cumsum(mask.sum(1).cpu().numpy())[:-1]
    return list(zip(np.split(ids, ends), np.split(chosen[mask].cpu().numpy(), ends), strict=True))
