"""From a Hugging Face config.json to a `ModelConfig`, strictly: nothing that could change a result is skipped.

Every field must be one of these, else `ModelError` names it:

- read here;
- in `_IGNORED`: known not to change inference;
- in `_NEUTRAL`: accepted at the one value that changes nothing;
- unknown but null: it says nothing. (false, 0 and "" do say something: `"causal": false` would turn a default off.)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagedkv.api.errors import ModelError
from pagedkv.models.config import ModelConfig, RopeConfig

_log = logging.getLogger("pagedkv.models")

DEFAULT_THETA = 10000.0
"""Rope's base where a config has none, as in transformers."""

_MISTRAL_WINDOW = 4096
_QWEN_WINDOW, _QWEN_FIRST_WINDOW_LAYER = 4096, 28
_QWEN3_HEAD_DIM = 128
"""What transformers assumes for these families where a config leaves the field out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a model_type fixes: its class with a head, its biases and norms, and which fields it may have."""

    architecture: str
    always_qkv_bias: bool = False
    may_have_attention_bias: bool = False
    may_have_mlp_bias: bool = False
    qk_norm: bool = False
    default_head_dim: int | None = None
    window_style: str | None = None


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(architecture="LlamaForCausalLM", may_have_attention_bias=True, may_have_mlp_bias=True),
    "mistral": _Family(architecture="MistralForCausalLM", window_style="mistral"),
    "qwen2": _Family(architecture="Qwen2ForCausalLM", always_qkv_bias=True, window_style="qwen"),
    "qwen3": _Family(
        architecture="Qwen3ForCausalLM",
        may_have_attention_bias=True,
        qk_norm=True,
        default_head_dim=_QWEN3_HEAD_DIM,
        window_style="qwen",
    ),
}

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

_LIMITS: Mapping[str, tuple[int, int]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**18),
    "intermediate_size": (1, 2**20),
    "num_hidden_layers": (1, 4096),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (2, 4096),
    "max_position_embeddings": (1, 2**24),
    "original_max_position_embeddings": (1, 2**24),
    "sliding_window": (1, 2**31 - 1),
    "max_window_layers": (0, 4096),
}
"""Sizes outside these are damage or an attack, not a model. Positions are exact in float32 up to 2**24."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PROVENANCE = _words(
    "_name_or_path name_or_path transformers_version transformers.js_config model_name _commit_hash tokenizer_class "
    "unsloth_version unsloth_fixed unsloth_processed_status base_model_name_or_path language license is_llama_config"
)
_TRAINING = _words(
    "initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop dropout gradient_checkpointing "
    "pretraining_tp pad_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id"
)
_HOW_A_LIBRARY_RUNS_IT = _words(
    "use_cache torchscript use_bfloat16 _attn_implementation attn_implementation _attn_implementation_autoset "
    "_attn_implementation_internal _flash_attn_2_enabled use_flash_attn use_flash_attention use_flash_attention_2 "
    "output_attentions output_hidden_states return_dict return_dict_in_generate output_scores tf_legacy_loss "
    "cache_implementation chunk_size_feed_forward"
)
_OTHER_TASKS = _words("id2label label2id num_labels problem_type finetuning_task task_specific_params")
_SAMPLING_DEFAULTS = _words(  # which older files keep here; requests carry their own
    "max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens prefix"
)
_IGNORED = _PROVENANCE | _TRAINING | _HOW_A_LIBRARY_RUNS_IT | _OTHER_TASKS | _SAMPLING_DEFAULTS

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "tie_last_hidden_states": (True, False),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "no_rope_layers": ([],),
    "per_layer_config": ({},),
}


def parse_hf_config(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read config.json and generation_config.json (None: there is none), parsed as JSON.

    Raises `ModelError` that names every field which is unknown, ill-typed, out of range or contradictory.
    """
    fields = _Fields(config, "config.json")
    family = _family(fields)
    sizes = _sizes(fields, family)
    rope = _rope(fields, sizes["head_dim"], sizes["max_position"])
    windows = _windows(fields, family, sizes["num_layers"])
    biases = _biases(fields, family)
    ends = _end_ids(fields, generation_config, sizes["vocab_size"])
    parsed = ModelConfig(
        **{**sizes, "max_position": _reach(rope, sizes["max_position"])},
        **biases,
        architecture=family.architecture,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        rope=rope,
        windows=windows,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qk_norm=family.qk_norm,
        dtype=_dtype(fields),
        bos_token_id=_begin_id(fields, generation_config, sizes["vocab_size"]),
        eos_token_ids=ends,
    )
    fields.refuse_rest()
    return parsed


class _Fields:
    """A JSON object whose fields are taken one by one, with types; `refuse_rest` names what nobody took."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{where} must hold a JSON object, not {_show(values)}; download the model again")
        self._values = values
        self._where = where
        self._taken: set[str] = set()

    def take(self, name: str) -> Any:
        """The value, None where it is null or absent."""
        self._taken.add(name)
        return self._values.get(name)

    def has(self, name: str) -> bool:
        return name in self._values

    def wrong(self, name: str, wanted: str) -> ModelError:
        """The error for a value that is not as it should be."""
        return ModelError(
            f"{self._where}: {name} is {_show(self._values.get(name))} but must be {wanted}; "
            "correct it or download the model again"
        )

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.optional_integer(name)
        if value is None and default is None:
            raise self.wrong(name, "given: the model's shape is unknown without it")
        return self.assumed(name, default) if value is None else value

    def optional_integer(self, name: str) -> int | None:
        value = self.take(name)
        low, high = _LIMITS[name]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self.optional_number(name, low=low, high=high)
        return self.assumed(name, default) if value is None else value

    def assumed(self, name: str, value: Any) -> Any:
        """`value`, for a field that the file leaves out, with a line that says so."""
        _log.info("%s: no %s; taken as %s, like transformers", self._where, name, value)
        return value

    def optional_number(self, name: str, *, low: float, high: float) -> float | None:
        """A finite number with low < value <= high."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
            raise self.wrong(name, f"a number above {low:g} and at most {high:g}")
        return float(value)

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def refuse_rest(self) -> None:
        """Raise for every field that was not taken and could change a result."""
        rest = [
            f"{name} = {_show(value)}"
            for name, value in self._values.items()
            if name not in self._taken and not _changes_nothing(name, value)
        ]
        if rest:
            raise ModelError(
                f"{self._where} has fields that pagedkv does not know, so it could compute something else than the "
                f"model means: {'; '.join(rest)}. If a field does not change inference, remove it from the file; "
                "otherwise this model needs a newer pagedkv"
            )


def _changes_nothing(name: str, value: Any) -> bool:
    if value is None or name in _IGNORED:
        return True
    return any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL.get(name, ()))


def _show(value: Any, limit: int = 80) -> str:
    """A value for a message, cut so that a hostile file cannot flood the terminal."""
    text = ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _family(fields: _Fields) -> _Family:
    """The model's family; refuses other kinds, quantized weights and code of the model's own by name."""
    kind = fields.text("model_type")
    family = FAMILIES.get(kind)
    if family is None:
        raise ModelError(f"config.json: model_type {_show(kind)} is not supported; supported: {', '.join(FAMILIES)}")
    names = fields.take("architectures")
    if names is not None and names != [family.architecture]:
        raise ModelError(
            f"config.json: architectures {_show(names)} is not supported; for model_type {kind!r} only "
            f"[{family.architecture!r}] is, the text model with its language-model head"
        )
    _refuse_quantization(fields)
    _refuse_own_code(fields)
    activation = fields.take("hidden_act")
    if activation not in (None, "silu"):
        raise fields.wrong("hidden_act", "'silu', the only activation supported")
    return family


def _refuse_quantization(fields: _Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        value = fields.take(name)
        if value is not None:
            method = value.get("quant_method") if isinstance(value, Mapping) else value
            raise ModelError(
                f"config.json: {name} (method {_show(method)}) is not supported; use the unquantized model or a GGUF"
            )


def _refuse_own_code(fields: _Fields) -> None:
    """An auto_map that names a model class means that the weights are made for code in the model's folder."""
    value = fields.take("auto_map")
    classes = [k for k in value if str(k).startswith("AutoModel")] if isinstance(value, Mapping) else value
    if classes:
        raise ModelError(
            f"config.json: auto_map {_show(value)} brings model code of its own, which pagedkv does not run; remove "
            "the field if the model is a plain one of its model_type"
        )


def _sizes(fields: _Fields, family: _Family) -> dict[str, Any]:
    """The model's shape, consistent in itself."""
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    # Only Llama's files leave this out: they are older than grouped queries.
    kv_heads = fields.integer("num_key_value_heads", heads if family.architecture == "LlamaForCausalLM" else None)
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


def _biases(fields: _Fields, family: _Family) -> dict[str, bool]:
    attention = fields.flag("attention_bias", family.always_qkv_bias)
    if family.always_qkv_bias and not attention:
        raise fields.wrong("attention_bias", "true or absent: this family's q, k and v have biases")
    if attention and not (family.always_qkv_bias or family.may_have_attention_bias):
        raise fields.wrong("attention_bias", "false or absent: this family has none")
    mlp = fields.flag("mlp_bias", False)
    if mlp and not family.may_have_mlp_bias:
        raise fields.wrong("mlp_bias", "false or absent: this family has none")
    return {"qkv_bias": attention, "o_bias": attention and family.may_have_attention_bias, "mlp_bias": mlp}


def _windows(fields: _Fields, family: _Family, layers: int) -> tuple[int | None, ...]:
    """Each layer's sliding window, as the family decides it; `layer_types` must agree."""
    kinds = _layer_types(fields, layers)
    if family.window_style == "qwen":
        return _qwen_windows(fields, kinds, layers)
    window = fields.optional_integer("sliding_window")
    if family.window_style == "mistral" and not fields.has("sliding_window"):
        window = fields.assumed("sliding_window", _MISTRAL_WINDOW)
    if family.window_style is None and window is not None:
        raise fields.wrong("sliding_window", "null or absent: this family has none")
    if kinds is not None and kinds != ["full_attention" if window is None else "sliding_attention"] * layers:
        raise fields.wrong("layer_types", f"the same for all layers, in agreement with sliding_window ({window})")
    return (window,) * layers


def _layer_types(fields: _Fields, layers: int) -> list[str] | None:
    kinds = fields.take("layer_types")
    known = ("full_attention", "sliding_attention")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise fields.wrong("layer_types", f"{layers} entries (one a layer), each of {', '.join(known)}")
    return kinds


def _qwen_windows(fields: _Fields, kinds: list[str] | None, layers: int) -> tuple[int | None, ...]:
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
    if window is None and "sliding_attention" in kinds:
        raise fields.wrong("layer_types", "without sliding_attention, since no sliding window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def _rope(fields: _Fields, head_dim: int, max_position: int) -> RopeConfig:
    """Rope from `rope_parameters` or the older `rope_scaling` with `rope_theta` beside it."""
    scaling = _rope_fields(fields)
    kind = _rope_kind(scaling)
    theta = _theta(fields, scaling)
    _refuse_partial(fields)
    _refuse_partial(scaling)
    original = _original_positions(fields, scaling) or max_position
    if kind == "default":
        parsed = RopeConfig(theta=theta, dim=head_dim)
    elif kind == "linear":
        parsed = RopeConfig(theta=theta, dim=head_dim, kind="linear", factor=_factor(scaling))
    elif kind == "llama3":
        parsed = _llama3(scaling, theta, head_dim, original)
    else:
        parsed = _yarn(scaling, theta, head_dim, original, max_position)
    scaling.refuse_rest()
    return parsed


def _rope_fields(fields: _Fields) -> _Fields:
    new, old = fields.take("rope_parameters"), fields.take("rope_scaling")
    if new and old and new != old:
        raise ModelError(
            f"config.json: rope_parameters {_show(new)} and rope_scaling {_show(old)} disagree; keep the right one"
        )
    name = "rope_parameters" if new else "rope_scaling"
    return _Fields(new or old or {}, f"config.json {name}")


def _rope_kind(scaling: _Fields) -> str:
    kind, older = scaling.take("rope_type"), scaling.take("type")
    if kind is not None and older is not None and kind != older:
        raise scaling.wrong("type", f"equal to rope_type ({_show(kind)})")
    kind = kind or older or "default"
    if kind not in _ROPE_KINDS:
        raise ModelError(
            f"config.json: rope type {_show(kind)} is not supported; supported: {', '.join(_ROPE_KINDS)}. "
            "Positions would be wrong without it, so the model is not loaded"
        )
    return kind


def _theta(fields: _Fields, scaling: _Fields) -> float:
    outer = fields.optional_number("rope_theta", low=1.0, high=1e12)
    inner = scaling.optional_number("rope_theta", low=1.0, high=1e12)
    if outer is not None and inner is not None and outer != inner:
        raise fields.wrong("rope_theta", f"equal to the rope_theta in its rope parameters ({inner:g})")
    return inner or outer or fields.assumed("rope_theta", DEFAULT_THETA)


def _original_positions(fields: _Fields, scaling: _Fields) -> int | None:
    """The length the model was trained at before its rope was stretched; newer files keep it with the rope fields."""
    name = "original_max_position_embeddings"
    outer, inner = fields.optional_integer(name), None
    if scaling.has(name) and _rope_kind(scaling) in ("llama3", "yarn"):
        inner = scaling.optional_integer(name)
    if outer is not None and inner is not None and outer != inner:
        raise fields.wrong(name, f"equal to the one in its rope parameters ({inner})")
    return inner or outer


def _refuse_partial(fields: _Fields) -> None:
    share = fields.take("partial_rotary_factor")
    if share is not None and (isinstance(share, bool) or share != 1):
        raise fields.wrong("partial_rotary_factor", "1 or absent: this family turns whole heads")


def _factor(scaling: _Fields) -> float:
    value = scaling.optional_number("factor", low=0.0, high=1e6)
    if value is None or value < 1.0:
        raise scaling.wrong("factor", "a number of at least 1")
    return value


def _llama3(scaling: _Fields, theta: float, dim: int, original: int) -> RopeConfig:
    low = scaling.optional_number("low_freq_factor", low=0.0, high=1e6)
    high = scaling.optional_number("high_freq_factor", low=0.0, high=1e6)
    if low is None or high is None or high <= low:
        raise scaling.wrong("high_freq_factor", f"given and above low_freq_factor ({_show(low)})")
    return RopeConfig(
        theta=theta,
        dim=dim,
        kind="llama3",
        factor=_factor(scaling),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )


def _yarn(scaling: _Fields, theta: float, dim: int, original: int, max_position: int) -> RopeConfig:
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


def _reach(rope: RopeConfig, max_position: int) -> int:
    """Positions the model can use: yarn reaches factor times its original length, whatever the config's own maximum."""
    if rope.kind != "yarn" or rope.original_max_position is None:
        return max_position
    reach = max(max_position, math.floor(rope.factor * rope.original_max_position))
    limit = _LIMITS["max_position_embeddings"][1]
    if reach > limit:
        raise ModelError(f"config.json: yarn factor {rope.factor:g} reaches {reach} positions, the most is {limit}")
    if reach > max_position:
        _log.info("config.json: yarn reaches %d positions, past max_position_embeddings = %d", reach, max_position)
    return reach


def _dtype(fields: _Fields) -> str | None:
    new, old = fields.take("dtype"), fields.take("torch_dtype")
    if new is not None and old is not None and new != old:
        raise fields.wrong("dtype", f"equal to torch_dtype ({_show(old)})")
    name = old if new is None else new
    if name is None:
        return None
    if not isinstance(name, str) or name not in _DTYPES:
        raise fields.wrong("torch_dtype" if new is None else "dtype", f"one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _end_ids(fields: _Fields, generation: Mapping[str, Any] | None, vocab_size: int) -> tuple[int, ...]:
    """All ids that end a text, generation_config's first, each once."""
    own = _ids(fields, "eos_token_id", vocab_size)
    theirs = _ids(
        _Fields({} if generation is None else generation, "generation_config.json"), "eos_token_id", vocab_size
    )
    return tuple(dict.fromkeys((*theirs, *own)))


def _begin_id(fields: _Fields, generation: Mapping[str, Any] | None, vocab_size: int) -> int | None:
    own = _ids(fields, "bos_token_id", vocab_size)
    theirs = _ids(
        _Fields({} if generation is None else generation, "generation_config.json"), "bos_token_id", vocab_size
    )
    return next(iter((*own, *theirs)), None)


def _ids(fields: _Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    value = fields.take(name)
    ids: Iterable[Any] = () if value is None else value if isinstance(value, list) else (value,)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size:
            raise fields.wrong(name, f"a token id, or a list of them, from 0 to {vocab_size - 1}")
    return tuple(ids)
