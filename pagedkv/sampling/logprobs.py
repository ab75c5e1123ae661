"""How probable the model found tokens: of its own logits, before anything a request asked for changed them.

That is the field's default ("raw logprobs"). The sums are exact (see `weights`), so a row's numbers do not depend on
its neighbours either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.sampling.truncation import at_least, largest
from pagedkv.sampling.weights import Ids, Weights, only_infinite

Floats = npt.NDArray[np.float64]

FLOOR = -9999.0
"""Stands for everything less probable, minus infinity too, which JSON does not know."""


class Scored(NamedTuple):
    """One token's natural log of its probability, at least `FLOOR`, and its place among all, 1 the most probable."""

    token: int
    logprob: float
    rank: int


def score(logits: torch.Tensor, rows: Ids, tokens: Ids, counts: Sequence[int]) -> list[list[Scored] | None]:
    """For each of `rows` [m] of logits [n, V] float32: its token [m], then its `counts` [m] most probable ones.

    A count of -1 is all. Equal logits rank by id. None stands for a row with a NaN or nothing but minus infinity.
    """
    top = _largest_logits(logits, rows)
    usable = ~(np.isnan(top) | (top == -np.inf))
    certain = rows[top == np.inf]
    tops = np.zeros(len(logits), np.float32)
    tops[rows] = top
    if certain.size:
        logits, tops = only_infinite(logits, tops, certain)
    found: list[list[Scored] | None] = [None] * len(rows)
    good = np.flatnonzero(usable)
    if good.size:
        for at, scores in zip(good.tolist(), _score(logits, tops, rows, tokens, counts, good), strict=True):
            found[at] = scores
    return found


def _score(
    logits: torch.Tensor, tops: npt.NDArray[np.float32], rows: Ids, tokens: Ids, counts: Sequence[int], good: Ids
) -> list[list[Scored]]:
    rows, tokens = rows[good], tokens[good]
    base = tops[rows] + np.log(Weights(logits, tops, np.ones(len(logits))).mass(rows))
    own, ranks = _ranks(logits, rows, tokens)
    scores = [
        [Scored(token, _floored(logit - b), rank)]
        for token, logit, b, rank in zip(tokens.tolist(), own.tolist(), base.tolist(), ranks.tolist(), strict=True)
    ]
    widths = np.array([counts[at] for at in good.tolist()])
    widths = np.where(widths < 0, logits.shape[1], np.minimum(widths, logits.shape[1]))
    for width in np.unique(widths[widths > 0]).tolist():
        group = np.flatnonzero(widths == width)
        for at, most in zip(group.tolist(), _most(logits, rows[group], width), strict=True):
            scores[at] += [Scored(i, _floored(x - float(base[at])), r) for r, (i, x) in enumerate(most, start=1)]
    return scores


def _floored(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR


def _most(logits: torch.Tensor, rows: Ids, width: int) -> list[list[tuple[int, float]]]:
    """The `width` most probable tokens of each row, (id, logit), by logit down and id up."""
    floors = largest(logits, rows, width)[:, -1]
    return [
        sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))[:width]
        for ids, values in at_least(logits, rows, floors)
    ]


def _largest_logits(logits: torch.Tensor, rows: Ids) -> npt.NDArray[np.float32]:
    if logits.device.type == "cpu":
        host = logits.numpy()
        return np.array([host[row].max() for row in rows], np.float32)
    found: npt.NDArray[np.float32] = logits[torch.from_numpy(rows).to(logits.device)].amax(1).cpu().numpy()
    return found


def _ranks(logits: torch.Tensor, rows: Ids, tokens: Ids) -> tuple[Floats, Ids]:
    """Each token's logit [m] and rank [m]."""
    if logits.device.type != "cpu":
        return _ranks_elsewhere(logits, rows, tokens)
    host = logits.numpy()
    own = host[rows, tokens]
    before = [
        np.count_nonzero(host[row] > logit) + np.count_nonzero(host[row, :token] == logit)
        for row, token, logit in zip(rows, tokens, own, strict=True)
    ]
    return own.astype(np.float64), np.array(before, np.int64) + 1


def _ranks_elsewhere(logits: torch.Tensor, rows: Ids, tokens: Ids) -> tuple[Floats, Ids]:
    """`_ranks` with one transfer for all rows."""
    chosen = logits[torch.from_numpy(rows).to(logits.device)]
    ids = torch.from_numpy(tokens).to(logits.device)[:, None]
    own = chosen.gather(1, ids)
    earlier = torch.arange(chosen.shape[1], device=logits.device) < ids
    before = ((chosen > own) | ((chosen == own) & earlier)).sum(1)
    return own[:, 0].double().cpu().numpy(), (before + 1).cpu().numpy()
