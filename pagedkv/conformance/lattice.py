"""Which combinations of declared values the numerics are checked at: every pair of values occurs in some point."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.api import Capabilities, LayerSpec, UnsupportedError
from pagedkv.core.negotiation import Requirements, accepts, negotiate

PLAIN = ("fp32", "bf16", "fp16")
"""KV dtypes that store numbers as they are; every other one is quantized and has a section of its own."""

BLOCK_SIZES = (3, 128, 32, 16, 64, 256, 1)
HEAD_DIMS = (8, 16, 32, 40, 64, 80, 96, 128, 192, 256)
GROUPS = (1, 4, 7, 8)
MOST_SIZES = 5
FEATURE_AXES = ("window", "softcap", "sinks", "alibi", "causal")
"""The axes that a feature lies behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination. `window` and `context` are relative to the block size, as (blocks, tokens more)."""

    dtype: str
    kv_dtype: str
    block_size: int
    head_dim: int
    group: int
    context: tuple[int, int]
    window: tuple[int, int] | None
    softcap: float | None
    sinks: bool
    alibi: bool
    causal: bool
    form: str

    def __str__(self) -> str:
        flags = [name for name in ("sinks", "alibi") if getattr(self, name)]
        flags += [] if self.causal else ["non_causal"]
        flags += ["softcap"] if self.softcap else []
        flags += [f"window{self.tokens(self.window)}"] if self.window else []
        size = f"b{self.block_size}-d{self.head_dim}-g{self.group}-c{self.tokens(self.context)}"
        return "-".join([self.dtype, self.kv_dtype, size, *flags, self.form])

    def tokens(self, relative: tuple[int, int]) -> int:
        """A length given in blocks and tokens, in tokens: at least 1."""
        return max(1, relative[0] * self.block_size + relative[1])

    def layer(self, index: int = 0, kv_heads: int = 2) -> LayerSpec:
        """A layer of this kind."""
        return LayerSpec(
            index=index,
            q_heads=kv_heads * self.group,
            kv_heads=kv_heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            causal=self.causal,
            window=None if self.window is None else self.tokens(self.window),
            softcap=self.softcap,
            sinks=self.sinks,
            alibi=self.alibi,
        )


def sizes(alternatives: Iterable[Any], usual: Sequence[int], preferred: Iterable[int] = ()) -> list[int]:
    """At most `MOST_SIZES` accepted sizes: the preferred ones, the least of what is declared, then usual ones."""
    least: list[int] = []
    for one in alternatives:
        least += sorted(one)[:2] if isinstance(one, (set, frozenset)) else [max(one[0], -(-one[1] // one[0]) * one[0])]
    wanted = dict.fromkeys([*preferred, *least, *usual])
    return [size for size in wanted if accepts(alternatives, size) and size <= max(usual)][:MOST_SIZES]


def axes(can: Capabilities) -> dict[str, list[Any]]:
    """Field of a point -> the values to combine, from what is declared."""

    def with_feature(feature: str, plain: Any, *others: Any) -> list[Any]:
        return [plain, *others] if feature in can.features else [plain]

    most = can.max_group or max(GROUPS)
    return {
        "dtype": [d for d in can.dtypes if d in PLAIN],
        "kv_dtype": [d for d in can.kv_dtypes if d in PLAIN],
        "block_size": sizes(can.block_sizes, BLOCK_SIZES, [can.preferred_block_size]),
        "head_dim": sizes(can.head_dims, HEAD_DIMS, [64, 80, 128]),
        "group": [g for g in GROUPS if g <= most],
        "context": [(1, -1), (1, 0), (1, 1), (3, 2)],
        "window": with_feature("window", None, (0, 1), (1, 0), (1, 1), (9, 0)),
        "softcap": with_feature("softcap", None, 2.0),
        "sinks": with_feature("sinks", False, True),
        "alibi": with_feature("alibi", False, True),
        "causal": with_feature("non_causal", True, False),
        "form": ["decode", "prefill", "chunk", "mixed"],
    }


def points(can: Capabilities, seed: int = 0) -> list[Point]:
    """Points that hold every pair of values which the capabilities do not exclude; the same ones at every call."""
    cover, rng = _Cover(can), np.random.default_rng(seed)
    pairs = cover.pairs()
    chosen: list[Point] = []
    for pair in sorted(pairs):
        if pair in pairs:
            greedy = _fill(pair, cover.counts, pairs, rng)
            picks = next(filter(cover.accepts, itertools.chain([greedy], cover.around(pair))), None)
            if picks is not None:
                chosen.append(cover.point(picks))
                pairs -= set(itertools.combinations(sorted(picks.items()), 2))
            pairs.discard(pair)
    return chosen


class _Cover:
    """The axes by number: picks are axis -> number of its value, pairs are two (axis, value)."""

    def __init__(self, can: Capabilities) -> None:
        self._can, self._values = can, axes(can)
        self._names = list(self._values)
        self.counts = [len(values) for values in self._values.values()]
        named = {key for pattern, _ in can.exclusions for key in pattern}
        looked_at = {*named, *(FEATURE_AXES if "feature" in named else ())}
        self._seen = [i for i, name in enumerate(self._names) if name in looked_at]
        self._verdicts: dict[tuple[int, ...], bool] = {}

    def pairs(self) -> set[Any]:
        """Every pair of values of two axes."""
        numbered = [[(axis, value) for value in range(count)] for axis, count in enumerate(self.counts)]
        return {pair for a, b in itertools.combinations(numbered, 2) for pair in itertools.product(a, b)}

    def point(self, picks: Mapping[int, int]) -> Point:
        return Point(**{name: self._values[name][picks[axis]] for axis, name in enumerate(self._names)})

    def accepts(self, picks: Mapping[int, int]) -> bool:
        """Whether no exclusion speaks against these picks: it can look at some axes only."""
        key = tuple(picks[axis] for axis in self._seen)
        if key not in self._verdicts:
            self._verdicts[key] = allowed(self._can, self.point(picks))
        return self._verdicts[key]

    def around(self, pair: Any) -> Iterator[dict[int, int]]:
        """Picks with this pair in them, all that differ in what an exclusion looks at, the plainest first."""
        plain = {**dict.fromkeys(range(len(self.counts)), 0), **dict(pair)}
        free = [axis for axis in self._seen if axis not in dict(pair)]
        for values in itertools.product(*(range(self.counts[axis]) for axis in free)):
            yield {**plain, **dict(zip(free, values, strict=True))}


def _fill(pair: Any, counts: Sequence[int], open_pairs: set[Any], rng: np.random.Generator) -> dict[int, int]:
    """Axis -> value with this pair in it; every other axis takes the value that closes most open pairs."""
    picks: dict[int, int] = dict(pair)
    for axis in rng.permutation([axis for axis in range(len(counts)) if axis not in picks]):
        order = rng.permutation(counts[axis])
        picks[int(axis)] = int(max(order, key=lambda v: _closed(picks, int(axis), int(v), open_pairs)))
    return picks


def _closed(picks: Mapping[int, int], axis: int, value: int, open_pairs: set[Any]) -> int:
    mine = (axis, value)
    return sum((min(mine, other), max(mine, other)) in open_pairs for other in picks.items())


def allowed(can: Capabilities, point: Point) -> bool:
    """Whether the engine would accept this combination too: none of the exclusions speaks against it."""
    wanted = Requirements(
        layers=(point.layer(),),
        dtype=point.dtype,
        kv_dtype=point.kv_dtype,
        block_size=point.block_size,
        batch_invariant=False,
    )
    return _agreed(can, wanted)


def combines(can: Capabilities, dtype: str, kv_dtype: str) -> bool:
    """Whether both are declared and nothing excludes the two together."""
    return _agreed(can, Requirements(layers=(), dtype=dtype, kv_dtype=kv_dtype))


def _agreed(can: Capabilities, wanted: Requirements) -> bool:
    try:
        negotiate(can, wanted, backend="the backend under test")
    except UnsupportedError:
        return False
    return True
