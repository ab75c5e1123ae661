"""How each weight of a model will be held, decided before one is read: in the blocks of its file, or as plain numbers.

A backend that declares a tensor type of GGUF in `weight_formats` multiplies blocks of that type as they lie in the
file, by the op `linear` with the attribute "format". Everything else is dequantized to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from pagedkv.api import AttentionBackend, OpSpec
from pagedkv.api.torch import DTYPES
from pagedkv.models.config import ModelConfig
from pagedkv.models.tensor_shapes import Shape, tensor_shapes
from pagedkv.ops.gguf_quants import named_type

TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

OVERHEAD = 1 / 8
"""The most that a backend's own order of blocks adds to their bytes in the file."""

NOT_QUANTIZED = "not quantized"


@dataclass(slots=True, kw_only=True)
class Tally:
    """The tensors of one type in the file, their bytes there, and why they are dequantized (None: they are not)."""

    format: str
    against: str | None
    tensors: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """What stays in its blocks, and the most bytes that all weights take.

    `packed`: tensor -> type, of those that stay; a tied head has an entry of its own, and shares the table's blocks
    where the table has one too. `twice`: the bytes of a tied table that are held once more, in a product's own layout.
    `tallies`: what the file holds, by type; empty where weights are plain numbers anyway.
    """

    nbytes: int
    packed: Mapping[str, str] = field(default_factory=dict)
    twice: int = 0
    tallies: tuple[Tally, ...] = ()

    @property
    def formats(self) -> tuple[str, ...]:
        """The types that stay packed."""
        return tuple(dict.fromkeys(self.packed.values()))


def plan_weights(
    config: ModelConfig, formats: Mapping[str, str], backend: AttentionBackend, dtype: str, against: str | None
) -> WeightPlan:
    """The plan for a checkpoint whose file has the types `formats` (tensor -> type; empty: plain numbers).

    `against`: why nothing may stay packed, None where whatever the backend has an op for does.
    """
    return _Planner(config, formats, backend, dtype, against).plan()


class _Planner:
    def __init__(
        self,
        config: ModelConfig,
        formats: Mapping[str, str],
        backend: AttentionBackend,
        dtype: str,
        against: str | None,
    ) -> None:
        self._shapes = tensor_shapes(config)
        self._tied = config.tie_word_embeddings
        self._formats = formats
        self._backend = backend
        self._dtype = dtype
        self._against = against
        self._declared = backend.capabilities().weight_formats if formats else frozenset()
        self._answers: dict[tuple[str, str, Shape], bool] = {}

    def plan(self) -> WeightPlan:
        packed = {name: kind for name, shape in self._shapes.items() if (kind := self._stays(name, shape))}
        if self._tied and (head := self._head_stays()):
            packed[HEAD] = head
        dense = sum(prod(shape) for name, shape in self._shapes.items() if name not in packed)
        twice = self._twice(packed)
        blocks = sum(self._stored(name) for name in packed if name in self._shapes)
        return WeightPlan(
            nbytes=dense * self._item + int(blocks * (1 + OVERHEAD)) + twice,
            packed=packed,
            twice=twice,
            tallies=self._tallies(packed),
        )

    @property
    def _item(self) -> int:
        return DTYPES[self._dtype].itemsize

    def _stays(self, name: str, shape: Shape) -> str | None:
        """The type that a tensor keeps: a matrix that is multiplied, or a table whose head can share it."""
        kind = self._formats.get(name)
        if kind is None or len(shape) != 2:
            return None
        if name != TABLE:
            return kind if self._has("linear", kind, shape) else None
        return kind if self._has("embedding", kind, shape) and (not self._tied or self._head_stays()) else None

    def _head_stays(self) -> str | None:
        """The type in which a tied head is multiplied, None for plain numbers."""
        kind = self._formats.get(TABLE)
        return kind if kind is not None and self._has("linear", kind, self._shapes[TABLE]) else None

    def _twice(self, packed: Mapping[str, str]) -> int:
        if not self._tied or TABLE in packed:
            return 0
        if HEAD in packed:
            return int(self._stored(TABLE) * (1 + OVERHEAD))
        n, k = self._shapes[TABLE]
        own = self._backend.op("linear", OpSpec(dtype=self._dtype, dims={"n": n, "k": k}))
        return 0 if own is None else n * k * self._item

    def _has(self, op: str, kind: str, shape: Shape) -> bool:
        """Whether the backend declares the format and has the op; it is asked once for each shape."""
        key = (op, kind, shape)
        if key not in self._answers:
            spec = format_spec(op, kind, shape, self._dtype)
            allowed = self._against is None and kind in self._declared
            self._answers[key] = allowed and self._backend.op(op, spec) is not None
        return self._answers[key]

    def _stored(self, name: str) -> int:
        return named_type(self._formats[name]).nbytes(prod(self._shapes[name]))

    def _tallies(self, packed: Mapping[str, str]) -> tuple[Tally, ...]:
        found: dict[tuple[str, str | None], Tally] = {}
        for name, kind in self._formats.items():
            why = None if name in packed else self._why(name, kind)
            tally = found.setdefault((kind, why), Tally(format=kind, against=why))
            tally.tensors += 1
            tally.nbytes += self._stored(name)
        return tuple(sorted(found.values(), key=lambda tally: -tally.nbytes))

    def _why(self, name: str, kind: str) -> str:
        """Why a tensor is dequantized."""
        if not named_type(kind).quantized:
            return NOT_QUANTIZED
        if kind not in self._declared:
            return "not among the backend's weight formats"
        if self._against:
            return self._against
        op = "look-up" if name == TABLE and (not self._tied or self._head_stays()) else "product"
        return f"the backend has no {op} for it in {self._dtype}"


def format_spec(op: str, kind: str, shape: Shape, dtype: str) -> OpSpec:
    """What an op on a matrix in its blocks is asked for: shape [N, K] of `linear`, [V, D] of `embedding`."""
    rows, columns = ("n", "k") if op == "linear" else ("vocab", "dim")
    return OpSpec(dtype=dtype, dims={rows: shape[0], columns: shape[1]}, attributes={"format": kind})
