"""From the rope fields of a Hugging Face config.json to `RopeConfig`s."""

from __future__ import annotations

import logging
import math

from pagedkv.api.errors import ModelError
from pagedkv.models.config import RopeConfig
from pagedkv.models.hf_families import Family
from pagedkv.models.hf_fields import LIMITS, Fields, show

_log = logging.getLogger("pagedkv.models")

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def ropes(fields: Fields, family: Family, head_dim: int, max_position: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rope of the model, and of its layers with a window where that is another one."""
    scaling = _rope_fields(fields)
    if family.default_local_theta is None:
        return _rope(fields, scaling, family, head_dim, max_position), None
    main, local = _by_layer_type(fields, scaling)
    local_theta = fields.optional_number("rope_local_base_freq", low=1.0, high=1e12)
    return (
        _rope(fields, main, family, head_dim, max_position),
        _local_rope(local, local_theta or family.default_local_theta, head_dim),
    )


def _by_layer_type(fields: Fields, scaling: Fields) -> tuple[Fields, Fields]:
    """Newer files keep the two ropes by layer type; in older ones the scaling is that of the layers without window."""
    if not (scaling.has("full_attention") or scaling.has("sliding_attention")):
        return scaling, Fields({}, "config.json rope_parameters")
    names = ("full_attention", "sliding_attention")
    parts = [Fields(scaling.take(name) or {}, f"config.json rope_parameters.{name}") for name in names]
    scaling.refuse_rest()
    return parts[0], parts[1]


def _local_rope(scaling: Fields, default_theta: float, head_dim: int) -> RopeConfig:
    if (kind := _rope_kind(scaling)) != "default":
        raise scaling.wrong("rope_type", f"'default' for layers with a window ({kind} is not built there)")
    theta = scaling.optional_number("rope_theta", low=1.0, high=1e12)
    _rotary_dim(scaling, head_dim, partial=False)
    scaling.refuse_rest()
    return RopeConfig(theta=theta or default_theta, dim=head_dim)


def _rope(fields: Fields, scaling: Fields, family: Family, head_dim: int, max_position: int) -> RopeConfig:
    """Rope from `rope_parameters` or the older `rope_scaling` with `rope_theta` beside it."""
    kind = _rope_kind(scaling, family.longrope)
    theta = _theta(fields, scaling, family.default_theta)
    inner = _rotary_dim(scaling, head_dim, partial=family.partial_rope)
    dim = min(inner, _rotary_dim(fields, head_dim, partial=family.partial_rope))
    original = _original_positions(fields, scaling, kind) or max_position
    if kind == "default":
        parsed = RopeConfig(theta=theta, dim=dim)
    elif kind == "linear":
        parsed = RopeConfig(theta=theta, dim=dim, kind="linear", factor=_factor(scaling))
    elif kind == "llama3":
        parsed = _llama3(scaling, theta, dim, original)
    elif kind == "longrope":
        parsed = _longrope(scaling, theta, dim, original, max_position)
    else:
        parsed = _yarn(scaling, theta, dim, original, max_position)
    scaling.refuse_rest()
    return parsed


def _rope_fields(fields: Fields) -> Fields:
    new, old = fields.take("rope_parameters"), fields.take("rope_scaling")
    if new and old and new != old:
        raise ModelError(
            f"config.json: rope_parameters {show(new)} and rope_scaling {show(old)} disagree; keep the right one"
        )
    name = "rope_parameters" if new else "rope_scaling"
    return Fields(new or old or {}, f"config.json {name}")


def _rope_kind(scaling: Fields, longrope: bool = False) -> str:
    kind, older = scaling.take("rope_type"), scaling.take("type")
    if kind is not None and older is not None and kind != older:
        raise scaling.wrong("type", f"equal to rope_type ({show(kind)})")
    kind = kind or older or "default"
    if longrope and kind in ("longrope", "su", "yarn"):
        return "longrope"  # Phi-3's earlier names for it
    if kind not in _ROPE_KINDS:
        raise ModelError(
            f"config.json: rope type {show(kind)} is not supported; supported: {', '.join(_ROPE_KINDS)}. "
            "Positions would be wrong without it, so the model is not loaded"
        )
    return kind


def _theta(fields: Fields, scaling: Fields, default: float) -> float:
    outer = fields.optional_number("rope_theta", low=1.0, high=1e12)
    inner = scaling.optional_number("rope_theta", low=1.0, high=1e12)
    if outer is not None and inner is not None and outer != inner:
        raise fields.wrong("rope_theta", f"equal to the rope_theta in its rope parameters ({inner:g})")
    return inner or outer or fields.assumed("rope_theta", default)


def _original_positions(fields: Fields, scaling: Fields, kind: str) -> int | None:
    """The length the model was trained at before its rope was stretched; newer files keep it with the rope fields."""
    name = "original_max_position_embeddings"
    outer, inner = fields.optional_integer(name), None
    if scaling.has(name) and kind in ("llama3", "yarn", "longrope"):
        inner = scaling.optional_integer(name)
    if outer is not None and inner is not None and outer != inner:
        raise fields.wrong(name, f"equal to the one in its rope parameters ({inner})")
    return inner or outer


def _rotary_dim(fields: Fields, head_dim: int, *, partial: bool) -> int:
    """The entries of a head that turn: all, or in some families a share of them."""
    share = fields.take("partial_rotary_factor")
    if share is None:
        return head_dim
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise fields.wrong("partial_rotary_factor", "a number above 0 and at most 1")
    if share != 1 and not partial:
        raise fields.wrong("partial_rotary_factor", "1 or absent: this family turns whole heads")
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise fields.wrong("partial_rotary_factor", f"a share of head_dim ({head_dim}) that gives an even number")
    return dim


def _factor(scaling: Fields) -> float:
    value = scaling.optional_number("factor", low=0.0, high=1e6)
    if value is None or value < 1.0:
        raise scaling.wrong("factor", "a number of at least 1")
    return value


def _llama3(scaling: Fields, theta: float, dim: int, original: int) -> RopeConfig:
    low = scaling.optional_number("low_freq_factor", low=0.0, high=1e6)
    high = scaling.optional_number("high_freq_factor", low=0.0, high=1e6)
    if low is None or high is None or high <= low:
        raise scaling.wrong("high_freq_factor", f"given and above low_freq_factor ({show(low)})")
    return RopeConfig(
        theta=theta,
        dim=dim,
        kind="llama3",
        factor=_factor(scaling),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )


def _yarn(scaling: Fields, theta: float, dim: int, original: int, max_position: int) -> RopeConfig:
    # A null factor means the ratio of the two lengths.
    derived = scaling.has("factor") and scaling.take("factor") is None
    rope = RopeConfig(
        theta=theta,
        dim=dim,
        kind="yarn",
        factor=max_position / original if derived else _factor(scaling),
        original_max_position=original,
        attention_factor=scaling.optional_number("attention_factor", low=0.0, high=1e6),
        beta_fast=scaling.number("beta_fast", 32.0, low=0.0, high=1e6),
        beta_slow=scaling.number("beta_slow", 1.0, low=0.0, high=1e6),
        mscale=scaling.optional_number("mscale", low=0.0, high=1e6),
        mscale_all_dim=scaling.optional_number("mscale_all_dim", low=0.0, high=1e6),
        truncate=scaling.flag("truncate", True),
    )
    if rope.beta_fast < rope.beta_slow:
        raise scaling.wrong("beta_fast", f"at least beta_slow ({rope.beta_slow:g})")
    return rope


def _longrope(scaling: Fields, theta: float, dim: int, original: int, max_position: int) -> RopeConfig:
    factor = scaling.optional_number("factor", low=0.0, high=1e6)
    return RopeConfig(
        theta=theta,
        dim=dim,
        kind="longrope",
        factor=max_position / original if factor is None else factor,
        original_max_position=original,
        attention_factor=scaling.optional_number("attention_factor", low=0.0, high=1e6),
        short_factors=scaling.numbers("short_factor", dim // 2),
        long_factors=scaling.numbers("long_factor", dim // 2),
    )


def reach(rope: RopeConfig, max_position: int) -> int:
    """Positions the model can use: yarn reaches factor times its original length, whatever the config's own maximum."""
    if rope.kind != "yarn" or rope.original_max_position is None:
        return max_position
    reach = max(max_position, math.floor(rope.factor * rope.original_max_position))
    limit = LIMITS["max_position_embeddings"][1]
    if reach > limit:
        raise ModelError(f"config.json: yarn factor {rope.factor:g} reaches {reach} positions, the most is {limit}")
    if reach > max_position:
        _log.info("config.json: yarn reaches %d positions, past max_position_embeddings = %d", reach, max_position)
    return reach
