"""A sampler written the plain way: float64, Python loops, sort everything and walk down the list."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

INF = float("inf")


def reference(
    logits: Sequence[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[npt.NDArray[np.float64], float]:
    """Exact probabilities by id, and how near to an edge the cuts came (a share of the probability)."""
    scaled = np.array(logits, np.float64) / temperature
    share = np.exp(scaled - scaled.max())
    share /= share.sum()
    order = sorted(range(len(share)), key=lambda i: (-logits[i], i))
    margin = min(abs(share[i] - min_p * share.max()) / share.max() for i in order) if 0 < min_p < 1 else 1.0
    kept = [i for i in order if share[i] >= min_p * share.max()]
    kept = kept[: top_k if top_k > 0 else None]
    share /= share[kept].sum()
    if top_p < 1:
        before, nucleus = 0.0, []
        for i in kept:
            margin = min(margin, abs(before - top_p)) if i != kept[0] else margin
            if before >= top_p and nucleus:
                break
            nucleus.append(i)
            before += share[i]
        kept = nucleus
    exact = np.zeros_like(share)
    exact[kept] = share[kept] / share[kept].sum()
    return exact, margin


def adjusted(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    end_ids: Sequence[int] = (),
    min_tokens: int = 0,
    allowed: Sequence[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    bias: dict[int, float] | None = None,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> list[float]:
    """The logits that temperature is applied to."""
    made = []
    for token, value in enumerate(logits):
        bad = any(token == word[-1] and [*output, token][-len(word) :] == list(word) for word in bad_words)
        early = token in end_ids and len(output) < min_tokens
        if bad or early or (allowed is not None and token not in allowed):
            value = -INF
        value += (bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * output.count(token) + (presence if token in output else 0.0)
        made.append(value)
    return made
