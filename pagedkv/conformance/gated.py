"""The gated fields and features of the contract, and a value for each that a backend may have to refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

from pagedkv.api import LayerSpec

SAMPLES: dict[str, Any] = {
    "causal": False,
    "window": 3,
    "softcap": 2.0,
    "sinks": True,
    "alibi": True,
    "kv_of": 0,
}
"""Gated field of LayerSpec -> a value off its default."""

FEATURES = (
    *("window", "softcap", "sinks", "alibi", "non_causal", "kv_sharing", "multi_token_decode", "mixed_batch"),
    *("prefix_hit", "nan_safe", "deterministic", "batch_invariant", "lse", "mla", "state"),
)
"""The feature names of contract 1.0."""


def gated_fields() -> dict[str, str]:
    """Gated field of LayerSpec -> its feature."""
    return {f.name: f.metadata["feature"] for f in dataclasses.fields(LayerSpec) if "feature" in f.metadata}
