"""What the native decoder needs to know of a model, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagedkv.api import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: the first `dim` entries of each head turn, halves paired (i, i + dim / 2).

    `kind` and its parameters are those of transformers' `rope_scaling`; `freq_factors` [dim / 2] divide the inverse
    frequencies directly (what GGUF stores instead of llama3's four numbers).
    """

    theta: float
    dim: int
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama shape. `dtype` is the checkpoint's own ("fp32", "bf16", "fp16"), None when quantized.

    `windows` has one entry a layer: the sliding window in tokens, or None. `eos_token_ids` are all ids that end a text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Weights of the model, embeddings included and tied ones counted once; norms and biases left out."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The attention layers as the contract describes them."""
        return tuple(
            LayerSpec(
                index=i,
                q_heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                k_dim=self.head_dim,
                v_dim=self.head_dim,
                scale=self.head_dim**-0.5,
                window=window,
                kv_heads_total=self.num_kv_heads,
            )
            for i, window in enumerate(self.windows)
        )
