"""Tiny random models of families that run through the bridge, in Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.helpers.tiny_models import BOS, EOS, VOCAB_SIZE, write_tokenizer

_IDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "max_position_embeddings": 256,
}
_SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_OLD_SHAPE: dict[str, Any] = {key: _SHAPE[key] for key in _SHAPE if key != "num_key_value_heads"}
_FALCON: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "model_type": "falcon"}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}

BRIDGED: Mapping[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 256,
        "scale_attn_by_inverse_layer_idx": True,
    },
    "gpt_neox": {"model_type": "gpt_neox", **_OLD_SHAPE, "rotary_pct": 0.5},
    "opt": {"model_type": "opt", **_OLD_SHAPE, "ffn_dim": 80, "word_embed_proj_dim": 24},
    "falcon_new": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_multi_query": {**_FALCON, "multi_query": True, "bias": True},
    "falcon_many_heads": {**_FALCON, "multi_query": False, "parallel_attn": False},
    "olmo2": {"model_type": "olmo2", **_SHAPE},
    "starcoder2": {"model_type": "starcoder2", **_SHAPE, "sliding_window": 5},
    "phi": {"model_type": "phi", **_SHAPE, "partial_rotary_factor": 0.5},
    "cohere": {"model_type": "cohere", **_SHAPE, "logit_scale": 0.3, "use_qk_norm": True},
    "gptj": {"model_type": "gptj", "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 8},
    "stablelm": {"model_type": "stablelm", **_SHAPE, "use_parallel_residual": True, "partial_rotary_factor": 0.5},
    "olmo3": {"model_type": "olmo3", **_SHAPE, "sliding_window": 6},
    "olmoe": {"model_type": "olmoe", **_SHAPE, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_SHAPE,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_SHAPE,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
    },
}
"""Named variants. Beyond those every user knows: a table of its own, sinks, experts, keys wider than values."""


def bridged_model(home: Path, family: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random model of `family`, weights large enough that greedy texts vary, and return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**_IDS, **BRIDGED[family], **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    _randomize(model, seed)
    folder = home / f"bridged-{family}-{seed}-{len(list(home.iterdir()))}"
    model.generation_config.eos_token_id, model.generation_config.bos_token_id = EOS, BOS
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@torch.no_grad()
def _randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name or "ln_" in name:
            parameter.copy_(1.0 + 0.2 * noise)
        elif name.endswith("bias") or parameter.ndim == 1:
            parameter.copy_(0.3 * noise)
        elif any(word in name for word in ("embed", "lm_head", "wte", "wpe")):
            parameter.copy_(0.4 * noise)
        else:
            parameter.copy_(1.5 * parameter.shape[-1] ** -0.5 * noise)


def config_folder(home: Path, **fields: Any) -> Path:
    """A folder with a config.json and nothing else."""
    folder = home / f"config-{len(list(home.iterdir()))}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder
