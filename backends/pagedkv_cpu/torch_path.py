"""Attention with torch's operators: everywhere, and slower than the kernels."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api import Batch, ContractViolation, PoolSpec
from pagedkv_cpu import attention
from pagedkv_cpu.attention import Work
from pagedkv_cpu.copies import Planes, copy_with_torch
from pagedkv_cpu.path import CpuPlan, Path
from pagedkv_cpu.planning import Geometry, Pass, Planner, Shape
from pagedkv_cpu.pool import CpuPool, Layer
from pagedkv_cpu.scratch import Scratch, Sizes, padded

_log = logging.getLogger("pagedkv.backends.cpu")


class TorchPlan(CpuPlan):
    """One batch of one group: where keys go, and the passes of every layer shape."""

    def __init__(self, pool: CpuPool, group: int, batch: Batch, uniform: bool) -> None:
        super().__init__(pool, group, batch)
        spec = pool.spec.groups[group]
        self.slots, self.kept = _targets(batch, pool.num_blocks * spec.block_size, spec.block_size)
        geometry, sizes = Geometry(batch, spec.block_size, pool.num_blocks), pool.scratch().sizes
        shapes = {Shape.of(layer) for layer in spec.layers}
        self._planners = {shape: Planner(geometry, shape, sizes, uniform) for shape in shapes}
        self._works: dict[object, tuple[list[Work], Planner]] = {}
        self._passes: dict[Shape, list[Pass]] = {shape: planner.all() for shape, planner in self._planners.items()}

    def work(self, layer: Layer) -> tuple[list[Work], Planner]:
        """What to run for a layer, made for the first layer of its kind, and the planner behind it."""
        found = self._works.get(layer.kind)
        if found is None:
            shape = Shape.of(layer.spec)
            works = [Work(part, layer, self.pool.scratch()) for part in self._passes[shape]]
            found = self._works[layer.kind] = (works, self._planners[shape])
        return found


class TorchPath(Path):
    """Gathers keys and values, then multiplies in products of one fixed shape."""

    name = "torch"

    def __init__(self) -> None:
        self._uniform, self.steady = _find_heights((64,))

    def fixed_bytes(self, spec: PoolSpec) -> int:
        return Sizes.of(spec).fixed_bytes

    def scratch(self, spec: PoolSpec) -> Scratch:
        return Scratch(spec)

    def unsteady(self, spec: PoolSpec) -> list[str]:
        layers = [layer for group in spec.groups for layer in group.layers]
        widths = {padded(dim) for layer in layers for dim in (layer.k_dim, layer.v_dim)}
        return [
            f"feature 'batch_invariant': products of width {width} do not keep their bits on this processor"
            for width in sorted(widths)
            if not attention.same_bits(width, attention.heights(self._uniform))
        ]

    def plan(self, pool: CpuPool, group: int, batch: Batch) -> TorchPlan:
        return TorchPlan(pool, group, batch, self._uniform)

    def append(self, plan: TorchPlan, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> None:
        if plan.slots.numel():
            attention.append(layer, plan.slots, plan.kept, _first(k, plan.num_slots), _first(v, plan.num_slots))

    def attend(
        self, plan: TorchPlan, layer: Layer, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        tokens, scratch = plan.num_tokens, plan.pool.scratch()
        works, planner = plan.work(layer)
        sums = None if lse is None else lse[:tokens]
        attention.attend(layer, works, planner, _first(q, tokens), _first(out, tokens), scratch, sums)

    def copy(self, planes: Planes, pairs: npt.NDArray[np.int32]) -> None:
        copy_with_torch(planes, pairs)


def _first(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows of a tensor; itself where there are no more, which saves a view per layer."""
    return tensor if len(tensor) == rows else tensor[:rows]


def _targets(batch: Batch, num_slots: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(slots to write int64, the rows of k and v that go there or None for all)."""
    if batch.slots is None:
        return torch.empty(0, dtype=torch.int64), None
    slots = checked_slots(batch.slots, num_slots, block_size)
    kept = np.flatnonzero(slots >= 0)
    return torch.from_numpy(slots[kept]), None if len(kept) == len(slots) else torch.from_numpy(kept)


def checked_slots(slots: Any, num_slots: int, block_size: int) -> np.ndarray:
    """A copy of `slots` as int64; `ContractViolation` for one in block 0 or outside the pool."""
    copied: np.ndarray = slots.astype(np.int64)
    used = copied[copied >= 0]
    if used.size and (used.min() < block_size or used.max() >= num_slots):
        raise ContractViolation(
            f"slots must be -1 or {block_size}..{num_slots - 1}, as block 0 is never written; "
            f"got {used.min()}..{used.max()}",
            law="slots",
        )
    return copied


def _find_heights(widths: tuple[int, ...]) -> tuple[bool, bool]:
    """(whether all tiles must have one height, whether a row's bits then depend on the row alone)."""
    for uniform in (False, True):
        if all(attention.same_bits(width, attention.heights(uniform)) for width in widths):
            return uniform, True
    _log.warning("products on this processor depend on their batch: 'batch_invariant' is not available")
    return False, False
