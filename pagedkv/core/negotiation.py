"""What a backend and a model agree on, before any weight is read.

`negotiate` is pure: the same capabilities and requirements give the same choice, or the same reasons. A value that the
user gave is never replaced; one that was left unset takes the backend's preferred value, and a note says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedkv.api import Capabilities, LayerSpec, UnsupportedError, needs

EXECUTION = "layer"
"""How this core runs a model: it calls the backend once a layer. Any other way is unsupported (law G6)."""

USUAL_BLOCK_SIZE = 16
BATCH_INVARIANT = "batch_invariant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What a model and its user ask for. None is unset: the backend's preference decides.

    dtype: "fp32", "bf16" or "fp16" of q, k, v and out; None is auto, which looks at `checkpoint_dtype` (None when the
    file is quantized). features: required beyond what the layers need.
    """

    layers: tuple[LayerSpec, ...]
    dtype: str | None = None
    checkpoint_dtype: str | None = None
    kv_dtype: str | None = None
    block_size: int | None = None
    features: frozenset[str] = frozenset()
    batch_invariant: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was agreed. `features` are the ones in use; `notes` has one line for each unset value worth one."""

    dtype: str
    kv_dtype: str
    block_size: int
    features: frozenset[str]
    notes: tuple[str, ...] = ()


def negotiate(capabilities: Capabilities, requirements: Requirements, *, backend: str) -> Choice:
    """The choice for one group of layers. Raises `UnsupportedError` with every reason, not just the first."""
    talk = _Talk(capabilities, requirements, backend)
    dtype = talk.dtype()
    kv_dtype = talk.kv_dtype(dtype)
    block_size = talk.block_size()
    talk.check_layers()
    features = talk.features(dtype, kv_dtype, block_size)
    talk.check_exclusions({"dtype": dtype, "kv_dtype": kv_dtype, "block_size": block_size}, features)
    if talk.reasons:
        raise UnsupportedError(talk.reasons)
    return Choice(dtype=dtype, kv_dtype=kv_dtype, block_size=block_size, features=features, notes=tuple(talk.notes))


class _Talk:
    """One negotiation: its rules, and the reasons and notes they leave."""

    def __init__(self, capabilities: Capabilities, requirements: Requirements, backend: str) -> None:
        self.can, self.want, self.backend = capabilities, requirements, backend
        self.reasons: list[str] = []
        self.notes: list[str] = []

    def refuse(self, field: str, given: object, accepted: str) -> None:
        self.reasons.append(f"backend {self.backend} does not support {field}={given!r}; accepted: {accepted}")

    def dtype(self) -> str:
        """The user's; else the checkpoint's if it runs at full speed here; else the backend's first."""
        given, own = self.want.dtype, self.want.checkpoint_dtype
        if given is not None:
            if given not in self.can.dtypes:
                self.refuse("dtype", given, _listed(self.can.dtypes))
            return given
        if not self.can.dtypes:
            self.refuse("dtype", "auto", "none: it declares no dtype")
            return ""
        if own in self.can.dtypes and (not self.can.native_dtypes or own in self.can.native_dtypes):
            self.notes.append(f"dtype {own}: the checkpoint's own")
            return str(own)
        preferred = self.can.dtypes[0]
        self.notes.append(f"dtype {preferred}: {self._why_not_own(own)}, so the preferred one of {self.backend}")
        return preferred

    def _why_not_own(self, own: str | None) -> str:
        if own is None:
            return "the checkpoint has none that could be kept"
        how = "not at full speed" if own in self.can.dtypes else "not available"
        return f"the checkpoint's {own} is {how} on {self.backend}"

    def kv_dtype(self, dtype: str) -> str:
        """The user's; else that of the keys and values themselves; else the backend's first that is not quantized."""
        given, accepted = self.want.kv_dtype, self.can.kv_dtypes
        plain = [name for name in accepted if not is_quantized(name)]
        if given is not None:
            if given not in accepted:
                self.refuse("kv_dtype", given, _listed(accepted))
            return given
        if dtype in accepted or not dtype:
            return dtype
        if not plain:
            named = f"{_listed(accepted)}, quantized, if asked for by name"
            self.refuse("kv_dtype", "auto", named if accepted else "none: it declares no KV dtype")
            return dtype
        self.notes.append(f"kv_dtype {plain[0]}: {self.backend} stores no {dtype}, so its preferred one")
        return plain[0]

    def block_size(self) -> int:
        """The user's; else the backend's preferred."""
        given = self.want.block_size
        accepted = " or ".join(_sizes(sizes) for sizes in self.can.block_sizes) or "none"
        if given is None:
            preferred = self.can.preferred_block_size
            if preferred != USUAL_BLOCK_SIZE:
                self.notes.append(f"block_size {preferred}: preferred by {self.backend}")
            return preferred
        if not accepts(self.can.block_sizes, given):
            self.refuse("block_size", given, f"{accepted}; leave it unset for {self.can.preferred_block_size}")
        return given

    def check_layers(self) -> None:
        """Everything that one layer alone decides: kind, head dims, group size, how it is run."""
        if self.can.execution != EXECUTION:
            self.reasons.append(
                f"backend {self.backend} declares execution={self.can.execution!r}; this core runs {EXECUTION!r} only"
            )
        for kind, layers in _by(self.want.layers, lambda layer: [layer.kind]).items():
            if kind not in self.can.kinds:
                self.refuse(f"kind of {_layers(layers)}", kind, _listed(sorted(self.can.kinds)))
        for dim, layers in _by(self.want.layers, lambda layer: [layer.k_dim, layer.v_dim]).items():
            if not accepts(self.can.head_dims, dim):
                accepted = " or ".join(_sizes(sizes) for sizes in self.can.head_dims) or "none"
                self.refuse(f"head_dim of {_layers(layers)}", dim, accepted)
        for group, layers in _by(self.want.layers, lambda layer: [group_size(layer)]).items():
            if self.can.max_group is not None and group > self.can.max_group:
                self.refuse(f"query heads per KV head of {_layers(layers)}", group, f"at most {self.can.max_group}")

    def features(self, dtype: str, kv_dtype: str, block_size: int) -> frozenset[str]:
        """What the layers need, what is asked for, and batch invariance. An undeclared one is unsupported (G6)."""
        declared = self.can.features
        accepted = _listed(sorted(declared))
        for feature, layers in _by(self.want.layers, needs).items():
            if feature not in declared:
                self.refuse(f"feature that {_layers(layers)} needs", feature, accepted)
        for feature in sorted(self.want.features - declared):
            self.refuse("feature", feature, accepted)
        chosen = self.want.features.union(*(needs(layer) for layer in self.want.layers))
        facts = {"dtype": dtype, "kv_dtype": kv_dtype, "block_size": block_size}
        return chosen | {BATCH_INVARIANT} if self._batch_invariant(facts, chosen) else chosen

    def _batch_invariant(self, facts: Mapping[str, Any], chosen: frozenset[str]) -> bool:
        given, declared = self.want.batch_invariant, BATCH_INVARIANT in self.can.features
        if given is not None:
            if given and not declared:
                self.refuse(BATCH_INVARIANT, True, "False, or unset: it does not declare this feature")
            return given
        if not declared or facts["dtype"] != "fp32":
            return False
        on = self.excluded(facts, chosen | {BATCH_INVARIANT}) == self.excluded(facts, chosen)
        why = "by default in fp32" if on else "it cannot be combined with the other settings"
        self.notes.append(f"batch_invariant {on}: {why}")
        return on

    def check_exclusions(self, facts: Mapping[str, Any], features: frozenset[str]) -> None:
        """Combinations of declared values that do not work after all."""
        for pattern, reason in self.excluded(facts, features):
            given = ", ".join(f"{key}={_pattern(value)}" for key, value in pattern.items())
            self.reasons.append(
                f"backend {self.backend} excludes the combination {given}: {reason}; change one of them"
            )

    def excluded(self, facts: Mapping[str, Any], features: frozenset[str]) -> list[tuple[Mapping[str, Any], str]]:
        """The exclusions that hit any layer. A key unknown here speaks of what this core never asks for: no hit."""
        everyone = [_facts(layer, facts, features) for layer in self.want.layers] or [_facts(None, facts, features)]
        return [e for e in self.can.exclusions if any(_hits(e[0], layer) for layer in everyone)]


def accepts(alternatives: Iterable[Any], size: object) -> bool:
    """Whether one of the alternatives, a set or (multiple_of, min, max), accepts the size. Whole numbers from 1 on."""
    return type(size) is int and size >= 1 and any(_one_accepts(sizes, size) for sizes in alternatives)


def is_quantized(kv_dtype: str) -> bool:
    """Whether numbers are stored as codes under scales: the contract's words for these have a slash."""
    return "/" in kv_dtype


def group_size(layer: LayerSpec) -> int:
    """Query heads that read one KV head, rounded up."""
    return -(-layer.q_heads // max(1, layer.kv_heads))


def _one_accepts(sizes: Any, size: int) -> bool:
    if isinstance(sizes, (set, frozenset)):
        return size in sizes
    multiple, least, most = sizes
    return bool(least <= size <= most and size % multiple == 0)


def _facts(layer: LayerSpec | None, facts: Mapping[str, Any], features: frozenset[str]) -> dict[str, Collection[Any]]:
    """Requirement -> the values that hold for this layer."""
    known: dict[str, Collection[Any]] = {name: (value,) for name, value in facts.items()}
    if layer is None:
        return known | {"feature": features}
    # A feature that only other layers need does not concern this one; one that no layer needs concerns all.
    own = {"kind": (layer.kind,), "head_dim": (layer.k_dim, layer.v_dim), "group": (group_size(layer),)}
    return known | own | {"feature": features - _layer_features() | set(needs(layer))}


def _layer_features() -> frozenset[str]:
    fields = LayerSpec.__dataclass_fields__.values()
    return frozenset(f.metadata["feature"] for f in fields if "feature" in f.metadata)


def _hits(pattern: Mapping[str, Any], facts: Mapping[str, Collection[Any]]) -> bool:
    return all(any(_matches(wanted, value) for value in facts.get(key, ())) for key, wanted in pattern.items())


def _matches(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, (set, frozenset)):
        return value in wanted
    if isinstance(wanted, tuple):
        return isinstance(value, int) and _one_accepts(wanted, value)
    return bool(wanted == value)


def _by(layers: Sequence[LayerSpec], values: Any) -> dict[Any, list[int]]:
    """Value -> the indices of the layers that have it."""
    found: dict[Any, list[int]] = {}
    for layer in layers:
        for value in dict.fromkeys(values(layer)):
            found.setdefault(value, []).append(layer.index)
    return found


def _layers(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return f"layer {indices[0]}"
    dense = list(indices) == list(range(indices[0], indices[-1] + 1))
    return f"layers {indices[0]}-{indices[-1]}" if dense else f"layers {', '.join(map(str, indices))}"


def _listed(values: Iterable[str]) -> str:
    return ", ".join(values) or "none"


def _sizes(sizes: Any) -> str:
    if isinstance(sizes, (set, frozenset)):
        return ", ".join(str(size) for size in sorted(sizes))
    multiple, least, most = sizes
    return f"{least} to {most}" if multiple == 1 else f"multiples of {multiple} from {least} to {most}"


def _pattern(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return " or ".join(str(item) for item in sorted(value, key=str))
    return _sizes(value) if isinstance(value, tuple) else str(value)
