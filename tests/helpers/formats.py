"""Backends that multiply packed GGUF weights: through the reference, so that nothing is rounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import pytest

from pagedkv.api import Capabilities, OpSpec
from pagedkv.api.records import Sizes
from pagedkv.ops import FormatEmbedding, FormatLinear
from pagedkv_cpu.backend import CpuBackend
from pagedkv_cpu.descriptor import CpuDescriptor
from tests.helpers.plain import OpsOnlyBackend

BOTH = ("linear", "embedding")
_ANY: tuple[Sizes, ...] = ((1, 1, 1 << 20),)


class Formats(OpsOnlyBackend):
    """Has these ops for weights in these formats, and no other op. `packed` lists what was given to `pack`."""

    def __init__(self, formats: Collection[str], ops: Collection[str] = BOTH, dtype: str = "fp32") -> None:
        super().__init__()
        self.formats, self.names, self.only = frozenset(formats), ops, dtype

    def capabilities(self) -> Capabilities:
        return Capabilities(
            dtypes=("fp32", "bf16"),
            kv_dtypes=("fp32",),
            block_sizes=_ANY,
            head_dims=_ANY,
            preferred_block_size=16,
            weight_formats=self.formats,
        )

    def op(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        self.asked.append((name, spec))
        return format_op(name, spec, self.formats, self.names) if spec.dtype == self.only else None


def format_op(name: str, spec: OpSpec, formats: Collection[str], names: Collection[str]) -> Callable[..., Any] | None:
    """The reference for weights in one of the formats, if the op is among `names`."""
    if name not in names or spec.attributes.get("format") not in formats:
        return None
    return FormatLinear(spec) if name == "linear" else FormatEmbedding(spec)


def cpu_with_formats(monkeypatch: pytest.MonkeyPatch, formats: Collection[str], names: Collection[str] = BOTH) -> None:
    """From now on, the CPU backend has exactly these ops for weights in exactly these formats."""
    plain_op, plain_can, describe = CpuBackend.op, CpuBackend.capabilities, CpuDescriptor.describe

    def declaring(can: Capabilities) -> Capabilities:
        return dataclasses.replace(can, weight_formats=frozenset(formats))

    def op(self: CpuBackend, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        return format_op(name, spec, formats, names) if "format" in spec.attributes else plain_op(self, name, spec)

    monkeypatch.setattr(CpuBackend, "op", op)
    monkeypatch.setattr(CpuBackend, "capabilities", lambda self: declaring(plain_can(self)))
    monkeypatch.setattr(CpuDescriptor, "describe", lambda self, device: declaring(describe(self, device)))
