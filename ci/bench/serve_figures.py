"""What is computed from the moments of one run, the same for a server seen by its clients and for the engine alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request. Seconds on one clock: when it was `sent`, when it `ended`, and when each piece of news came.

    `news` is empty where an answer came whole. `tokens` is how many were generated.
    """

    sent: float
    ended: float
    news: Sequence[float]
    tokens: int


def figures(answers: Sequence[Answered]) -> dict[str, Any]:
    """Rates from the first request sent to the last one ended; percentiles over requests and over gaps between news."""
    seconds = max(each.ended for each in answers) - min(each.sent for each in answers)
    tokens = sum(each.tokens for each in answers)
    first = [each.news[0] - each.sent for each in answers if each.news]
    gaps = [after - before for each in answers for before, after in pairwise(each.news)]
    return {
        "seconds": seconds,
        "requests": len(answers),
        "requests_per_second": len(answers) / seconds,
        "output_tokens": tokens,
        "tokens_per_second": tokens / seconds,
        **_percentiles("time_to_first_token", first),
        **_percentiles("time_between_tokens", gaps),
        **_percentiles("time_of_request", [each.ended - each.sent for each in answers]),
    }


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{share}": float(np.percentile(values, share)) if values else None for share in (50, 99)}
