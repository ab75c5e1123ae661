"""The null backend's entry point: it accepts whatever is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedkv.api import AttentionBackend, BackendUnavailable, Capabilities, Descriptor, DeviceInfo, World

FEATURES = frozenset(
    {
        "window",
        "softcap",
        "sinks",
        "alibi",
        "non_causal",
        "kv_sharing",
        "multi_token_decode",
        "mixed_batch",
        "prefix_hit",
        "nan_safe",
        "deterministic",
        "batch_invariant",
    }
)


class NullDescriptor(Descriptor):
    """One device, index 0, that holds no bytes."""

    name = "null"
    api = (1, 0)

    def probe(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo.of(index=0, kind="computes nothing, to time the core alone", score=0),)

    def describe(self, device: DeviceInfo) -> Capabilities:
        sizes = ((1, 1, 1 << 20),)
        return Capabilities.of(
            dtypes=("fp32", "bf16", "fp16"),
            kv_dtypes=("fp32", "bf16", "fp16"),
            block_sizes=sizes,
            head_dims=sizes,
            preferred_block_size=16,
            features=FEATURES,
            placements=frozenset({"device", "host"}),
        )

    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        if device != 0:
            raise BackendUnavailable(f"the null backend has one device, index 0, and was asked for {device}")
        from pagedkv.conformance.null.backend import NullBackend

        return NullBackend(self.describe(self.probe()[0]))
