"""Checkpoint tensors into packed weights, one layer's worth at a time, with nothing missing and nothing left over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagedkv.api import AttentionBackend, OpSpec
from pagedkv.api.errors import ConfigError, ModelError
from pagedkv.models.tensor_shapes import check_tensors, tensor_shapes
from pagedkv.ops import Linear, resolve

if TYPE_CHECKING:
    from pagedkv.models.checkpoint import Checkpoint

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

TORCH_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_dtype(dtype: str) -> torch.dtype:
    """torch's name of "fp32", "bf16" or "fp16"; raises `ConfigError` for another."""
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known to the decoder; it runs in {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A linear op with the weights it packed: x [T, K] -> [T, N]."""

    op: Callable[..., Any]
    packed: Any

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self.op(x, self.packed)
        return result


class Packer:
    """Reads a checkpoint's tensors by name and packs them for a backend. `nbytes` counts what was kept so far."""

    def __init__(
        self, checkpoint: Checkpoint, backend: AttentionBackend, dtype: str, progress: Progress | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._backend = backend
        self._dtype = dtype
        self._torch_dtype = torch_dtype(dtype)
        self._shapes = tensor_shapes(checkpoint.config)
        # Names only: a tensor's shape is known, and checked, once it is read.
        present = {name: self._shapes.get(name, ()) for name in checkpoint.names()}
        check_tensors(checkpoint.config, present, {}, str(checkpoint.path))
        self._progress = progress or (lambda done, total: None)
        self._done = 0
        self.nbytes = 0

    def plain(self, name: str) -> Tensor:
        """A table, kept as it is."""
        return self._keep(self._read(name))

    def norm(self, name: str) -> Tensor:
        """The weight of a norm as it is multiplied with: in float32 where the family applies it before rounding."""
        config = self._checkpoint.config
        weight = self._read(name, torch.float32 if config.wide_norms else None)
        return self._keep(weight + config.norm_offset if config.norm_offset else weight)

    def _keep(self, tensor: Tensor) -> Tensor:
        self.nbytes += tensor.nbytes
        return tensor

    def linear(self, *names: str) -> Projection:
        """The named projections, stacked along their outputs, as one packed linear."""
        weights = [self._read(f"{name}.weight") for name in names]
        biases = [self._read(f"{name}.bias") for name in names if f"{name}.bias" in self._shapes]
        return self._pack(_stack(weights), _stack(biases) if biases else None)

    def tied(self, table: Tensor) -> Projection:
        """A head whose weights are the embedding table: shared with the reference op, else packed from a copy."""
        op = self._linear_op(table)
        if isinstance(op, Linear):
            return Projection(op, op.pack(table))
        return self._pack(table.clone(), None)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> Projection:
        op = self._linear_op(weight)
        packed = op.pack(weight, bias)
        self.nbytes += packed.nbytes
        return Projection(op, packed)

    def _linear_op(self, weight: Tensor) -> Any:
        n, k = weight.shape
        return resolve(self._backend, "linear", OpSpec(dtype=self._dtype, dims={"n": n, "k": k}))

    def _read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._checkpoint.tensor(name, dtype or self._torch_dtype)
        if tuple(tensor.shape) != self._shapes[name]:
            raise ModelError(
                f"tensor {name} has shape {list(tensor.shape)}, but its config asks for {list(self._shapes[name])}; "
                "check that config and weights belong together"
            )
        if self._dtype == "fp16" and not bool(tensor.isfinite().all()):
            raise ModelError(f"tensor {name} exceeds the range of float16; choose dtype bfloat16 or float32")
        self._done += 1
        self._progress(self._done, len(self._shapes))
        return tensor.to(self._backend.torch_device)


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def element_bytes(dtype: str) -> int:
    """Bytes of one number."""
    return torch_dtype(dtype).itemsize
