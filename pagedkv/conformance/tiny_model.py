"""A tiny random Llama as files, and its forward in float64, written out plainly: the oracle of the engine section.

Nothing of the package's own models is used here: two ways to the same numbers, written apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from pagedkv.conformance.rig import TORCH

Stored = Callable[[torch.Tensor], torch.Tensor]
"""Keys or values [T, kv_heads, D] in float64 -> what is read of them."""

NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ROPE_BASE, EPS = 10000.0, 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """Sizes of the model. `dtype` is the contract's name for that of its weights."""

    head_dim: int
    q_heads: int
    kv_heads: int
    dtype: str
    max_length: int
    layers: int = 2
    hidden: int = 48
    inner: int = 64
    vocab: int = 64


class TinyLlama:
    """The model's weights, as rounded to its dtype, in float64."""

    def __init__(self, config: TinyConfig, seed: int = 0) -> None:
        self.config = config
        self._generator = torch.Generator().manual_seed(seed)
        self.stored = {name: self._random(name, *shape) for name, shape in _shapes(config).items()}
        self.weights = {name: tensor.double() for name, tensor in self.stored.items()}

    def _random(self, name: str, *shape: int) -> torch.Tensor:
        """Norms near 1, embeddings wide, matrices such that attention and feed-forward both matter."""
        noise = torch.randn(*shape, generator=self._generator)
        if "norm" in name:
            noise = 1.0 + 0.2 * noise
        elif "embed" not in name and "lm_head" not in name:
            noise = 1.5 * shape[-1] ** -0.5 * noise
        return noise.to(TORCH[self.config.dtype])

    def save(self, folder: Path) -> Path:
        """config.json and model.safetensors in Hugging Face layout."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.stored, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(_config_json(self.config)), encoding="utf-8")
        return folder

    def logits(self, ids: Sequence[int], stored: Stored = lambda x: x) -> np.ndarray:
        """What the model says after each prefix of ids [T]: float64 [T, vocab]. `stored`: what a cache does to keys."""
        config, w = self.config, self.weights
        x = w["model.embed_tokens.weight"][torch.tensor(list(ids))]
        for index in range(config.layers):
            mine = _Layer(w, f"model.layers.{index}.")
            x = x + self._attention(_norm(x, mine["input_layernorm"]), mine, stored)
            x = x + _feed_forward(_norm(x, mine["post_attention_layernorm"]), mine)
        return np.asarray((_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T).numpy())

    def _attention(self, x: torch.Tensor, w: _Layer, stored: Stored) -> torch.Tensor:
        config, count = self.config, len(x)
        q = _turned((x @ w["self_attn.q_proj"].T).view(count, config.q_heads, -1))
        k = _turned((x @ w["self_attn.k_proj"].T).view(count, config.kv_heads, -1))
        v = (x @ w["self_attn.v_proj"].T).view(count, config.kv_heads, -1)
        k, v = (stored(t).repeat_interleave(config.q_heads // config.kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) * config.head_dim**-0.5
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, v).reshape(count, -1) @ w["self_attn.o_proj"].T


class _Layer:
    """The weights of one layer under their short names."""

    def __init__(self, weights: Mapping[str, torch.Tensor], prefix: str) -> None:
        self._weights, self._prefix = weights, prefix

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._weights[f"{self._prefix}{name}.weight"]


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def _turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions 0 .. T-1 of x [T, heads, D], entry i with i + D/2, as the complex product that they are."""
    half = x.shape[-1] // 2
    rates = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * rates
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def _feed_forward(x: torch.Tensor, w: _Layer) -> torch.Tensor:
    gate = x @ w["mlp.gate_proj"].T
    return (gate * gate.sigmoid() * (x @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T


def _shapes(config: TinyConfig) -> dict[str, tuple[int, ...]]:
    """Name in the file -> shape."""
    hidden, inner = config.hidden, config.inner
    queries, keys = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab, hidden),
    }
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for index in range(config.layers):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def _config_json(config: TinyConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.inner,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_length,
        "rope_theta": ROPE_BASE,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": NAMES[config.dtype],
    }
