"""The metadata keys of a GGUF model: typed, and none skipped that changes the computation.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and `llama-arch.cpp` of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pagedkv.api.errors import ModelError
from pagedkv.models.gguf import ArrayRef, GgufFile

# Keys that mean "as usual" with one of these values; with any other the model computes something else.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (1,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
# Keys that describe the file or its making.
IGNORED = frozenset({"vocab_size", "attention.layer_norm_epsilon", "rope.scaling.finetuned"})


class Keys:
    """Typed access to the keys of one architecture, remembering which of them were read."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.prefix = f"{architecture}."
        self.read: set[str] = set()

    def get(self, key: str) -> Any:
        self.read.add(key)
        value = self.file.metadata.get(self.prefix + key)
        return self._same_in_all_layers(key) if isinstance(value, ArrayRef) else value

    def _same_in_all_layers(self, key: str) -> Any:
        values = list(dict.fromkeys(self.file.array(self.prefix + key)))
        if len(values) != 1:
            raise self.wrong(key, f"differs between layers ({len(values)} values), which cannot be run yet")
        return values[0].item() if isinstance(values[0], np.generic) else values[0]

    def flags(self, key: str) -> list[bool] | None:
        """An array of one flag a layer; None where the value is no array."""
        value = self.file.metadata.get(self.prefix + key)
        if not isinstance(value, ArrayRef):
            return None
        self.read.add(key)
        return [bool(flag) for flag in self.file.array(self.prefix + key)]

    def count(self, key: str, default: int | None = None, *, most: int = 1 << 24) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(key, f"is {value!r}, not a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise self.wrong(key, f"is {value!r}, not a number of 0 or more")
        return float(value)

    def scale(self, key: str, default: float) -> float:
        """A number above 0; files write 0 for the default."""
        return self.number(key, default) or default

    def wrong(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.file.path}: metadata key {self.prefix + key!r} {what}.")

    def refuse_unread(self) -> None:
        """Refuse every key that nothing has read and that is not at a value without effect."""
        for full, value in self.file.metadata.items():
            key = full.removeprefix(self.prefix)
            if key == full or key in self.read or key in IGNORED or value in NEUTRAL.get(key, ()):
                continue
            shown = "an array" if isinstance(value, ArrayRef) else repr(value)
            raise self.wrong(key, f"is {shown}: this changes how the model computes in a way that is not built yet")
