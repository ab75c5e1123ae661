"""What a user asks of one request's sampling, under the names that users of such engines know."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from pagedkv.api.errors import ConfigError, RequestInvalid

GREEDY_BELOW = 1e-5
"""Temperatures under this one mean greedy: the most probable token, nothing divided."""

_OFF: tuple[Any, ...] = (None, (), [], {}, "")
_NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (None, 1),
    "presence_penalty": (0.0, 0),
    "frequency_penalty": (0.0, 0),
    "repetition_penalty": (1.0, 1),
    "logit_bias": _OFF,
    "allowed_token_ids": (None,),
    "bad_words": _OFF,
    "stop": _OFF,
    "include_stop_str_in_output": (False,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": _OFF,
    "truncate_prompt_tokens": (None,),
    "guided_decoding": (None,),
}
"""Known names without an implementation, with the values that ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Number:
    """The accepted range of one numeric field, both ends included."""

    low: float
    high: float = math.inf
    integer: bool = True
    optional: bool = False
    accepted: str

    def normal(self, value: Any) -> Any:
        """`value` as a plain int, float or None; raises ValueError outside the range."""
        if value is None and self.optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral if self.integer else Real):
            raise ValueError
        number: float = int(value) if isinstance(value, Integral) and self.integer else float(value)
        if not (self.low <= number <= self.high) or number in (math.inf, -math.inf):
            raise ValueError
        return number


_NUMBERS: Mapping[str, _Number] = {
    "temperature": _Number(low=0, integer=False, accepted="a finite number of at least 0 (0 is greedy)"),
    "top_p": _Number(low=0, high=1, integer=False, accepted="a number from 0 to 1 (0 is greedy, 1 is off)"),
    "top_k": _Number(low=-1, accepted="an integer of at least -1 (0 or -1 is off)"),
    "min_p": _Number(low=0, high=1, integer=False, accepted="a number from 0 to 1 (0 is off)"),
    "seed": _Number(
        low=-(2**63), high=2**63 - 1, optional=True, accepted="an integer from -2**63 to 2**63 - 1, or None"
    ),
    "max_tokens": _Number(
        low=1, optional=True, accepted="an integer of at least 1, or None for the model's limit (0 is not built yet)"
    ),
    "min_tokens": _Number(low=0, accepted="an integer of at least 0"),
}
_SWITCHES = ("ignore_eos", "skip_special_tokens", "detokenize")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when it ends.

    `temperature` below 1e-5 is greedy. `top_p` 0 is accepted as its limit, the most probable token, since clients of
    the OpenAI API send it for "deterministic". `top_k` 0 or -1 is off. `max_tokens` None runs to the model's limit.
    Raises `RequestInvalid` with every wrong field and the accepted ranges, `ConfigError` for an unknown name (with the
    nearest known one) and for a known one that is not built yet and is off its neutral value.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    stop: Any = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    spaces_between_special_tokens: bool = True
    logits_processors: Any = None
    truncate_prompt_tokens: int | None = None
    guided_decoding: Any = None

    def __new__(cls, *args: Any, **fields: Any) -> SamplingParams:
        """Refuse unknown names before the generated `__init__` sees them: its TypeError would suggest nothing."""
        if args:
            raise ConfigError("SamplingParams takes named settings only: write SamplingParams(temperature=0.8, ...)")
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = [name for name in fields if name not in known]
        if unknown:
            raise ConfigError("; ".join(_unknown(name, known) for name in unknown))
        return object.__new__(cls)  # super() without arguments does not survive the class made anew for its slots

    def __post_init__(self) -> None:
        not_built = list(self._refuse_not_built())
        if not_built:
            raise ConfigError("; ".join(not_built))
        reasons = dict(self._normalize())
        if not reasons:
            reasons = dict(self._contradictions())
        if reasons:
            raise RequestInvalid("; ".join(reasons.values()), field=next(iter(reasons)))

    @property
    def greedy(self) -> bool:
        """Whether every draw is the most probable token, so that nothing is random."""
        return self.temperature < GREEDY_BELOW or self.top_p == 0 or self.top_k == 1

    def check_ids(self, vocab_size: int) -> None:
        """Raise `RequestInvalid` if a token id lies outside the vocabulary."""
        outside = [i for i in self.stop_token_ids if i >= vocab_size]
        if outside:
            message = f"stop_token_ids must be ids from 0 to {vocab_size - 1}, got {outside}"
            raise RequestInvalid(message, field="stop_token_ids")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _refuse_not_built(self) -> Iterator[str]:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name, neutral in _NOT_BUILT.items():
            value = getattr(self, name)
            if any(type(value) is type(item) and value == item for item in neutral):
                self._set(name, defaults[name])
            else:
                yield f"{name} is not built yet: leave it out or at {defaults[name]!r}, got {value!r}"

    def _normalize(self) -> Iterator[tuple[str, str]]:
        """Bring every field to its plain type; yield (field, reason) for each one that is wrong."""
        for name, number in _NUMBERS.items():
            try:
                self._set(name, number.normal(getattr(self, name)))
            except (ValueError, OverflowError):
                yield name, f"{name} must be {number.accepted}, got {getattr(self, name)!r}"
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                yield name, f"{name} must be True or False, got {getattr(self, name)!r}"
        try:
            self._set("stop_token_ids", _ids(self.stop_token_ids))
        except ValueError:
            accepted = "a list of token ids, integers of at least 0"
            yield "stop_token_ids", f"stop_token_ids must be {accepted}, got {self.stop_token_ids!r}"

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            yield "min_tokens", f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping):
        raise ValueError
    try:
        items = tuple(value)
    except TypeError as error:
        raise ValueError from error
    if any(isinstance(i, bool) or not isinstance(i, Integral) or i < 0 for i in items):
        raise ValueError
    return tuple(int(i) for i in items)


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return f"SamplingParams has no setting {name!r}; {hint}"
