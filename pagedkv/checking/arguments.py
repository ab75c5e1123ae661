"""The laws of what the core passes besides a batch: pool specs, tensors of `attend`, pairs, bound values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pagedkv.api import Capabilities, LayerSpec, PoolSpec
from pagedkv.checking import tensors
from pagedkv.checking.batch import Reach
from pagedkv.checking.capabilities import undeclared
from pagedkv.checking.guard import Guard
from pagedkv.checking.objects import CheckedPlan, CheckedPool

_SCALES = ("k_scale", "v_scale")
_BOUND_SCALES = "/tensor"
"""How KV dtypes end whose scales are bound; those of any other are made at append, or there are none."""


def check_spec(guard: Guard, spec: PoolSpec, can: Capabilities) -> None:
    """A pool spec that a core may send."""
    check_declared(guard, undeclared(can, spec, spec.features), "a pool spec", can)
    limits = spec.limits
    if spec.num_blocks < 1 or min(limits.rows, limits.tokens, limits.context) < 0 or limits.plans < 1:
        raise guard.core("pool spec", f"{spec.num_blocks} blocks with {limits}")
    seen: set[int] = set()
    for group in spec.groups:
        owners = {layer.index for layer in group.layers if layer.kv_of is None}
        for layer in group.layers:
            if layer.index in seen:
                raise guard.core("pool spec", f"layer index {layer.index} stands twice")
            if layer.kv_of is not None and layer.kv_of not in owners:
                raise guard.core("pool spec", f"layer {layer.index} reads layer {layer.kv_of}, none of {owners}")
            seen.add(layer.index)


def check_declared(guard: Guard, features: list[str], where: str, can: Capabilities) -> None:
    """No feature that the backend did not declare."""
    if features:
        raise guard.core("G1", f"{where} uses {features}, declared: {sorted(can.features)}")


class AttendLaws:
    """The arguments of one `attend`, against the plan and the layer."""

    def __init__(self, guard: Guard, plan: CheckedPlan, layer: int, reach: Reach, device: str) -> None:
        self._guard, self._plan, self._reach, self._device = guard, plan, reach, device
        self.layer = self._find(layer)
        shape = plan.shape
        self._rows = reach.num_tokens if shape is None else shape.tokens

    def _find(self, index: int) -> LayerSpec:
        group, layer = self._plan.pool.layers.get(index, (None, None))
        if layer is None:
            raise self._guard.core("layer", f"the pool has no layer {index}, it has {sorted(self._plan.pool.layers)}")
        if group != self._plan.group:
            raise self._guard.core("layer", f"layer {index} is in group {group}, the plan is for {self._plan.group}")
        return layer

    def check(self, q: Any, k: Any, v: Any, out: Any, extra: Mapping[str, Any] | None, can: Capabilities) -> None:
        """Raises `ContractViolation` for the first law that is broken."""
        self._forms(q, k, v, out)
        layer, slots = self.layer, self._reach.num_slots or 0
        if k is not None:
            self._tensor("k", k, slots, layer.kv_heads, layer.k_dim)
        if v is not None:
            self._tensor("v", v, slots, layer.kv_heads, layer.v_dim)
        if q is not None:
            self._tensor("q", q, self._rows, layer.q_heads, layer.k_dim)
            self._tensor("out", out, self._rows, layer.q_heads, layer.v_dim)
            self._out(out, {"q": q, "k": k, "v": v})
            self._bound()
        if extra:
            self._extra(extra, q, can)

    def _forms(self, q: Any, k: Any, v: Any, out: Any) -> None:
        def given(**values: Any) -> str:
            return ", ".join(f"{name} {'absent' if value is None else 'given'}" for name, value in values.items())

        # v is absent by right only for a kind that says so, and "mha" does not.
        if (k is None) != (v is None) and not (v is None and self.layer.kind != "mha"):
            raise self._guard.core("attend forms", given(k=k, v=v))
        if (q is None) != (out is None):
            raise self._guard.core("attend forms", given(q=q, out=out))
        if k is not None and self.layer.kv_of is not None:
            raise self._guard.core("kv_of", f"layer {self.layer.index} got k, it reads layer {self.layer.kv_of}")
        if k is not None and self._reach.num_slots is None:
            raise self._guard.core("attend forms", "k is given, but the batch has no slots")

    def _tensor(self, name: str, tensor: Any, rows: int, heads: int, dim: int) -> None:
        dtype = tensors.NAMES.get(self._plan.pool.spec.dtype, self._plan.pool.spec.dtype)
        self._form(name, tensor, dtype, [heads, dim], rows)
        if not tensors.heads_dense(tensor):
            raise self._guard.core("attend tensors", f"{name} has strides {tensor.stride()}, heads x dim must be dense")

    def _form(self, name: str, tensor: Any, dtype: str, shape: list[int], rows: int) -> None:
        fine = (
            tensors.is_tensor(tensor)
            and tensors.dtype_name(tensor) == dtype
            and len(tensor.shape) == 1 + len(shape)
            and tensor.shape[0] >= rows
            and list(tensor.shape[1:]) == shape
            and tensors.on_device(tensor, self._device)
        )
        if not fine:
            where = f" on {tensor.device}" if tensors.is_tensor(tensor) else ""
            wanted = f"{dtype} [>= {rows}, {', '.join(map(str, shape))}] on {self._device}"
            raise self._guard.core("attend tensors", f"{name} is {tensors.form(tensor)}{where}, must be {wanted}")

    def _out(self, out: Any, others: Mapping[str, Any]) -> None:
        if not tensors.contiguous(out):
            raise self._guard.core("out overlap", f"out has shape {list(out.shape)} and strides {out.stride()}")
        for name, tensor in others.items():
            if tensor is not None and tensors.overlap(out, tensor):
                raise self._guard.core("out overlap", f"out shares memory with {name}")

    def _bound(self) -> None:
        bound = self._plan.pool.bound.get(self.layer.index, set())
        missing = [name for name in ("sinks", "alibi") if getattr(self.layer, name) and name not in bound]
        if missing:
            raise self._guard.core("unbound", f"layer {self.layer.index} has no {missing} bound")

    def _extra(self, extra: Mapping[str, Any], q: Any, can: Capabilities) -> None:
        check_declared(self._guard, sorted(extra.keys() - can.features), "extra of attend", can)
        if "lse" in extra:
            if q is None:
                raise self._guard.core("attend forms", "extra has lse, q is absent")
            self._form("lse", extra["lse"], "float32", [self.layer.q_heads], self._rows)
            if not extra["lse"].is_contiguous():
                raise self._guard.core("attend tensors", "lse must be contiguous")


def check_pairs(guard: Guard, pairs: Any, src: CheckedPool, dst: CheckedPool) -> None:
    """Pairs of blocks that may be copied."""

    def need(kept: object, what: str) -> None:
        if not kept:
            raise guard.core("copy_blocks", what)

    need(src.spec.groups == dst.spec.groups, "the pools have different groups")
    form = f"{pairs.dtype} {list(pairs.shape)}" if isinstance(pairs, np.ndarray) else type(pairs).__name__
    fine = isinstance(pairs, np.ndarray) and pairs.dtype == "int32" and pairs.ndim == 2 and pairs.shape[1] == 2
    need(fine, f"pairs are {form}, must be a numpy int32 array [N, 2]")
    sources, targets = pairs[:, 0], pairs[:, 1]
    wrong = sources[(sources < 0) | (sources >= src.num_blocks)]
    need(not len(wrong), f"source {wrong[:1].tolist()} is outside 0..{src.num_blocks - 1}")
    wrong = targets[(targets < 1) | (targets >= dst.num_blocks)]
    need(not len(wrong), f"destination {wrong[:1].tolist()} is outside 1..{dst.num_blocks - 1}")
    need(len(np.unique(targets)) == len(targets), f"a destination stands twice in {targets[:16].tolist()}")
    if src is dst:
        both = np.intersect1d(sources, targets)
        need(not len(both), f"block {both[:1].tolist()} is source and destination in one pool")


def check_bound(guard: Guard, pool: CheckedPool, layer: int, params: Mapping[str, Any]) -> None:
    """Values that the layer takes, in the documented form."""
    group, spec = pool.layers.get(layer, (None, None))
    if group is None or spec is None:
        raise guard.core("bind", f"the pool has no layer {layer}, it has {sorted(pool.layers)}")
    for name, value in params.items():
        shapes = _bound_shapes(spec, pool.spec.groups[group].kv_dtype, name)
        if not shapes:
            raise guard.core("bind", f"layer {layer} takes no {name!r}")
        kind = getattr(value, "dtype", type(value).__name__)
        if not isinstance(value, np.ndarray | np.generic) or kind != "float32" or value.shape not in shapes:
            wanted = f"host float32 of shape {' or '.join(map(str, shapes))}"
            raise guard.core("bind", f"{name!r} of layer {layer} is {kind} {np.shape(value)}, must be {wanted}")
        wrong = [float(x) for x in np.ravel(value) if name in _SCALES and not 0 < x < np.inf]
        if wrong:
            raise guard.core("bind", f"{name!r} of layer {layer} holds {wrong[0]}, must be finite and above 0")


def _bound_shapes(spec: LayerSpec, kv_dtype: str, name: str) -> list[tuple[int, ...]]:
    if name in ("sinks", "alibi"):
        return [(spec.q_heads,)] if getattr(spec, name) else []
    bound = name in _SCALES and kv_dtype.endswith(_BOUND_SCALES) and spec.kv_of is None
    return [(), (spec.kv_heads,)] if bound else []
