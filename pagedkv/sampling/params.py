"""What a user asks of one request's sampling, under the names that users of such engines know."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from pagedkv.api.errors import ConfigError, RequestInvalid
from pagedkv.sampling.guided import GuidedDecodingParams, guided_params

GREEDY_BELOW = 1e-5
"""Temperatures under this one mean greedy: the most probable token, nothing divided."""

_OFF: tuple[Any, ...] = (None, (), [], {}, "")
_NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "spaces_between_special_tokens": (True,),
    "logits_processors": _OFF,
    "truncate_prompt_tokens": (None,),
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
        low=0,
        optional=True,
        accepted="an integer of at least 1, None for the model's limit, or 0 with prompt_logprobs to score the prompt",
    ),
    "min_tokens": _Number(low=0, accepted="an integer of at least 0"),
    "n": _Number(low=1, high=16_384, accepted="an integer from 1 to 16384"),
    "repetition_penalty": _Number(
        low=math.ulp(0), integer=False, accepted="a finite number above 0 (1 is off, more repeats less)"
    ),
    "presence_penalty": _Number(low=-2, high=2, integer=False, accepted="a number from -2 to 2 (0 is off)"),
    "frequency_penalty": _Number(low=-2, high=2, integer=False, accepted="a number from -2 to 2 (0 is off)"),
    "logprobs": _Number(low=-1, optional=True, accepted="an integer of at least 0, -1 for all, or None for none"),
    "prompt_logprobs": _Number(
        low=-1, optional=True, accepted="an integer of at least 0, -1 for all, or None for none"
    ),
}
_SWITCHES = ("ignore_eos", "skip_special_tokens", "detokenize", "include_stop_str_in_output")
_BIAS = _Number(low=-100, high=100, integer=False, accepted="")


_CONTRADICTIONS: Sequence[tuple[tuple[str, ...], Callable[[Any], bool], str]] = (
    (
        ("min_tokens", "max_tokens"),
        lambda p: p.max_tokens is not None and p.min_tokens > p.max_tokens,
        "min_tokens ({p.min_tokens}) must not exceed max_tokens ({p.max_tokens})",
    ),
    (
        ("max_tokens", "prompt_logprobs"),
        lambda p: p.max_tokens == 0 and p.prompt_logprobs is None,
        "max_tokens=0 only scores the prompt, which prompt_logprobs asks for: give both, or at least 1 token",
    ),
    (
        ("n", "max_tokens"),
        lambda p: p.n > 1 and p.max_tokens == 0,
        "n={p.n} answers need tokens, and max_tokens=0 allows none: leave n at 1, or raise max_tokens",
    ),
    (
        ("n", "temperature", "top_p", "top_k"),
        lambda p: p.n > 1 and p.greedy,
        "n={p.n} greedy answers would all be the same: leave n at 1, or ask for randomness with temperature",
    ),
    (
        ("stop", "detokenize"),
        lambda p: p.stop and not p.detokenize,
        "stop looks for text, and detokenize=False makes none: leave one of them out, or use stop_token_ids",
    ),
    (
        ("guided_decoding", "ignore_eos"),
        lambda p: p.guided_decoding is not None and p.ignore_eos,
        "guided_decoding ends an answer where its grammar ends, which ignore_eos forbids: leave one of them out",
    ),
)
"""Fields that cannot all be as they are, when, and the reason, which stands under the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when it ends.

    `temperature` below 1e-5 is greedy. `top_p` 0 is accepted as its limit, the most probable token, since clients of
    the OpenAI API send it for "deterministic". `top_k` 0 or -1 is off. `max_tokens` None runs to the model's limit; 0
    only scores the prompt. Until there are `min_tokens` tokens no end id is drawn and no stop string counts.

    `repetition_penalty` counts prompt and output, `presence_penalty` and `frequency_penalty` the output only.
    `logit_bias` maps ids, or numerals, to -100 .. 100. `bad_words` are texts, or token ids, that the output never
    completes, with a space before them neither. `stop` is a text or several; the answer ends before the first that it
    completes, or after it with `include_stop_str_in_output`. `n` answers share the prompt's blocks. `logprobs` and
    `prompt_logprobs` ask for so many of the most probable tokens beside each token of the answer, or of the prompt.
    `guided_decoding`, or `structured_outputs`, is a `GuidedDecodingParams` or a mapping of its settings.

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
    logit_bias: Any = ()
    allowed_token_ids: Any = None
    bad_words: Any = ()
    stop: Any = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    spaces_between_special_tokens: bool = True
    logits_processors: Any = None
    truncate_prompt_tokens: int | None = None
    guided_decoding: GuidedDecodingParams | Any = None
    structured_outputs: Any = None

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
        for fields, holds, reason in _CONTRADICTIONS:
            if not reasons.keys() & set(fields) and holds(self):
                reasons[fields[0]] = reason.format(p=self)
        if reasons:
            raise RequestInvalid("; ".join(reasons.values()), field=next(iter(reasons)))

    @property
    def greedy(self) -> bool:
        """Whether every draw is the most probable token, so that nothing is random."""
        return self.temperature < GREEDY_BELOW or self.top_p == 0 or self.top_k == 1

    def check_ids(self, vocab_size: int) -> None:
        """Raise `RequestInvalid` with every field that names a token id outside the vocabulary."""
        reasons = {}
        for name, ids in self._all_ids().items():
            outside = [i for i in ids if i >= vocab_size]
            if outside:
                reasons[name] = f"{name} must be ids from 0 to {vocab_size - 1}, got {outside}"
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                reasons[name] = f"{name} must be at most the vocabulary's {vocab_size}, got {getattr(self, name)}"
        if reasons:
            raise RequestInvalid("; ".join(reasons.values()), field=next(iter(reasons)))

    def _all_ids(self) -> dict[str, list[int]]:
        return {
            "stop_token_ids": list(self.stop_token_ids),
            "logit_bias": [i for i, _ in self.logit_bias],
            "allowed_token_ids": list(self.allowed_token_ids or ()),
            "bad_words": [i for word in self.bad_words if not isinstance(word, str) for i in word],
        }

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
        for name, (normal, accepted) in _LISTS.items():
            try:
                self._set(name, normal(getattr(self, name)))
            except (ValueError, OverflowError):
                yield name, f"{name} must be {accepted}, got {getattr(self, name)!r}"
        yield from self._normalize_guided()

    def _normalize_guided(self) -> Iterator[tuple[str, str]]:
        """Under one of its two names."""
        given = [value for value in (self.guided_decoding, self.structured_outputs) if value is not None]
        if len(given) > 1:
            yield "guided_decoding", "guided_decoding and structured_outputs are two names of one setting: give one"
            return
        try:
            self._set("guided_decoding", guided_params(given[0]) if given else None)
            self._set("structured_outputs", None)
        except RequestInvalid as error:
            yield error.field, str(error)


def _several_ids(value: Any) -> tuple[int, ...] | None:
    """None, or at least one id."""
    if value is None:
        return None
    ids = _ids(value)
    if not ids:
        raise ValueError
    return tuple(dict.fromkeys(ids))


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """(id, bias) pairs by id, from a mapping whose keys may be numerals, or from such pairs."""
    pairs = value.items() if isinstance(value, Mapping) else _items(value)
    biases: dict[int, float] = {}
    for pair in pairs:
        key, bias = _items(pair)
        (token,) = _ids([int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key])
        if token in biases:
            raise ValueError
        biases[token] = _BIAS.normal(bias)
    return tuple(sorted(biases.items()))


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _items(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError
    return tuple(dict.fromkeys(texts))


def _words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Texts that are not blank, or sequences of at least one id."""
    if isinstance(value, str):
        raise ValueError
    words = [word if isinstance(word, str) else _ids(word) for word in _items(value)]
    if not all(word.strip() if isinstance(word, str) else word for word in words):
        raise ValueError
    return tuple(dict.fromkeys(words))


def _items(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    try:
        return tuple(value)
    except TypeError as error:
        raise ValueError from error


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes | Mapping):
        raise ValueError
    items = _items(value)
    if any(isinstance(i, bool) or not isinstance(i, Integral) or i < 0 for i in items):
        raise ValueError
    return tuple(int(i) for i in items)


_LISTS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "stop_token_ids": (_ids, "a list of token ids, integers of at least 0"),
    "logit_bias": (_biases, "a mapping of token ids to finite numbers from -100 to 100, each id once"),
    "allowed_token_ids": (_several_ids, "None, or a list of at least one token id, integers of at least 0"),
    "bad_words": (_words, "a list of texts that are not blank, or of lists of token ids"),
    "stop": (_texts, "a text or a list of texts, none of them empty"),
}
"""What brings each list to its plain form, and what it accepts."""


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return f"SamplingParams has no setting {name!r}; {hint}"
