"""Tiny random models in Hugging Face layout, and what transformers says of them: the oracle of many tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

BOS, EOS = 256, 257
VOCAB_SIZE = 320
"""Rows of the embedding; the tokenizer knows only 258 of them."""

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}

FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 20},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "mistral_window": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_bias": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True, "num_key_value_heads": 4},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 5,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 20.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "query_pre_attn_scalar": 10,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "sliding_window": 20},
    "phi3_longrope": {
        "model_type": "phi3",
        "pad_token_id": 0,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "factor": 4.0,
            "short_factor": [1.0, 1.05, 1.1, 1.2, 1.4, 1.6],
            "long_factor": [1.0, 1.3, 2.0, 3.5, 6.0, 11.0],
        },
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "qwen3_moe_mixed": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.11,
        "logits_scaling": 2.5,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "smollm3": {"model_type": "smollm3", "pad_token_id": 0, "no_rope_layer_interval": 2},
}
"""Named variants: what each adds to a small common configuration."""


def tiny_model(
    tmp_path: Path, family: str = "llama", *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Save a random model of `family` under `tmp_path` and return its folder.

    `overrides` replace fields of the configuration. The folder holds config.json, model.safetensors,
    generation_config.json, tokenizer.json and tokenizer_config.json. The same arguments give the same weights.
    """
    model = build_model(family, seed=seed, **overrides)
    folder = tmp_path / f"tiny-{family}-{seed}-{len(list(tmp_path.iterdir()))}"
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def build_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """The transformers model itself, float32, eager attention, weights large enough that greedy texts vary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**_SHARED, **FAMILIES[family], **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    _randomize(model, seed)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.bos_token_id = config.bos_token_id
    return model.eval()


@torch.no_grad()
def _randomize(model: Any, seed: int) -> None:
    """Every parameter from one seed: norms near 1, biases visible, embeddings and matrices wide."""
    gemma = model.config.model_type.startswith("gemma")  # its norms add 1, its embeddings are scaled
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(0.2 * noise if gemma else 1.0 + 0.2 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.3 * noise)
        elif "embed" in name or "lm_head" in name:
            parameter.copy_((0.1 if gemma else 0.4) * noise)
        else:
            parameter.copy_(1.5 * parameter.shape[-1] ** -0.5 * noise)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of one token a byte, ids 0..255, then <bos> and <eos>; <bos> is put in front of every text."""
    by_byte = dict(zip(_byte_order(), _byte_characters(), strict=True))
    tokenizer = Tokenizer(models.BPE(vocab={by_byte[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        "chat_template": (
            "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        ),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1))


def _byte_order() -> list[int]:
    """Bytes in the order of `_byte_characters`: printable ones, then the rest (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printable + [b for b in range(256) if b not in printable]


def _byte_characters() -> list[str]:
    """The character that stands for each byte: itself when printable, else from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def hf_greedy(
    folder: Path, prompt_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = True, dtype: str = "float32"
) -> list[int]:
    """The greedy continuation by transformers, the prompt alone in its batch. An end id, if reached, is included.

    With `ignore_eos` an end id is a token like any other.
    """
    model = _loaded(folder, dtype)
    model.generation_config.eos_token_id = None if ignore_eos else model.config.eos_token_id
    ids = torch.tensor([list(prompt_ids)])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
        )
    return output[0, len(prompt_ids) :].tolist()


def hf_logits(folder: Path, ids: Sequence[int], *, dtype: str = "float32") -> torch.Tensor:
    """Logits [len(ids), vocab] of one whole sequence by transformers, as float32."""
    with torch.inference_mode():
        return _loaded(folder, dtype)(torch.tensor([list(ids)]), use_cache=False).logits[0].float()


_cache: dict[tuple[Path, str], Any] = {}


def _loaded(folder: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    key = (folder, dtype)
    if key not in _cache:
        _cache.clear()
        _cache[key] = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()
    return _cache[key]
