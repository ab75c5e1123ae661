"""Answers that keep to a JSON schema, a regular expression, a list of choices or a grammar, through llguidance.

    GuidedDecodingParams   what was asked for, checked, and as a grammar in llguidance's own form
    Grammars, Grammar      that grammar over one engine's tokens, compiled once
    Guide                  where one row is in it: which tokens may come next

Nothing is compiled while steps run: a grammar is refused when its parameters are made, or when the request is prepared.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from pagedkv.api.errors import RequestInvalid

_log = logging.getLogger("pagedkv.sampling")
_T = TypeVar("_T")

FIELD = "guided_decoding"
MAX_TEXT = 2**17
"""Characters of a schema, expression, list or grammar; what is longer takes seconds to compile."""
MAX_CONJUNCTS = 8
"""Expressions that one string may have to match together: time doubles with each, whatever the limits below."""
MAX_PATTERN_PROPERTIES = 64
"""Patterns for property names in one schema: each is compared with each."""

_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,  # 10 ms to compile; the others are for one step: 14 ms, 1 ms
    step_lexer_fuel=200_000,
    step_max_items=10_000,
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=20_000,
    verbose_errors=False,
)
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')  # texts and expressions in Lark
_STACK = 2**28  # bytes, of which only what is used exists
_KEPT = 64  # grammars, of each kind of cache
_SPACE = r"[\x20\x0A\x0D\x09]{0,64}"
"""Between the parts of a JSON text. With a bound, as some models write nothing else once they have begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecodingParams:
    """What an answer keeps to: exactly one of the following.

    `json` is a JSON schema, as a mapping, as text, or as a class with `model_json_schema` (pydantic). `regex` is an
    expression of Rust's `regex` crate that the whole answer matches. `choice` lists whole answers. `grammar` is a
    grammar in llguidance's variant of Lark, or in llama.cpp's GBNF. `json_object` asks for any JSON object.

    `llguidance` is the same as a grammar in llguidance's own form. Raises `RequestInvalid` with llguidance's reason.
    """

    json: Any = None
    regex: str | None = None
    choice: Any = None
    grammar: str | None = None
    json_object: bool = False
    llguidance: str = field(init=False, repr=False, compare=False, default="")

    def __new__(cls, *args: Any, **given: Any) -> GuidedDecodingParams:
        """Refuse unknown names before the generated `__init__` sees them."""
        unknown = [name for name in given if name not in _KINDS]
        if args or unknown:
            what = f"has no setting {', '.join(map(repr, unknown))}" if unknown else "takes named settings only"
            raise _invalid(f"{what}; known are {', '.join(_KINDS)}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if f.init and getattr(self, f.name) is not f.default]
        if len(given) != 1:
            raise _invalid(f"takes exactly one of {', '.join(_KINDS)}, got {', '.join(given) or 'none'}")
        try:
            value, grammar = _KINDS[given[0]](getattr(self, given[0]))
        except (ValueError, TypeError, RecursionError) as error:
            raise _invalid(f"{given[0]} {error}") from error
        if reason := _reason(grammar):
            raise _invalid(f"{given[0]} cannot be used: {reason}")
        object.__setattr__(self, given[0], value)
        object.__setattr__(self, "llguidance", grammar)


StructuredOutputsParams = GuidedDecodingParams
"""The name that newer versions of vLLM use."""


def guided_params(value: Any) -> GuidedDecodingParams | None:
    """`value`, which may be a mapping of its settings. Raises `RequestInvalid`."""
    if value is None or isinstance(value, GuidedDecodingParams):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _invalid(f"must be GuidedDecodingParams or a mapping of its settings, got {value!r}")
    return GuidedDecodingParams(**value)


def _invalid(reason: str) -> RequestInvalid:
    return RequestInvalid(f"{FIELD} {reason}", field=FIELD)


# -- from settings to a grammar ----------------------------------------------------------------------------------------


def _json(value: Any) -> tuple[str, str]:
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    schema = json.loads(_text(value)) if isinstance(value, str) else value
    if not isinstance(schema, Mapping):
        raise ValueError(f"must be a JSON schema, an object, got {type(schema).__name__}")
    text = _text(json.dumps(dict(schema), allow_nan=False, ensure_ascii=False))
    _refuse_explosive(schema)
    # Beside it, whitespace_flexible in the schema itself would count for nothing.
    bounded = "whitespace" not in json.dumps(schema.get("x-guidance", ""))
    return text, LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _SPACE} if bounded else None)


def _json_object(value: Any) -> tuple[bool, str]:
    if value is not True:
        raise ValueError(f"must be True or False, got {value!r}")
    return True, _json({"type": "object"})[1]


def _regex(value: Any) -> tuple[str, str]:
    return _text(value), LLMatcher.grammar_from_regex(value)


def _choice(value: Any) -> tuple[tuple[str, ...], str]:
    """One terminal: as a rule with so many branches it would take llguidance seconds."""
    choices = () if isinstance(value, str) else tuple(value)
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"must be a list of at least one text, got {value!r}")
    branches = " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))
    return choices, LLMatcher.grammar_from_lark(_text(f"start: CHOICE\nCHOICE: {branches}"))


def _grammar(value: Any) -> tuple[str, str]:
    plain = _QUOTED.sub(lambda found: " " * len(found[0]), _text(value))
    if plain.count("&") >= MAX_CONJUNCTS:
        raise ValueError(f"combines more than {MAX_CONJUNCTS} expressions with &: write fewer")
    for embedded in re.finditer(r"%json\s*", plain):
        _refuse_explosive(json.JSONDecoder().raw_decode(value, embedded.end())[0])
    return value, grammar_from("grammar", value)


_KINDS: Mapping[str, Callable[[Any], tuple[Any, str]]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}
"""Setting -> its plain form, and the grammar; raises ValueError, TypeError or RecursionError."""


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a text that is not empty, got {value!r}")
    if len(value) > MAX_TEXT:
        raise ValueError(f"has {len(value)} characters, more than {MAX_TEXT}: make it shorter")
    value.encode("utf-8")  # a lone surrogate is a ValueError
    return value


# -- what llguidance's limits do not stop ------------------------------------------------------------------------------

_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator")
)
_BESIDE = frozenset(("$schema", "$id", "$comment", "$defs", "definitions", "x-guidance"))
_MERGED = ("allOf", "anyOf", "oneOf", "$ref")


def _refuse_explosive(schema: Any) -> None:
    """Raise ValueError where strings might have to match many expressions together.

    llguidance 1.9.1 takes 2**n steps for n of them without counting one. Only subschemas that are merged put more than
    one on a string; which ones come together is not worked out.
    """
    nodes = list(_objects(schema))
    names = sum(len(node["patternProperties"]) for node in nodes if isinstance(node.get("patternProperties"), Mapping))
    if names > MAX_PATTERN_PROPERTIES:
        raise ValueError(f"has {names} patternProperties, more than {MAX_PATTERN_PROPERTIES}: write fewer")
    expressions = {(key, repr(node[key])) for node in nodes for key in ("pattern", "format") if key in node}
    if len(expressions) > MAX_CONJUNCTS and any(map(_merges, nodes)):
        raise ValueError(
            f"merges subschemas (allOf, or {', '.join(_MERGED[1:])} beside other keys) and has {len(expressions)} "
            f"different patterns and formats; with merging, {MAX_CONJUNCTS} at most: write the merged schema out"
        )


def _merges(node: Mapping[str, Any]) -> bool:
    """Whether the schema's parts hold together for one value; one part with annotations beside it is just that part."""
    said = node.keys() - _ANNOTATIONS - _BESIDE
    alone = len(said) == 1 and (said != {"allOf"} or len(node["allOf"]) == 1)
    return not alone and any(key in said for key in _MERGED)


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in a JSON value."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            yield value
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value


_stack = threading.Lock()


def _deep(work: Callable[[], _T]) -> _T:
    """`work()` in a thread with a large stack.

    llguidance follows references by recursion: a chain of a thousand, 20 kB of schema, would overflow a stack of the
    usual 8 MB, which ends the process.
    """
    with ThreadPoolExecutor(1) as pool:
        with _stack:  # the size is the process's: it holds for the threads that are made now
            before = threading.stack_size(_STACK)
            try:
                done = pool.submit(work)
            finally:
                threading.stack_size(before)
        return done.result()


@functools.lru_cache(_KEPT)
def _reason(grammar: str) -> str:
    """Why llguidance refuses `grammar`, as far as can be said without a tokenizer; empty if it does not."""
    wrong, messages = _deep(lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS))
    return _short(messages[0]) if wrong else ""


def _short(message: str) -> str:
    """llguidance's reason: without its state, and of long lines the beginning."""
    lines = message.replace("<non-verbose/>", "").strip().splitlines()
    return "\n".join(line[:200] for line in lines[:8])


# -- over an engine's tokens -------------------------------------------------------------------------------------------


class Grammars:
    """Grammars over the tokens of one engine; the last `_KEPT` stay compiled. Thread-safe."""

    def __init__(self, tokenizer_json: Callable[[], str], tokenizer_size: int, vocab_size: int, end_ids: Sequence[int]):
        """`tokenizer_json` gives tokenizer.json as text, asked for at the first grammar.

        `end_ids` may come where a grammar may end, and only there. `vocab_size` is that of the logits.
        """
        self._tokenizer_json, self._tokenizer_size = tokenizer_json, tokenizer_size
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self.compiled = functools.lru_cache(_KEPT)(self._compile)

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        size = max(self._tokenizer_size, self._vocab_size)  # either may know ids that the other does not
        return LLTokenizer(self._tokenizer_json(), n_vocab=size, eos_token=self._end_ids)

    @functools.cached_property
    def _tokens(self) -> _Tokens:
        spoken = [token for token in self._end_ids if not self._tokenizer.is_special_token(token)]
        return _Tokens(size=self._tokenizer.vocab_size, vocab_size=self._vocab_size, spoken_ends=spoken)

    def _compile(self, params: GuidedDecodingParams) -> Grammar:
        """The grammar of `params`. Raises `RequestInvalid`."""
        if not self._end_ids:
            raise _invalid("needs an end token, and the model names none: add eos_token_id to its config.json")
        try:
            matcher = _deep(lambda: LLMatcher(self._tokenizer, params.llguidance, log_level=0, limits=_LIMITS))
        except ValueError as error:
            raise _invalid(f"is not possible with this model: llguidance cannot use its tokenizer: {error}") from error
        matcher.compute_bitmask()  # what the first token needs is then there in every copy
        if matcher.is_error():
            raise _invalid(f"cannot be used: {_short(matcher.get_error())}")
        for warning in matcher.get_grammar_warnings():
            _log.warning("%s: %s", FIELD, _short(warning))
        return Grammar(matcher, self._tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tokens:
    """An engine's tokens: how many llguidance knows, how many logits there are.

    `spoken_ends` are end ids that llguidance takes for text too. Inside the form they would end the answer there.
    """

    size: int
    vocab_size: int
    spoken_ends: Sequence[int]


class Grammar:
    """One grammar over one engine's tokens."""

    def __init__(self, matcher: LLMatcher, tokens: _Tokens) -> None:
        self._matcher = matcher
        self._tokens = tokens

    def start(self, output: Sequence[int]) -> Guide:
        """A place in it, after the tokens `output`."""
        return Guide(self._matcher.deep_copy(), self._tokens, output)


class Guide:
    """Where one row is in its grammar. Once llguidance gives up, no token may come and `trouble` says why."""

    def __init__(self, matcher: LLMatcher, tokens: _Tokens, output: Sequence[int]) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._words = allocate_token_bitmask(1, tokens.size)
        self._bits: npt.NDArray[np.uint8] = self._words.view(np.uint8)[0]
        self._matcher.consume_tokens(list(output))

    @property
    def trouble(self) -> str:
        """llguidance's reason for giving up, empty while it has not."""
        return _short(self._matcher.get_error())

    def append(self, token: int) -> None:
        """The output goes on with `token`."""
        self._matcher.consume_token(token)

    def allowed(self) -> npt.NDArray[np.uint8]:
        """Which ids may come next, one bit each, the lowest of a byte first: [V / 8, rounded up]."""
        fill_next_token_bitmask(self._matcher, self._words)
        if self._matcher.is_error():
            self._bits[:] = 0  # llguidance would allow the end
        elif self._tokens.spoken_ends and not self._matcher.is_accepting():
            for token in self._tokens.spoken_ends:
                self._bits[token >> 3] &= ~(1 << (token & 7)) & 0xFF
        return self._bits[: -(-self._tokens.vocab_size // 8)]
