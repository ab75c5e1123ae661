"""Checkpoint tensors into packed weights, one layer's worth at a time, with nothing missing and nothing left over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.api import AttentionBackend, OpSpec
from pagedkv.api.errors import ConfigError, ModelError
from pagedkv.api.torch import DTYPES
from pagedkv.models.tensor_shapes import Shape, check_tensors, tensor_shapes
from pagedkv.models.weight_plan import HEAD, TABLE, WeightPlan, format_spec
from pagedkv.ops import Linear, resolve

if TYPE_CHECKING:
    from pagedkv.models.checkpoint import Checkpoint

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""


def torch_dtype(dtype: str) -> torch.dtype:
    """torch's name of "fp32", "bf16" or "fp16"; raises `ConfigError` for another."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known to the decoder; it runs in {', '.join(DTYPES)}")
    return DTYPES[dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """An op with the weights it packed: x [T, K] -> [T, N] of `linear`, ids [T] -> [T, D] of `embedding`."""

    op: Callable[..., Any]
    packed: Any

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self.op(x, self.packed)
        return result


@dataclass(frozen=True, slots=True, eq=False)
class SideBySide:
    """Projections of one input whose weights are of several formats, their outputs in a row: x [T, K] -> [T, N]."""

    parts: tuple[Projection, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


Product = Projection | SideBySide


class Packer:
    """Reads a checkpoint's tensors by name and packs them for a backend. `nbytes` counts what was kept so far.

    What `plan` keeps in its blocks is packed as it lies in the file; without a plan everything is plain numbers.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: AttentionBackend,
        dtype: str,
        progress: Progress | None = None,
        plan: WeightPlan | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._backend = backend
        self._dtype = dtype
        self._packed = plan.packed if plan else {}
        self._torch_dtype = torch_dtype(dtype)
        self._shapes = tensor_shapes(checkpoint.config)
        # Names only: a tensor's shape is known, and checked, once it is read.
        present = {name: self._shapes.get(name, ()) for name in checkpoint.names()}
        check_tensors(checkpoint.config, present, {}, str(checkpoint.path))
        self._progress = progress or (lambda done, total: None)
        self._linears: dict[tuple[Shape, str | None], Any] = {}
        self._done = 0
        self.nbytes = 0

    def norm(self, name: str) -> Tensor:
        """The weight of a norm as it is multiplied with: in float32 where the family applies it before rounding."""
        config = self._checkpoint.config
        weight = self._read(name, torch.float32 if config.wide_norms else None)
        kept: Tensor = self._keep(weight + config.norm_offset if config.norm_offset else weight)
        return kept

    def _keep(self, held: Any) -> Any:
        self.nbytes += held.nbytes
        return held

    def embedding(self) -> Projection:
        """The embedding table, with the op that looks up its rows."""
        kind, shape = self._packed.get(TABLE), self._shapes[TABLE]
        if kind is None:
            spec = OpSpec(dtype=self._dtype, dims={"vocab": shape[0], "dim": shape[1]})
            return Projection(resolve(self._backend, "embedding", spec), self._keep(self._read(TABLE)))
        op: Any = resolve(self._backend, "embedding", format_spec("embedding", kind, shape, self._dtype))
        return Projection(op, self._keep(op.pack(self._blocks([TABLE]))))

    def linear(self, *names: str) -> Product:
        """The named projections, stacked along their outputs: one packed linear where they are of one format."""
        weights = [f"{name}.weight" for name in names]
        parts = tuple(self._stacked(kind, list(run)) for kind, run in groupby(weights, self._packed.get))
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    def tied(self, table: Projection) -> Projection:
        """A head whose weights are the embedding table.

        Shared where the table is in blocks, which `linear` reads as well, and with the reference op; else packed from
        a copy.
        """
        kind, shape = self._packed.get(HEAD), self._shapes[TABLE]
        op = self._linear_op(shape, kind)
        if kind is None:
            return (
                Projection(op, op.pack(table.packed))
                if isinstance(op, Linear)
                else self._pack(op, table.packed.clone())
            )
        return Projection(op, table.packed) if TABLE in self._packed else self._pack(op, self._blocks([TABLE]))

    def _stacked(self, kind: str | None, weights: Sequence[str]) -> Projection:
        biases = [self._read(name) for weight in weights if (name := _bias_of(weight)) in self._shapes]
        bias = _stack(biases) if biases else None
        rows = sum(self._shapes[name][0] for name in weights)
        op = self._linear_op((rows, self._shapes[weights[0]][1]), kind)
        matrix = _stack([self._read(name) for name in weights]) if kind is None else self._blocks(weights)
        return self._pack(op, matrix, bias)

    def _pack(self, op: Any, weight: Tensor, bias: Tensor | None = None) -> Projection:
        return Projection(op, self._keep(op.pack(weight, bias)))

    def _linear_op(self, shape: Shape, kind: str | None) -> Any:
        """The linear op for weights [N, K], one object for all of a shape: a backend may keep scratch in it."""
        key = (shape, kind)
        if key not in self._linears:
            plain = OpSpec(dtype=self._dtype, dims={"n": shape[0], "k": shape[1]})
            spec = plain if kind is None else format_spec("linear", kind, shape, self._dtype)
            self._linears[key] = resolve(self._backend, "linear", spec)
        return self._linears[key]

    def _blocks(self, names: Sequence[str]) -> Tensor:
        """Matrices as they lie in the file, one below the other: a copy, which an op may consume."""
        blocks = np.concatenate([self._checkpoint.blocks(name) for name in names])
        for _ in names:
            self._count()
        return torch.from_numpy(blocks).to(self._backend.torch_device)

    def _read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._checkpoint.tensor(name, dtype or self._torch_dtype)
        if tuple(tensor.shape) != self._shapes[name]:
            raise ModelError(
                f"tensor {name} has shape {list(tensor.shape)}, but its config asks for {list(self._shapes[name])}; "
                "check that config and weights belong together"
            )
        if self._dtype == "fp16" and not bool(tensor.isfinite().all()):
            raise ModelError(f"tensor {name} exceeds the range of float16; choose dtype bfloat16 or float32")
        self._count()
        return tensor.to(self._backend.torch_device)

    def _count(self) -> None:
        self._done += 1
        self._progress(self._done, len(self._shapes))


def _bias_of(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias"


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def element_bytes(dtype: str) -> int:
    """Bytes of one number."""
    return torch_dtype(dtype).itemsize
