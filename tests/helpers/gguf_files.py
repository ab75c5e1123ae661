"""Small GGUF files, written with the `gguf` package: the independent side of many tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.helpers.tiny_models import VOCAB_SIZE

ARCHITECTURE_KEYS: dict[str, Any] = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 48,
    "feed_forward_length": 80,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
}
"""The sizes of `tests.helpers.tiny_models`, under GGUF's names."""

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level vocabulary, in the order of GPT-2's table."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = {byte: 256 + rank for rank, byte in enumerate(byte for byte in range(256) if byte not in plain)}
    return [chr(moved.get(byte, byte)) for byte in range(256)]


def byte_vocabulary(size: int = VOCAB_SIZE) -> dict[str, Any]:
    """Tokenizer keys: bytes, five merges, two control tokens, and unused tokens up to `size`."""
    merges = ["h e", "l l", "he ll", "Ġ w", "o r"]
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges), "<|im_start|>", "<|im_end|>"]
    types = [1] * 261 + [3, 3] + [5] * (size - 263)
    tokens += [f"[UNUSED_{index}]" for index in range(263, size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 261,
        "tokenizer.ggml.eos_token_id": 262,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }


def write_gguf(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write a file; a key without a dot before `general` or `tokenizer` belongs to the architecture.

    `types` quantizes those tensors, or names the type of one that is given as bytes. A value of a key of type float is
    written as float32, an int as uint32.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        full = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{key}"
        _add(writer, full, value)
    for name, array in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        elif array.dtype == np.uint8:
            writer.add_tensor(name, array, raw_dtype=kind)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """q or k rows in llama.cpp's order: row 2i of a head is row i here, row 2i + 1 is row i + dim / 2."""
    dim = rows.shape[0] // num_heads
    order = [
        head * dim + half * (dim // 2) + i for head in range(num_heads) for i in range(dim // 2) for half in (0, 1)
    ]
    return rows[order]


def from_state_dict(
    state: Mapping[str, Any], architecture: str, heads: int = 4, kv_heads: int = 2
) -> dict[str, np.ndarray]:
    """The tensors of a transformers model as a GGUF file of `architecture` holds them, float32."""
    tensors = {}
    for name, value in state.items():
        rows = value.detach().float().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            rows = interleaved(rows, heads if "q_proj" in name else kv_heads)
        tensors[_gguf_name(name)] = rows
    return tensors


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    index, inner = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{index}.{_NAMES[inner]}.{kind}"


_ARCHITECTURES = {"gemma3_text": "gemma3", "mixtral": "llama", "qwen3_moe": "qwen3moe"}


def convert(model: Any, path: Path) -> Path:
    """Write a transformers model as llama.cpp's converter does; names are those of the gguf package."""
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rows = value.detach().float().numpy()
        for full, part in _split_experts(name, rows):
            theirs = table.get_name(full, (".weight", ".bias"))
            assert theirs is not None, full
            tensors[theirs] = _as_stored(full, part, architecture, config)
    scaling = config.rope_parameters if config.model_type == "phi3" else {}
    for kind_of in ("short", "long"):
        if f"{kind_of}_factor" in scaling:
            tensors[f"rope_factors_{kind_of}.weight"] = np.array(scaling[f"{kind_of}_factor"], np.float32)
    return write_gguf(path, architecture, _converted_keys(config, architecture) | byte_vocabulary(), tensors)


def _split_experts(name: str, rows: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """transformers keeps gate and up of all experts as one tensor [experts, 2 inner, hidden]."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(rows, 2, axis=1)
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
    return [(f"{name}.weight" if name.endswith("experts.down_proj") else name, rows)]


def _as_stored(name: str, rows: np.ndarray, architecture: str, config: Any) -> np.ndarray:
    if architecture in ("llama", "granite", "smollm3") and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return np.ascontiguousarray(interleaved(rows, heads))
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return rows + np.float32(1)
    return np.ascontiguousarray(rows)


def _converted_keys(config: Any, architecture: str) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if architecture in ("gemma2", "gemma3", "qwen3moe"):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if rope["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    window = getattr(config, "sliding_window", None)
    if window is not None or architecture == "phi3":
        keys["attention.sliding_window"] = window or 0
    return keys | _family_keys(config, architecture, head_dim)


def _family_keys(config: Any, architecture: str, head_dim: int) -> dict[str, Any]:
    if architecture == "gemma2":
        return {
            "attn_logit_softcapping": float(config.attn_logit_softcapping),
            "final_logit_softcapping": float(config.final_logit_softcapping),
        }
    if architecture == "granite":
        return {
            "attention.scale": float(config.attention_multiplier),
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
        }
    if architecture == "phi3":
        return _phi3_keys(config, head_dim)
    if getattr(config, "num_local_experts", None):
        inner = {"expert_feed_forward_length": config.moe_intermediate_size} if architecture == "qwen3moe" else {}
        return {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok, **inner}
    return {}


def _phi3_keys(config: Any, head_dim: int) -> dict[str, Any]:
    original = config.original_max_position_embeddings
    scale = config.max_position_embeddings / original
    keys = {
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": int(head_dim * config.rope_parameters["partial_rotary_factor"]),
    }
    if config.rope_parameters["rope_type"] == "longrope":
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        keys["rope.scaling.attn_factor"] = factor
    return keys


def random_k_blocks(name: str, rows: int, columns: int, seed: int = 0, scale: float = 0.01) -> np.ndarray:
    """Rows [rows, bytes] of a K type: random codes and group scales, block scales up to `scale`."""
    size, count = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // size, count), np.uint8)
    for at in (208,) if name == "Q6_K" else (0, 2):
        halves = (rng.random((rows, columns // size, 1)) * scale).astype(np.float16)
        blocks[:, :, at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def tiny_tensors(seed: int = 0, layers: int = 3, vocab: int = VOCAB_SIZE) -> dict[str, np.ndarray]:
    """Random tensors that fit `ARCHITECTURE_KEYS`."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, Sequence[int]] = {"token_embd.weight": (vocab, 48), "output_norm.weight": (48,)}
    layer = {
        "attn_norm": (48,),
        "ffn_norm": (48,),
        "attn_q": (48, 48),
        "attn_k": (24, 48),
        "attn_v": (24, 48),
        "attn_output": (48, 48),
        "ffn_gate": (80, 48),
        "ffn_up": (80, 48),
        "ffn_down": (48, 80),
    }
    for index in range(layers):
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


PACKED_KEYS: dict[str, Any] = ARCHITECTURE_KEYS | {
    "block_count": 2,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "vocab_size": VOCAB_SIZE,
}
"""Sizes whose rows are whole blocks of 32."""


def quantized_file(
    path: Path,
    kinds: Mapping[str, str],
    *,
    architecture: str = "llama",
    tied: bool = True,
    experts: int = 0,
    seed: int = 0,
) -> Path:
    """A tiny model whose matrices have the type of the last key of `kinds` that their name contains ("": all).

    The architecture qwen2 has biases of q, k and v; with `experts` the feed-forward is a mixture of so many.
    """
    rng = np.random.default_rng(seed)
    layer = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    if experts:
        layer |= {"ffn_gate_inp": (experts, 64)}
        layer |= {f"ffn_{name}_exps": (experts, 96, 64) for name in ("gate", "up")} | {
            "ffn_down_exps": (experts, 64, 96)
        }
    else:
        layer |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    shapes: dict[str, Sequence[int]] = {"token_embd.weight": (VOCAB_SIZE, 64)}
    shapes |= {} if tied else {"output.weight": (VOCAB_SIZE, 64)}
    shapes |= {f"blk.{index}.{name}.weight": shape for index in range(2) for name, shape in layer.items()}
    tensors = {name: rng.standard_normal(shape, np.float32) * np.float32(0.2) for name, shape in shapes.items()}
    types = {name: kind for name in tensors if (kind := _last_match(name, kinds)) != "F32" and "gate_inp" not in name}
    norms = ["output_norm.weight", *(f"blk.{i}.{name}_norm.weight" for i in range(2) for name in ("attn", "ffn"))]
    tensors |= {name: 1 + rng.standard_normal(64, np.float32) * np.float32(0.1) for name in norms}
    if architecture == "qwen2":
        sizes = {"q": 64, "k": 32, "v": 32}
        tensors |= {
            f"blk.{i}.attn_{name}.bias": rng.standard_normal(size, np.float32)
            for i in range(2)
            for name, size in sizes.items()
        }
    keys = PACKED_KEYS | byte_vocabulary() | ({"expert_count": experts, "expert_used_count": 2} if experts else {})
    named = {name: gguf.GGMLQuantizationType[kind] for name, kind in types.items()}
    return write_gguf(path, architecture, keys, tensors, named)


def _last_match(name: str, kinds: Mapping[str, str]) -> str:
    return [kind for part, kind in kinds.items() if part in name][-1]
