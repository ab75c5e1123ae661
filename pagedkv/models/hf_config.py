"""From a Hugging Face config.json to a `ModelConfig`, strictly: nothing that could change a result is skipped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from pagedkv.api.errors import ModelError
from pagedkv.models.config import ModelConfig
from pagedkv.models.hf_families import FAMILIES, Family
from pagedkv.models.hf_fields import Fields, show
from pagedkv.models.hf_layers import experts, no_rope_layers, windows
from pagedkv.models.hf_rope import reach, ropes
from pagedkv.models.pooling import MODULES, Pooling

__all__ = ["FAMILIES", "parse_hf_config"]

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_GELU_TANH = "gelu_pytorch_tanh"
_OF_POOLING = frozenset({"is_matryoshka", "matryoshka_dimensions"})


def parse_hf_config(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    pooling: Pooling | None = None,
) -> ModelConfig:
    """Read config.json and generation_config.json (None: there is none), parsed as JSON.

    `pooling`: what the files beside them say of vectors; a model that gives vectors may come without its head.
    Raises `ModelError` that names every field which is unknown, ill-typed, out of range or contradictory.
    """
    fields = Fields(config, "config.json")
    family = _family(fields, pooling is not None)
    sizes = _sizes(fields, family)
    layers, max_position = sizes["num_layers"], sizes["max_position"]
    rope, local_rope = ropes(fields, family, sizes["head_dim"], max_position)
    unturned = no_rope_layers(fields, family, layers)
    parsed = ModelConfig(
        **{**sizes, "max_position": reach(rope, max_position)},
        **_biases(fields, family),
        **_departures(fields, family, sizes["hidden_size"]),
        architecture=family.architecture,
        rms_norm_eps=fields.number("rms_norm_eps", family.default_eps, low=0.0, high=1.0),
        rope=rope,
        local_rope=local_rope,
        no_rope_layers=unturned,
        windows=windows(fields, family, layers, unturned),
        experts=experts(fields, family, layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings", family.default_tied),
        qk_norm=family.qk_norm,
        fused=family.fused,
        dtype=_dtype(fields),
        bos_token_id=_begin_id(fields, generation_config, sizes["vocab_size"]),
        eos_token_ids=_end_ids(fields, generation_config, sizes["vocab_size"]),
    )
    fields.ignore(family.ignored if pooling is None else family.ignored | _OF_POOLING)
    fields.refuse_rest()
    return parsed.pooled(pooling)


def _departures(fields: Fields, family: Family, hidden: int) -> dict[str, Any]:
    """Where Gemma and Granite compute otherwise than Llama."""
    departures: dict[str, Any] = {}
    if family.gemma:
        departures = {
            "activation": "gelu_tanh",
            "wide_norms": True,
            "norm_offset": 1.0,
            "post_norms": True,
            "embedding_multiplier": math.sqrt(hidden),
            "attention_scale": fields.number("query_pre_attn_scalar", 256.0, low=0.0, high=1e9) ** -0.5,
        }
    if family.softcaps is not None:
        departures |= _softcaps(fields, family.softcaps)
    if family.multipliers:
        departures |= {
            "embedding_multiplier": fields.number("embedding_multiplier", 1.0, low=0.0, high=1e6),
            "residual_multiplier": fields.number("residual_multiplier", 1.0, low=0.0, high=1e6),
            "attention_scale": fields.number("attention_multiplier", 1.0, low=0.0, high=1e6),
            "logit_divisor": fields.number("logits_scaling", 1.0, low=0.0, high=1e6),
        }
    return departures


def _softcaps(fields: Fields, defaults: tuple[float | None, float | None]) -> dict[str, float | None]:
    """Null is none at all; an absent one is the family's own."""
    caps: dict[str, float | None] = {}
    named = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    for (ours, theirs), default in zip(named.items(), defaults, strict=True):
        caps[ours] = fields.optional_number(theirs, low=0.0, high=1e6)
        if default is not None and not fields.has(theirs):
            caps[ours] = fields.assumed(theirs, default)
    if defaults[0] is None and caps["attention_softcap"] is not None:
        raise fields.wrong("attn_logit_softcapping", "null or absent: this family's attention has no softcap")
    return caps


def _family(fields: Fields, headless: bool) -> Family:
    """The model's family; refuses other kinds, quantized weights and code of the model's own by name.

    `headless`: its class without a head will do.
    """
    kind = fields.text("model_type")
    family = FAMILIES.get(kind)
    if family is None and fields.take("text_config") is not None:
        raise ModelError(
            f"config.json: model_type {show(kind)} has other parts beside its text_config, which are not built yet; "
            f"use a text-only model; supported: {', '.join(FAMILIES)}"
        )
    if family is None:
        raise ModelError(f"config.json: model_type {show(kind)} is not supported; supported: {', '.join(FAMILIES)}")
    _check_class(fields, family, headless)
    _refuse_quantization(fields)
    _refuse_own_code(fields, family)
    _check_activation(fields, family)
    return family


def _check_class(fields: Fields, family: Family, headless: bool) -> None:
    names, kind = fields.take("architectures"), fields.take("model_type")
    if names in (None, [family.architecture]) or (headless and names == [family.bare]):
        return
    what = "the text model with its language-model head"
    if names == [family.bare]:
        what += f"; without one, {MODULES} and a pooling config beside it would have to say how it makes vectors"
    raise ModelError(
        f"config.json: architectures {show(names)} is not supported; for model_type {kind!r} only "
        f"[{family.architecture!r}] is, {what}"
    )


def _check_activation(fields: Fields, family: Family) -> None:
    if not family.gemma:
        if fields.take("hidden_act") not in (None, "silu"):
            raise fields.wrong("hidden_act", "'silu', the only activation supported")
        return
    # Gemma's first files say gelu in hidden_act, by mistake: hidden_activation is what counts.
    fields.ignore(["hidden_act"])
    if fields.take("hidden_activation") not in (None, _GELU_TANH):
        raise fields.wrong("hidden_activation", f"{_GELU_TANH!r}, the only one supported in this family")


def _refuse_quantization(fields: Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        value = fields.take(name)
        if value is not None:
            method = value.get("quant_method") if isinstance(value, Mapping) else value
            raise ModelError(
                f"config.json: {name} (method {show(method)}) is not supported; use the unquantized model or a GGUF"
            )


def _refuse_own_code(fields: Fields, family: Family) -> None:
    """An auto_map that names a model class means that the weights are made for code in the model's folder."""
    value = fields.take("auto_map")
    classes = [k for k in value if str(k).startswith("AutoModel")] if isinstance(value, Mapping) else value
    if family.brings_code and isinstance(value, Mapping):
        # The same model that transformers has built in under this name.
        classes = [k for k in classes or [] if not str(value[k]).endswith(f".{family.architecture}")]
    if classes:
        raise ModelError(
            f"config.json: auto_map {show(value)} brings model code of its own, which pagedkv does not run; remove "
            "the field if the model is a plain one of its model_type"
        )


def _sizes(fields: Fields, family: Family) -> dict[str, Any]:
    """The model's shape, consistent in itself."""
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = fields.integer("num_key_value_heads", heads if family.kv_heads_default_to_heads else None)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None and family.default_head_dim is not None:
        head_dim = fields.assumed("head_dim", family.default_head_dim)
    if head_dim is None and hidden % heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({heads}) where head_dim is not given")
    head_dim = head_dim or hidden // heads
    if head_dim % 2:
        raise ModelError(f"config.json: a head_dim of {head_dim} cannot turn in pairs; rope needs an even one")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position": fields.integer("max_position_embeddings"),
    }


def _biases(fields: Fields, family: Family) -> dict[str, Any]:
    attention = fields.flag("attention_bias", family.always_qkv_bias)
    if family.always_qkv_bias and not attention:
        raise fields.wrong("attention_bias", "true or absent: this family's q, k and v have biases")
    if attention and not (family.always_qkv_bias or family.may_have_attention_bias):
        raise fields.wrong("attention_bias", "false or absent: this family has none")
    mlp = fields.flag("mlp_bias", False)
    if mlp and not family.may_have_mlp_bias:
        raise fields.wrong("mlp_bias", "false or absent: this family has none")
    return {"qkv_bias": attention, "o_bias": attention and family.may_have_attention_bias, "mlp_bias": mlp}


def _dtype(fields: Fields) -> str | None:
    new, old = fields.take("dtype"), fields.take("torch_dtype")
    if new is not None and old is not None and new != old:
        raise fields.wrong("dtype", f"equal to torch_dtype ({show(old)})")
    name = old if new is None else new
    if name is None:
        return None
    if not isinstance(name, str) or name not in _DTYPES:
        raise fields.wrong("torch_dtype" if new is None else "dtype", f"one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _end_ids(fields: Fields, generation: Mapping[str, Any] | None, vocab_size: int) -> tuple[int, ...]:
    """All ids that end a text, generation_config's first, each once."""
    own = _ids(fields, "eos_token_id", vocab_size)
    theirs = _ids(
        Fields({} if generation is None else generation, "generation_config.json"), "eos_token_id", vocab_size
    )
    return tuple(dict.fromkeys((*theirs, *own)))


def _begin_id(fields: Fields, generation: Mapping[str, Any] | None, vocab_size: int) -> int | None:
    own = _ids(fields, "bos_token_id", vocab_size)
    theirs = _ids(
        Fields({} if generation is None else generation, "generation_config.json"), "bos_token_id", vocab_size
    )
    return next(iter((*own, *theirs)), None)


def _ids(fields: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    value = fields.take(name)
    ids: Iterable[Any] = () if value is None else value if isinstance(value, list) else (value,)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size:
            raise fields.wrong(name, f"a token id, or a list of them, from 0 to {vocab_size - 1}")
    return tuple(ids)
