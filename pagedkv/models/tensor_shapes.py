"""Which tensors a model must have, under the names and in the shapes of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pagedkv.api.errors import ModelError
from pagedkv.models.config import ExpertsConfig, ModelConfig

Shape = tuple[int, ...]
MAX_LISTED = 5


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of every tensor of the model; weights are [out, in]."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if config.own_head:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    attention = _attention_shapes(config)
    for index in range(config.num_layers):
        layer = attention | _mlp_shapes(config, config.experts_of(index))
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    norms = ["input", "post_attention", *(["pre_feedforward", "post_feedforward"] if config.post_norms else [])]
    shapes: dict[str, Shape] = {f"{name}_layernorm.weight": (hidden,) for name in norms}
    heads = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    shapes |= _linear({"self_attn.qkv_proj": (q + 2 * kv, hidden)} if config.fused else heads, config.qkv_bias)
    shapes |= _linear({"self_attn.o_proj": (hidden, q)}, config.o_bias)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes


def _mlp_shapes(config: ModelConfig, experts: ExpertsConfig | None) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    if experts is not None:
        return _experts_shapes(hidden, experts)
    first = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    if config.fused:
        first = {"mlp.gate_up_proj": (2 * inner, hidden)}
    return _linear(first | {"mlp.down_proj": (hidden, inner)}, config.mlp_bias)


def _experts_shapes(hidden: int, experts: ExpertsConfig) -> dict[str, Shape]:
    (gate, up, down), inner = experts.names, experts.intermediate_size
    shapes: dict[str, Shape] = {f"{experts.block}.gate.weight": (experts.num, hidden)}
    for index in range(experts.num):
        prefix = f"{experts.block}.experts.{index}"
        matrices = {f"{prefix}.{gate}": (inner, hidden), f"{prefix}.{up}": (inner, hidden)}
        shapes |= _linear(matrices | {f"{prefix}.{down}": (hidden, inner)}, bias=False)
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
    # Old checkpoints store the inverse frequencies, which follow from the configuration; some store a tied head twice,
    # or a head that vectors do not need.
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and not config.own_head)


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:MAX_LISTED])
    return shown if len(names) <= MAX_LISTED else f"{shown}, ..."
