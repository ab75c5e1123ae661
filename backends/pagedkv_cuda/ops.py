"""Ops that Triton computes in one launch each; everything else is left to the reference, which runs on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pagedkv.api import OpSpec
from pagedkv.api.torch import DTYPES
from pagedkv.api.torch_streams import Runtime
from pagedkv_cuda.kernels import ops, sampling

OPS: Mapping[str, tuple[Callable[..., Any], frozenset[str]]] = {
    "rms_norm": (ops.rms_norm, frozenset({"wide"})),
    "add_rms_norm": (ops.add_rms_norm, frozenset({"wide"})),
    "rope": (ops.rope, frozenset()),
    "silu_mul": (ops.silu_mul, frozenset()),
    "gelu_tanh_mul": (ops.gelu_tanh_mul, frozenset()),
    "greedy": (sampling.greedy, frozenset()),
    "sample": (sampling.sample, frozenset()),
}
"""The launchers, and the attributes that each of them knows."""


class Ops:
    """The ops of one instance."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._made: dict[str, Callable[..., Any]] = {}

    def get(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        """The op, or None for what no kernel does and for an attribute that only another core knows."""
        op, known = OPS.get(name, (None, frozenset()))
        if op is None or not spec.attributes.keys() <= known or spec.features or spec.dtype not in DTYPES:
            return None
        if name not in self._made:
            self._made[name] = self._on_device(op)
        return self._made[name]

    def _on_device(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """Triton launches on the current device, whatever its arguments are on."""

        @functools.wraps(op)
        def launched(*arguments: torch.Tensor) -> Any:
            with self._runtime.here():
                return op(*arguments)

        return launched
