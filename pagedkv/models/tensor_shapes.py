"""Which tensors a model must have, under the names and in the shapes of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pagedkv.api.errors import ModelError
from pagedkv.models.config import ModelConfig

Shape = tuple[int, ...]
MAX_LISTED = 5


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of every tensor of the model; weights are [out, in]."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    layer = _layer_shapes(config)
    for index in range(config.num_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    attention = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    shapes |= _linear(attention, config.qkv_bias)
    shapes |= _linear({"self_attn.o_proj": (hidden, q)}, config.o_bias)
    mlp = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    shapes |= _linear(mlp, config.mlp_bias)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes


def _linear(layers: Mapping[str, tuple[int, int]], bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": shape for name, shape in layers.items()}
    if bias:
        shapes |= {f"{name}.bias": shape[:1] for name, shape in layers.items()}
    return shapes


def check_tensors(config: ModelConfig, found: Mapping[str, Shape], where: Mapping[str, str], source: str) -> None:
    """Compare a checkpoint's tensors with what its configuration implies.

    `where` maps a tensor to the file that holds it. Raises `ModelError` for a tensor that is missing, has another
    shape, or is there without having a place in the model (a bias that would be left out silently, for example).
    """
    expected = tensor_shapes(config)
    if missing := [name for name in expected if name not in found]:
        raise ModelError(f"{source}: {len(missing)} tensors are missing: {_listed(missing)}. Download the model again.")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(
                f"{where.get(name, source)}: tensor {name!r} has shape {list(found[name])}, "
                f"but the configuration of {source} implies {list(shape)}."
            )
    if extra := [name for name in found if name not in expected and not _harmless(name, config)]:
        raise ModelError(
            f"{source}: {len(extra)} tensors have no place in a model of architecture {config.architecture!r}: "
            f"{_listed(extra)}. This kind of model cannot be run yet."
        )


def _harmless(name: str, config: ModelConfig) -> bool:
    # Old checkpoints store the inverse frequencies, which follow from the configuration; some store a tied head twice.
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:MAX_LISTED])
    return shown if len(names) <= MAX_LISTED else f"{shown}, ..."
