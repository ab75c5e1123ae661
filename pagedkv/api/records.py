"""The records of the contract: what the core tells a backend, and what a backend tells the core.

A field whose metadata names a feature is *gated*: the core sends a value other than its default only to a backend that
declared that feature (law G1). `needs(record)` lists the features a record uses. A record that a backend builds is
built with `Record.of(**fields)`, which drops and reports fields this core does not know yet (law G3).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

_log = logging.getLogger("pagedkv.api")

Self = TypeVar("Self", bound="Record")
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Sizes = frozenset[int] | tuple[int, int, int]
"""Accepted sizes: a set of values, or (multiple_of, min, max), both ends included."""


def gated(feature: str, default: Any) -> Any:
    """A dataclass field that only a backend declaring `feature` ever sees with another value than `default`."""
    return field(default=default, metadata={"feature": feature})


class Record:
    """Base of the contract's records."""

    __slots__ = ()

    @classmethod
    def of(cls: type[Self], **fields: Any) -> Self:
        """Build the record, dropping (and reporting) fields that this version of the core does not know."""
        known = {f.name for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
        unknown = sorted(fields.keys() - known)
        if unknown:
            _log.info("%s: this core does not know %s; ignored", cls.__name__, ", ".join(unknown))
        return cls(**{name: value for name, value in fields.items() if name in known})


def needs(record: Record) -> tuple[str, ...]:
    """The features that `record` uses, sorted: each gated field that is off its default, records inside included."""
    return tuple(sorted(set(_needs(record))))


def _needs(record: Record) -> Iterator[str]:
    for f in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, f.name)
        feature = f.metadata.get("feature")
        if feature is not None and value is not f.default and not _equal(value, f.default):
            yield feature
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Record):
                yield from _needs(item)


def _equal(value: Any, default: Any) -> bool:
    return not isinstance(value, np.ndarray) and bool(value == default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option(Record):
    """One option of a backend, given as `backend_options={"name": value}`."""

    name: str
    type: type
    default: Any
    help: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class World(Record):
    """This process among the workers of one engine. `rendezvous`: where they meet, "tcp://host:port"; "" when alone."""

    rank: int = 0
    size: int = 1
    rendezvous: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo(Record):
    """One device as `Descriptor.probe` sees it, without opening it.

    `index` is what `create` takes, counted after the vendor's visible-devices variable. `total` and `free` are bytes,
    None when unknown. `score`: 0 unusable, 10 portable, 50 generic, 80 native; `reason` says why.
    """

    index: int
    kind: str
    total: int | None = None
    free: int | None = None
    unified: bool = False
    score: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo(Record):
    """Bytes of the memory that the cache lives in; None is unknown. `unified`: it is the host's own memory.

    `allocated`: of this process's tensors now; `peak`: the most there were since `reset_peak`. The process counts both
    itself, whatever others take and give meanwhile.
    """

    free: int | None = None
    total: int | None = None
    reclaimable: int | None = 0
    unified: bool = False
    allocated: int | None = None
    peak: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec(Record):
    """One attention layer. Head counts are this rank's. Query head h reads KV head floor(h * kv_heads / q_heads)."""

    index: int
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    kind: str = "mha"
    causal: bool = gated("non_causal", True)
    window: int | None = gated("window", None)
    softcap: float | None = gated("softcap", None)
    sinks: bool = gated("sinks", False)
    alibi: bool = gated("alibi", False)
    kv_of: int | None = gated("kv_sharing", None)
    kv_head_first: int = 0
    kv_heads_total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec(Record):
    """Layers that share one block table. A block of the group holds `block_size` tokens of each of its layers.

    `kv_dtype` with a slash is quantized, codes of a byte, then whose float32 scale s they have; x / s is rounded to the
    nearest code, ties to even, at most the largest, and read as code * s. "int8/token_head": -127..127, s = max|x| /
    127 of each token and KV head (1 where it is 0), made at append, in the block. "fp8_e4m3fn/tensor" (at most 448) and
    "fp8_e5m2/tensor" (at most 57344): s by `bind`, 1 before. NaN is read as what is not finite.
    """

    layers: tuple[LayerSpec, ...]
    block_size: int
    kv_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Record):
    """The most that one plan will ever hold, and how many plans of a group are alive at once."""

    rows: int
    tokens: int
    context: int
    plans: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec(Record):
    """What to allocate. `dtype` is that of q, k, v and out; `features` is what negotiation chose, to be obeyed."""

    groups: tuple[GroupSpec, ...]
    num_blocks: int
    dtype: str
    limits: Limits
    placement: str = "device"
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCost(Record):
    """Bytes that a pool takes: `fixed + num_blocks * per_block`, everything included."""

    per_block: int
    fixed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch(Record):
    """One step's queries of one group. Host numpy arrays, int32 unless said; the core may overwrite them after `plan`.

        row i:  query tokens  cu_q[i] .. cu_q[i+1]     of table row  rows[i]
                ctx_len[i] counts the keys that exist once this step's are written

    cu_q [S+1], ctx_len [S], rows [S] with S >= num_seqs: rows beyond are padding (no query, context 0).
    block_table [R, W]: any row stride, row 0 all zeros; an entry that no visible key needs is 0 or a block still owned.
    slots [A] int64: where row j of k and v goes, slot = block * block_size + offset; -1 is not written.
    The first `num_decode` rows have 1..decode_q query tokens each.
    """

    num_seqs: int
    num_tokens: int
    cu_q: Int32
    ctx_len: Int32
    block_table: Int32
    rows: Int32
    slots: Int64 | None = None
    max_q: int
    max_ctx: int
    num_decode: int = 0
    decode_q: int = gated("multi_token_decode", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec(Record):
    """What an op will be asked to compute: `dims` and `attributes` as its reference in `pagedkv.ops` names them."""

    dtype: str
    dims: Mapping[str, int] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities(Record):
    """All that a backend instance does; whatever is not declared here is refused by the core, never tried.

    `dtypes` of q, k, v, out ("fp32", "bf16", "fp16"), the preferred first; `native_dtypes` are those at full speed,
    among which `dtype="auto"` chooses (empty: all). `kv_dtypes` also as "int8/token_head", "fp8_e4m3fn/tensor" and
    "fp8_e5m2/tensor", see `GroupSpec`; "auto" never chooses one of these.
    `graph_default`: whether decode steps are recorded unless the user says; `graph_context`: up to which context then.
    `block_sizes` and `head_dims` are alternatives: a size is accepted if one of them accepts it.
    `exclusions` are (pattern, reason): a combination of declared values that does not work after all. A pattern maps a
    requirement ("dtype", "kv_dtype", "block_size", "head_dim", "group", "feature") to a value, a set, or a range.
    """

    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    block_sizes: tuple[Sizes, ...]
    head_dims: tuple[Sizes, ...]
    preferred_block_size: int
    native_dtypes: tuple[str, ...] = ()
    max_group: int | None = None
    kinds: frozenset[str] = frozenset({"mha"})
    features: frozenset[str] = frozenset()
    placements: frozenset[str] = frozenset({"device"})
    execution: Literal["layer", "model"] | str = "layer"
    extensions: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    graph: Literal["none", "decode", "uniform", "any"] | str = "none"
    max_graphs: int | None = None
    graph_default: bool = True
    graph_context: int | None = None
    async_copy: bool = False
    collectives: frozenset[str] = frozenset()
    weight_formats: frozenset[str] = frozenset()
    exclusions: tuple[tuple[Mapping[str, Any], str], ...] = ()
