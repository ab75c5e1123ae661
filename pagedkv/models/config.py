"""What the native decoder needs to know of a model, whatever file it came from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from pagedkv.api import LayerSpec
from pagedkv.models.pooling import Pooling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: the first `dim` entries of each head turn, halves paired (i, i + dim / 2).

    `kind` and its parameters are those of transformers' `rope_scaling`; `freq_factors` [dim / 2] divide the inverse
    frequencies directly (what GGUF stores instead of llama3's four numbers). A longrope divides them by
    `short_factors` [dim / 2] or `long_factors` [dim / 2], see `inverse_frequencies`.
    """

    theta: float
    dim: int
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Feed-forward layers of `num` experts, of which a router picks `per_token` by its softmax for each token.

    `normalize`: the weights of the picked ones sum to 1. `dense_layers` have no experts. The tensors of expert i are
    called `<block>.experts.<i>.<name>`, with the names of gate, up and down; the router is `<block>.gate`.
    """

    num: int
    per_token: int
    intermediate_size: int
    normalize: bool
    dense_layers: tuple[int, ...] = ()
    block: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama shape, and where a family departs from it.

    dtype: the checkpoint's own ("fp32", "bf16", "fp16"), None when quantized.
    windows: one entry a layer, the sliding window in tokens, or None.
    local_rope: turns the layers with a window instead of `rope`; `no_rope_layers` are not turned at all.
    attention_scale: of q.k, None for head_dim ** -0.5; the softcaps c turn s into c tanh(s / c).
    wide_norms: norm weights are float32 and applied before rounding; `norm_offset` is added to each as it is read.
    post_norms: the outputs of attention and feed-forward are normed too, before they join the residual.
    fused: the file holds q, k and v as `qkv_proj`, gate and up as `gate_up_proj`.
    eos_token_ids: all ids that end a text.
    pooling: the model gives vectors instead of logits, and has no head; see `pooled`.
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
    local_rope: RopeConfig | None = None
    no_rope_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    wide_norms: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    fused: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    experts: ExpertsConfig | None = None
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pooling: Pooling | None = None

    def pooled(self, pooling: Pooling | None) -> ModelConfig:
        """The same model giving vectors, without a head that could be tied; itself where there is no pooling."""
        if pooling is None:
            return self
        return dataclasses.replace(self, pooling=pooling, tie_word_embeddings=False)

    @property
    def own_head(self) -> bool:
        """Whether the head is a tensor of its own."""
        return self.pooling is None and not self.tie_word_embeddings

    @property
    def num_parameters(self) -> int:
        """Weights of the model, embeddings included and tied ones counted once; norms and biases left out."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        embeddings = self.vocab_size * self.hidden_size * (2 if self.own_head else 1)
        return self.num_layers * attention + sum(map(self._mlp_parameters, range(self.num_layers))) + embeddings

    def _mlp_parameters(self, layer: int) -> int:
        experts = self.experts_of(layer)
        if experts is None:
            return 3 * self.hidden_size * self.intermediate_size
        return experts.num * self.hidden_size * (3 * experts.intermediate_size + 1)

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts of one layer, None where it is a plain one."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def rope_of(self, layer: int) -> RopeConfig | None:
        """What turns the heads of one layer, None for nothing."""
        if layer in self.no_rope_layers:
            return None
        return self.rope if self.windows[layer] is None or self.local_rope is None else self.local_rope

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The attention layers as the contract describes them."""
        return tuple(
            LayerSpec(
                index=i,
                q_heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                k_dim=self.head_dim,
                v_dim=self.head_dim,
                scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
                window=window,
                softcap=self.attention_softcap,
                kv_heads_total=self.num_kv_heads,
            )
            for i, window in enumerate(self.windows)
        )
