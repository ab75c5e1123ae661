"""From the rope keys and tensors of a GGUF file to `RopeConfig`s."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pagedkv.api.errors import ModelError
from pagedkv.models.config import RopeConfig
from pagedkv.models.gguf import GgufFile
from pagedkv.models.gguf_keys import Keys
from pagedkv.ops.gguf_quants import dequantize_into

INTERLEAVED_ROPE = ("llama", "granite", "smollm3")
"""Architectures whose q and k rows llama.cpp stores in pairs (2i, 2i + 1) instead of halves (i, i + dim / 2)."""

ROPE_FREQS, ROPE_SHORT, ROPE_LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_FREQS, ROPE_SHORT, ROPE_LONG)


def gguf_rope(keys: Keys, architecture: str, head_dim: int) -> RopeConfig:
    dim = keys.count("rope.dimension_count", head_dim)
    if dim > head_dim or dim % 2 or (architecture in INTERLEAVED_ROPE and dim != head_dim):
        raise keys.wrong("rope.dimension_count", f"is {dim}, which cannot be run with heads of {head_dim}")
    theta = keys.number("rope.freq_base", 10000.0)
    if ROPE_LONG in keys.file.tensors:
        return _longrope(keys, theta, dim)
    return RopeConfig(theta=theta, dim=dim, freq_factors=_factors(keys.file, ROPE_FREQS, dim), **_rope_scaling(keys))


def local_rope(keys: Keys, dim: int, default_theta: float | None) -> RopeConfig | None:
    """The rope of layers with a window, where it is another one; never scaled."""
    if default_theta is None and keys.get("rope.freq_base_swa") is None:
        return None
    return RopeConfig(theta=keys.number("rope.freq_base_swa", default_theta), dim=dim)


def _longrope(keys: Keys, theta: float, dim: int) -> RopeConfig:
    kind = keys.get("rope.scaling.type")
    if kind not in (None, "longrope", "none"):
        raise keys.wrong("rope.scaling.type", f"is {kind!r} beside the factors of a longrope")
    short, long = (_factors(keys.file, name, dim) for name in (ROPE_SHORT, ROPE_LONG))
    if short is None or long is None:
        raise ModelError(
            f"{keys.file.path}: of {ROPE_SHORT!r} and {ROPE_LONG!r} one is missing. Convert the model again."
        )
    context = keys.count("context_length", most=1 << 24)
    original = keys.count("rope.scaling.original_context_length", context)
    return RopeConfig(
        theta=theta,
        dim=dim,
        kind="longrope",
        factor=context / original,
        original_max_position=original,
        attention_factor=keys.scale("rope.scaling.attn_factor", 1.0),
        short_factors=short,
        long_factors=long,
    )


def _rope_scaling(keys: Keys) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type") or "linear"
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0)) or 1.0
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length", most=1 << 24))
    attention = keys.number("rope.scaling.attn_factor", 1.0) or 1.0
    betas = keys.number("rope.scaling.yarn_beta_fast", 32.0), keys.number("rope.scaling.yarn_beta_slow", 1.0)
    if kind != "yarn" and attention != 1.0:
        raise keys.wrong("rope.scaling.attn_factor", f"is {attention:g} without yarn, which is not built yet")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {}
    if kind == "linear":
        return {"kind": "linear", "factor": factor}
    if kind != "yarn":
        raise keys.wrong("rope.scaling.type", f"is {kind!r}; none, linear and yarn are built")
    scaling = {"kind": "yarn", "factor": factor, "original_max_position": original}
    if attention != 1.0:
        # The file's factor multiplies YaRN's own, 0.1 ln(factor) + 1 (arXiv 2309.00071, section 3.4).
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling | {"beta_fast": betas[0], "beta_slow": betas[1]}


def _factors(file: GgufFile, name: str, dim: int) -> tuple[float, ...] | None:
    """The factors [dim / 2] of a rope that are stored as the tensor `name`."""
    info = file.tensors.get(name)
    if info is None:
        return None
    if info.shape != (dim // 2,):
        raise ModelError(f"{file.path}: tensor {name!r} has shape {list(info.shape)}, not [{dim // 2}].")
    factors = np.empty(dim // 2, np.float32)
    dequantize_into(file.raw(info), info.type, factors)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(f"{file.path}: tensor {name!r} holds values that are not above 0.")
    return tuple(float(value) for value in factors)
