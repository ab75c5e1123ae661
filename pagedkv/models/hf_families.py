"""What a model_type of Hugging Face fixes, beyond what its config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_THETA = 10000.0
"""Rope's base where a config has none, as in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model_type: its class with a head, its biases and norms, which fields it may have, and their defaults.

    `windows` names a rule of `hf_layers`; `gemma` means its norms, its scaled embeddings and its activation;
    `brings_code`: the published files name the class `architecture` in code of their own, which is what runs here too.
    The defaults are those of transformers.
    """

    architecture: str
    always_qkv_bias: bool = False
    may_have_attention_bias: bool = False
    may_have_mlp_bias: bool = False
    kv_heads_default_to_heads: bool = False
    qk_norm: bool = False
    fused: bool = False
    gemma: bool = False
    softcaps: tuple[float | None, float | None] | None = None
    multipliers: bool = False
    experts: str | None = None
    skips_rope: bool = False
    partial_rope: bool = False
    longrope: bool = False
    brings_code: bool = False
    windows: str | None = None
    default_window: int | None = None
    window_every: int = 0
    default_head_dim: int | None = None
    default_eps: float = 1e-6
    default_theta: float = DEFAULT_THETA
    default_local_theta: float | None = None
    default_tied: bool = False
    ignored: frozenset[str] = frozenset()

    @property
    def bare(self) -> str:
        """Its class without a head."""
        return self.architecture.replace("ForCausalLM", "TextModel" if self.architecture in _TEXT_MODELS else "Model")


_TEXT_MODELS = frozenset({"Gemma3ForCausalLM"})
_ROUTER_TRAINING = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        may_have_attention_bias=True,
        may_have_mlp_bias=True,
        kv_heads_default_to_heads=True,
    ),
    "mistral": Family(architecture="MistralForCausalLM", windows="all", default_window=4096),
    "qwen2": Family(architecture="Qwen2ForCausalLM", always_qkv_bias=True, windows="qwen"),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        may_have_attention_bias=True,
        qk_norm=True,
        default_head_dim=128,
        windows="qwen",
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        may_have_attention_bias=True,
        gemma=True,
        softcaps=(50.0, 30.0),
        windows="pattern",
        default_window=4096,
        window_every=2,
        default_head_dim=256,
        default_tied=True,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        may_have_attention_bias=True,
        qk_norm=True,
        gemma=True,
        softcaps=(None, None),
        windows="pattern",
        default_window=4096,
        window_every=6,
        default_head_dim=256,
        default_theta=1e6,
        default_local_theta=1e4,
        default_tied=True,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        kv_heads_default_to_heads=True,
        fused=True,
        partial_rope=True,
        longrope=True,
        brings_code=True,
        windows="all",
        default_eps=1e-5,
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        experts="mixtral",
        windows="all",
        default_eps=1e-5,
        default_theta=1e6,
        ignored=_ROUTER_TRAINING,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        may_have_attention_bias=True,
        qk_norm=True,
        experts="qwen",
        windows="switched",
        # transformers windows all layers or none, whatever this says.
        ignored=_ROUTER_TRAINING | {"max_window_layers"},
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        may_have_attention_bias=True,
        may_have_mlp_bias=True,
        kv_heads_default_to_heads=True,
        multipliers=True,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        may_have_attention_bias=True,
        may_have_mlp_bias=True,
        kv_heads_default_to_heads=True,
        skips_rope=True,
        windows="unturned",
        default_theta=2e6,
        default_tied=True,
        ignored=frozenset({"max_window_layers"}),
    ),
}
