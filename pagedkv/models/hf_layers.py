"""What differs from layer to layer in a Hugging Face config.json: windows, rope or none, experts or none."""

from __future__ import annotations

from typing import Any

from pagedkv.models.config import ExpertsConfig
from pagedkv.models.hf_families import Family
from pagedkv.models.hf_fields import Fields

Windows = tuple[int | None, ...]
_QWEN_WINDOW, _QWEN_FIRST_WINDOW_LAYER = 4096, 28
_NO_ROPE_EVERY = 4
"""What transformers assumes where a config leaves the field out."""


def windows(fields: Fields, family: Family, layers: int, unturned: tuple[int, ...] = ()) -> Windows:
    """Each layer's sliding window, as the family decides it; `layer_types` must agree. `unturned`: without rope."""
    kinds = _layer_types(fields, layers)
    if family.windows == "qwen":
        return _qwen_windows(fields, kinds, layers)
    if family.windows == "pattern":
        return _pattern_windows(fields, family, kinds, layers)
    if family.windows == "unturned":
        return _unturned_windows(fields, kinds, layers, unturned)
    window = fields.optional_integer("sliding_window")
    if family.windows == "switched" and not fields.flag("use_sliding_window", False):
        window = None
    if family.windows == "all" and family.default_window is not None and not fields.has("sliding_window"):
        window = fields.assumed("sliding_window", family.default_window)
    if family.windows is None and window is not None:
        raise fields.wrong("sliding_window", "null or absent: this family has none")
    if kinds is not None and kinds != ["full_attention" if window is None else "sliding_attention"] * layers:
        raise fields.wrong("layer_types", f"the same for all layers, in agreement with sliding_window ({window})")
    return (window,) * layers


def _layer_types(fields: Fields, layers: int) -> list[str] | None:
    kinds = fields.take("layer_types")
    known = ("full_attention", "sliding_attention")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise fields.wrong("layer_types", f"{layers} entries (one a layer), each of {', '.join(known)}")
    return kinds


def _by_kind(fields: Fields, kinds: list[str], window: int | None) -> Windows:
    if window is None and "sliding_attention" in kinds:
        raise fields.wrong("layer_types", "without sliding_attention, since no sliding window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _qwen_windows(fields: Fields, kinds: list[str] | None, layers: int) -> Windows:
    """Windows only with `use_sliding_window`: by `layer_types`, else from layer `max_window_layers` on."""
    on = fields.flag("use_sliding_window", False)
    window, first = fields.optional_integer("sliding_window"), fields.optional_integer("max_window_layers")
    if on and not fields.has("sliding_window"):
        window = fields.assumed("sliding_window", _QWEN_WINDOW)
    if on and kinds is None and first is None:
        first = fields.assumed("max_window_layers", _QWEN_FIRST_WINDOW_LAYER)
    window = window if on else None
    if kinds is None:
        return tuple(window if i >= (first or 0) else None for i in range(layers))
    return _by_kind(fields, kinds, window)


def _pattern_windows(fields: Fields, family: Family, kinds: list[str] | None, layers: int) -> Windows:
    """Windows by `layer_types`, else in all layers but each `sliding_window_pattern`-th."""
    window = fields.optional_integer("sliding_window")
    if not fields.has("sliding_window"):
        window = fields.assumed("sliding_window", family.default_window)
    names = ("sliding_window_pattern", "_sliding_window_pattern") if family.default_local_theta else ()
    given = [every for every in map(fields.optional_integer, names) if every is not None]
    if kinds is None:
        every = given[0] if given else family.window_every
        kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    return _by_kind(fields, kinds, window)


def _unturned_windows(fields: Fields, kinds: list[str] | None, layers: int, unturned: tuple[int, ...]) -> Windows:
    """With `use_sliding_window`, by `layer_types`, else in the layers without rope."""
    on, window = fields.flag("use_sliding_window", False), fields.optional_integer("sliding_window")
    if kinds is None:
        return tuple(window if on and i in unturned else None for i in range(layers))
    return _by_kind(fields, kinds, window if on else None)


def no_rope_layers(fields: Fields, family: Family, layers: int) -> tuple[int, ...]:
    """The layers whose heads are not turned: where `no_rope_layers` holds 0, else each `no_rope_layer_interval`-th."""
    if not family.skips_rope:
        return ()
    turned, every = fields.take("no_rope_layers"), fields.optional_integer("no_rope_layer_interval")
    if turned is None:
        every = fields.assumed("no_rope_layer_interval", _NO_ROPE_EVERY) if every is None else every
        return tuple(i for i in range(layers) if (i + 1) % every == 0)
    if not isinstance(turned, list) or len(turned) < layers or any(mark not in (0, 1) for mark in turned):
        raise fields.wrong("no_rope_layers", f"at least {layers} entries (one a layer): 1 with rope, 0 without")
    return tuple(i for i in range(layers) if not turned[i])


def experts(fields: Fields, family: Family, layers: int) -> ExpertsConfig | None:
    """The experts of the families that have them."""
    if family.experts == "mixtral":
        return ExpertsConfig(
            **_routing(fields, "num_local_experts"),
            intermediate_size=fields.integer("intermediate_size"),
            normalize=True,
            block="block_sparse_moe",
            names=("w1", "w3", "w2"),
        )
    if family.experts == "qwen":
        return ExpertsConfig(
            **_routing(fields, "num_experts" if fields.has("num_experts") else "num_local_experts"),
            intermediate_size=fields.integer("moe_intermediate_size"),
            normalize=fields.flag("norm_topk_prob", False),
            dense_layers=_dense_layers(fields, layers),
        )
    return None


def _routing(fields: Fields, name: str) -> dict[str, Any]:
    num, per_token = fields.integer(name), fields.integer("num_experts_per_tok")
    if per_token > num:
        raise fields.wrong("num_experts_per_tok", f"at most {name} ({num})")
    return {"num": num, "per_token": per_token}


def _dense_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """The layers in `mlp_only_layers`, and all but each `decoder_sparse_step`-th."""
    plain, step = fields.take("mlp_only_layers"), fields.integer("decoder_sparse_step", 1)
    if plain is not None and (not isinstance(plain, list) or any(type(i) is not int for i in plain)):
        raise fields.wrong("mlp_only_layers", "a list of layer numbers")
    return tuple(i for i in range(layers) if i in (plain or []) or (i + 1) % step)
