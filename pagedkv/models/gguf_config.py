"""From the metadata of a GGUF file to a `ModelConfig`.

What changes the computation and is not understood is refused by name, never ignored. What a file leaves to its reader
follows `llama-model.cpp` of llama.cpp.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from pagedkv.api.errors import ModelError
from pagedkv.models.config import ExpertsConfig, ModelConfig
from pagedkv.models.gguf import ArrayRef, GgufFile
from pagedkv.models.gguf_keys import Keys
from pagedkv.models.gguf_rope import gguf_rope, local_rope
from pagedkv.models.pooling import gguf_pooling
from pagedkv.ops.gguf_quants import READABLE_NAMES

_log = logging.getLogger("pagedkv.models")

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_WINDOW_EVERY = {"gemma2": 2, "gemma3": 6}
"""Every n-th layer is without a window."""
_GEMMA2_WINDOW = 4096
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_LOCAL_THETA = {"gemma3": 10000.0}
_NO_ROPE_EVERY = 4

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


def parse_gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration of the model in `file`.

    Raises `ModelError` naming the architecture, metadata key or tensor type that cannot be run.
    """
    architecture = _architecture(file)
    _check_types(file)
    keys = Keys(file, architecture)
    num_layers = keys.count("block_count", most=max(1, len(file.tensors)))
    num_heads = keys.count("attention.head_count")
    hidden = keys.count("embedding_length")
    head_dim = _head_dim(keys, hidden, num_heads)
    rope = gguf_rope(keys, architecture, head_dim)
    experts = _experts(keys, architecture, num_layers)
    config = ModelConfig(
        **_departures(keys, architecture, hidden, num_layers, num_heads, head_dim),
        architecture="MixtralForCausalLM" if architecture == "llama" and experts else ARCHITECTURES[architecture],
        vocab_size=_vocab_size(file, architecture),
        hidden_size=hidden,
        intermediate_size=keys.count("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(keys, num_heads),
        head_dim=head_dim,
        max_position=keys.count("context_length", most=1 << 24),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        local_rope=local_rope(keys, rope.dim, _LOCAL_THETA.get(architecture)),
        no_rope_layers=_no_rope_layers(keys, architecture, num_layers),
        windows=_windows(keys, architecture, num_layers),
        experts=experts,
        tie_word_embeddings="output.weight" not in file.tensors,
        fused="blk.0.attn_qkv.weight" in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        dtype=_dtype(file),
        bos_token_id=token_id(file, "bos"),
        eos_token_ids=end_ids(file),
    )
    pooling = gguf_pooling(keys, hidden)
    keys.refuse_unread()
    return config.pooled(pooling)


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


def _head_dim(keys: Keys, hidden: int, num_heads: int) -> int:
    head_dim = keys.count("attention.key_length", max(1, hidden // num_heads), most=1 << 16)
    if head_dim % 2:
        raise keys.wrong("attention.key_length", f"gives a head dimension of {head_dim}, which is odd")
    if keys.count("attention.value_length", head_dim, most=1 << 16) != head_dim:
        raise keys.wrong("attention.value_length", "differs from attention.key_length, which cannot be run yet")
    return head_dim


def _kv_heads(keys: Keys, num_heads: int) -> int:
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


def _windows(keys: Keys, architecture: str, layers: int) -> tuple[int | None, ...]:
    window = keys.get("attention.sliding_window")
    if window is None and architecture == "gemma2":
        window = _GEMMA2_WINDOW
    elif window not in (None, 0):
        window = keys.count("attention.sliding_window", most=1 << 24)
    if architecture not in _WINDOW_EVERY:
        return (window or None,) * layers
    windowed = keys.flags("attention.sliding_window_pattern")
    if windowed is None:
        every = keys.count("attention.sliding_window_pattern", _WINDOW_EVERY[architecture])
        windowed = [(index + 1) % every != 0 for index in range(layers)]
    if len(windowed) != layers:
        raise keys.wrong("attention.sliding_window_pattern", f"has {len(windowed)} entries for {layers} layers")
    return tuple((window or None) if on else None for on in windowed)


def _no_rope_layers(keys: Keys, architecture: str, layers: int) -> tuple[int, ...]:
    if architecture == "smollm3":
        return tuple(range(_NO_ROPE_EVERY - 1, layers, _NO_ROPE_EVERY))
    # Granite's files use this key as the switch of rope.
    off = architecture == "granite" and keys.get("rope.scaling.finetuned") is False
    return tuple(range(layers)) if off else ()


def _departures(keys: Keys, architecture: str, hidden: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Where Gemma and Granite compute otherwise than Llama; Gemma's norms are stored with their 1 added."""
    if architecture in _WINDOW_EVERY:
        caps = (50.0, 30.0) if architecture == "gemma2" else (0.0, 0.0)
        large = layers == _GEMMA_27B_LAYERS[architecture]
        return {
            "activation": "gelu_tanh",
            "wide_norms": True,
            "post_norms": True,
            "embedding_multiplier": math.sqrt(hidden),
            "attention_scale": (hidden / heads if large else head_dim) ** -0.5,
            "attention_softcap": keys.number("attn_logit_softcapping", caps[0]) or None,
            "logit_softcap": keys.number("final_logit_softcapping", caps[1]) or None,
        }
    if architecture == "granite":
        return {
            "attention_scale": keys.number("attention.scale", 0.0) or None,
            "embedding_multiplier": keys.scale("embedding_scale", 1.0),
            "residual_multiplier": keys.scale("residual_scale", 1.0),
            "logit_divisor": keys.scale("logit_scale", 1.0),
        }
    return {}


def _experts(keys: Keys, architecture: str, layers: int) -> ExpertsConfig | None:
    """The experts of Mixtral (which is a llama here) and Qwen3-MoE, whose weights are always made to sum to 1."""
    if architecture not in ("llama", "qwen3moe") or keys.get("expert_count") in (None, 0):
        return None
    num, per_token = keys.count("expert_count", most=4096), keys.count("expert_used_count", most=4096)
    if per_token > num:
        raise keys.wrong("expert_used_count", f"is {per_token} of {num} experts")
    inner = keys.count("feed_forward_length", most=1 << 24)
    return ExpertsConfig(
        num=num,
        per_token=per_token,
        intermediate_size=keys.count("expert_feed_forward_length", inner, most=1 << 24),
        normalize=True,
        dense_layers=tuple(i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in keys.file.tensors),
    )


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
