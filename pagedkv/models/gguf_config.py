"""From the metadata of a GGUF file to a `ModelConfig`, and from its tensor names to those of Hugging Face.

What changes the computation and is not understood is refused by name, never ignored. Key names:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and `llama-arch.cpp` of llama.cpp.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from pagedkv.api.errors import ModelError
from pagedkv.models.config import ModelConfig, RopeConfig
from pagedkv.models.gguf import ArrayRef, GgufFile
from pagedkv.models.gguf_quants import READABLE_NAMES, dequantize_into

_log = logging.getLogger("pagedkv.models")

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
INTERLEAVED_ROPE = ("llama",)
"""Architectures whose q and k rows llama.cpp stores in pairs (2i, 2i + 1) instead of halves (i, i + dim / 2)."""

ROPE_FREQS = "rope_freqs.weight"
DTYPES: Mapping[str, str] = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
CONTROL = 3

END_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Tokens that end a text in the model families that write them, whatever the file's own end token is."""

_GLOBAL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# Keys that mean "as usual" with one of these values; with any other the model computes something else.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
# Keys that describe the file or its making.
_IGNORED = frozenset({"vocab_size", "attention.layer_norm_epsilon", "rope.scaling.finetuned"})


class _Keys:
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

    def wrong(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.file.path}: metadata key {self.prefix + key!r} {what}.")

    def refuse_unread(self) -> None:
        """Refuse every key that nothing has read and that is not at a value without effect."""
        for full, value in self.file.metadata.items():
            key = full.removeprefix(self.prefix)
            if key == full or key in self.read or key in _IGNORED or value in _NEUTRAL.get(key, ()):
                continue
            shown = "an array" if isinstance(value, ArrayRef) else repr(value)
            raise self.wrong(key, f"is {shown}: this changes how the model computes in a way that is not built yet")


def parse_gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration of the model in `file`.

    Raises `ModelError` naming the architecture, metadata key or tensor type that cannot be run.
    """
    architecture = _architecture(file)
    _check_types(file)
    keys = _Keys(file, architecture)
    num_layers = keys.count("block_count", most=max(1, len(file.tensors)))
    num_heads = keys.count("attention.head_count")
    hidden = keys.count("embedding_length")
    head_dim = _head_dim(keys, hidden, num_heads)
    config = ModelConfig(
        architecture=ARCHITECTURES[architecture],
        vocab_size=_vocab_size(file, architecture),
        hidden_size=hidden,
        intermediate_size=keys.count("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(keys, num_heads),
        head_dim=head_dim,
        max_position=keys.count("context_length", most=1 << 24),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, architecture, head_dim),
        windows=(_window(keys),) * num_layers,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        dtype=_dtype(file),
        bos_token_id=token_id(file, "bos"),
        eos_token_ids=end_ids(file),
    )
    keys.refuse_unread()
    return config


def _architecture(file: GgufFile) -> str:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{file.path}: holds a {kind!r}, not a model. Pass the file of the model itself.")
    if (parts := file.metadata.get("split.count", 0)) not in (0, 1):
        raise ModelError(
            f"{file.path}: one of {parts} parts of a split model. Merge them with "
            "`llama-gguf-split --merge FIRST_PART OUTPUT` and open the result."
        )
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{file.path}: architecture {architecture!r} cannot be run; supported in GGUF are {known}.")
    return str(architecture)


def _check_types(file: GgufFile) -> None:
    kinds = Counter(info.type.name for info in file.tensors.values())
    unreadable = sorted(set(kinds) - set(READABLE_NAMES))
    if unreadable:
        listed = ", ".join(f"{name} ({count})" for name, count in kinds.most_common())
        raise ModelError(
            f"{file.path}: tensor types {', '.join(unreadable)} cannot be read; supported are "
            f"{', '.join(READABLE_NAMES)}. The file holds {listed}. Get a Q8_0, Q6_K or Q4_K file of this model."
        )


def _head_dim(keys: _Keys, hidden: int, num_heads: int) -> int:
    head_dim = keys.count("attention.key_length", max(1, hidden // num_heads), most=1 << 16)
    if head_dim % 2:
        raise keys.wrong("attention.key_length", f"gives a head dimension of {head_dim}, which is odd")
    if keys.count("attention.value_length", head_dim, most=1 << 16) != head_dim:
        raise keys.wrong("attention.value_length", "differs from attention.key_length, which cannot be run yet")
    return head_dim


def _kv_heads(keys: _Keys, num_heads: int) -> int:
    kv_heads = keys.count("attention.head_count_kv", num_heads)
    if num_heads % kv_heads:
        raise keys.wrong("attention.head_count_kv", f"is {kv_heads}, which does not divide {num_heads} heads")
    return kv_heads


def _vocab_size(file: GgufFile, architecture: str) -> int:
    """The rows of the embedding, which is what the model really has."""
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing or no matrix. Download the file again.")
    stated = file.metadata.get(f"{architecture}.vocab_size", info.shape[0])
    if stated != info.shape[0]:
        _log.warning("%s: vocab_size says %s, the embedding has %d rows; using those", file.path, stated, info.shape[0])
    return info.shape[0]


def _window(keys: _Keys) -> int | None:
    window = keys.get("attention.sliding_window")
    return None if window in (None, 0) else keys.count("attention.sliding_window", most=1 << 24)


def _rope(keys: _Keys, architecture: str, head_dim: int) -> RopeConfig:
    dim = keys.count("rope.dimension_count", head_dim)
    if dim > head_dim or dim % 2 or (architecture in INTERLEAVED_ROPE and dim != head_dim):
        raise keys.wrong("rope.dimension_count", f"is {dim}, which cannot be run with heads of {head_dim}")
    theta = keys.number("rope.freq_base", 10000.0)
    return RopeConfig(theta=theta, dim=dim, freq_factors=_freq_factors(keys.file, dim), **_rope_scaling(keys))


def _rope_scaling(keys: _Keys) -> dict[str, Any]:
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


def _freq_factors(file: GgufFile, dim: int) -> tuple[float, ...] | None:
    info = file.tensors.get(ROPE_FREQS)
    if info is None:
        return None
    if info.shape != (dim // 2,):
        raise ModelError(f"{file.path}: tensor {ROPE_FREQS!r} has shape {list(info.shape)}, not [{dim // 2}].")
    factors = np.empty(dim // 2, np.float32)
    dequantize_into(file.raw(info), info.type, factors)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(f"{file.path}: tensor {ROPE_FREQS!r} holds values that are not above 0.")
    return tuple(float(value) for value in factors)


def _dtype(file: GgufFile) -> str | None:
    return DTYPES.get(main_type(file))


def main_type(file: GgufFile) -> str:
    """The tensor type that most bytes of the file have."""
    sizes: Counter[str] = Counter()
    for info in file.tensors.values():
        sizes[info.type.name] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else "F32"


def token_id(file: GgufFile, name: str) -> int | None:
    """The id under `tokenizer.ggml.<name>_token_id`; SentencePiece has 1 (bos), 2 (eos), 0 by default."""
    key = f"tokenizer.ggml.{name}_token_id"
    usual = {"bos": 1, "eos": 2, "unknown": 0} if file.metadata.get("tokenizer.ggml.model") == "llama" else {}
    value = file.metadata.get(key, usual.get(name))
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if value is None or value == 0xFFFFFFFF:
        return None
    if type(value) is not int or value < 0 or (isinstance(tokens, ArrayRef) and value >= tokens.count):
        raise ModelError(f"{file.path}: metadata key {key!r} is {value!r}, which is no id of the vocabulary.")
    return value


def end_ids(file: GgufFile) -> tuple[int, ...]:
    """All ids that end a text: end of text, of turn, of message, and the tokens that are known to mean it."""
    named = [token_id(file, name) for name in ("eos", "eot", "eom")]
    ids = [value for value in named if value is not None]
    if "tokenizer.ggml.tokens" in file.metadata:
        ids += [index for index, text in enumerate(file.array("tokenizer.ggml.tokens")) if text in END_TEXTS]
    return tuple(dict.fromkeys(ids))


def gguf_name(name: str) -> str:
    """The name in GGUF files of the tensor that Hugging Face calls `name`."""
    stem, _, kind = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    _, _, index, inner = stem.split(".", 3)
    return f"blk.{index}.{_LAYER_NAMES[inner]}.{kind}"


def hf_name(name: str) -> str:
    """The inverse of `gguf_name`; a name without counterpart is returned as it is."""
    stem, _, kind = name.rpartition(".")
    for theirs, ours in _GLOBAL_NAMES.items():
        if stem == ours:
            return f"{theirs}.{kind}"
    if name.startswith("blk."):
        _, index, rest = stem.split(".", 2) if stem.count(".") >= 2 else ("", "", "")
        for theirs, ours in _LAYER_NAMES.items():
            if rest == ours:
                return f"model.layers.{index}.{theirs}.{kind}"
    return name
