"""How probable a model finds a text: windows over its tokens, and the sum of what they say."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagedkv.api.errors import RequestInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The tokens [start, end) of a text; those from `first` on are scored in it.

    |--- context, scored in an earlier window ---|--- scored here ---|
    start                                        first               end
    """

    start: int
    first: int
    end: int


@dataclass(slots=True, kw_only=True)
class Score:
    """A text's score. `logprobs` has the natural logarithm of each token's probability, None for the first.

    A token that a later window scores has the last `context` - `stride` tokens at least before it.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    context: int
    stride: int
    windows: int

    @property
    def tokens(self) -> int:
        """How many tokens were scored: all but the first."""
        return len(self.token_ids) - 1

    @property
    def logprob(self) -> float:
        """The sum of `logprobs`."""
        return math.fsum(value for value in self.logprobs if value is not None)

    @property
    def perplexity(self) -> float:
        """exp(-logprob / tokens); infinite where that is no float."""
        try:
            return math.exp(-self.logprob / self.tokens)
        except OverflowError:
            return math.inf


def window_sizes(context: int | None, stride: int | None, longest: int) -> tuple[int, int]:
    """(context, stride): what was given, else the longest context there is, and half of it. Raises `RequestInvalid`."""
    size = longest if context is None else context
    if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= longest:
        raise RequestInvalid(
            f"context={context!r} must be a whole number from 2 to {longest}, the longest prompt that model, cache and "
            "step hold",
            field="context",
        )
    step = max(1, size // 2) if stride is None else stride
    if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step < size:
        raise RequestInvalid(
            f"stride={stride!r} must be a whole number from 1 to {size - 1}: windows overlap by one token at least, or "
            "the first token of each would have nothing before it",
            field="stride",
        )
    return size, step


def windows(length: int, context: int, stride: int) -> list[Window]:
    """Windows of at most `context` tokens, `stride` apart, that score each of `length` tokens but the first once."""
    if length < 2:
        raise RequestInvalid("a text of one token has nothing to score: give at least two", field="prompt")
    found = [Window(start=0, first=1, end=min(context, length))]
    while found[-1].end < length:
        start = found[-1].start + stride
        found.append(Window(start=start, first=found[-1].end, end=min(start + context, length)))
    return found
