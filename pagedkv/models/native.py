"""The native decoder: Llama-shaped models as few, fused calls per layer over packed tokens of many sequences."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagedkv.api import AttentionBackend, OpSpec
from pagedkv.models.config import ModelConfig, RopeConfig
from pagedkv.models.experts import Experts, FeedForward, load_experts
from pagedkv.models.packing import Packer, Product, Progress, Projection, element_bytes, torch_dtype
from pagedkv.models.rope import RopeTable
from pagedkv.models.weight_plan import WeightPlan
from pagedkv.ops import resolve

if TYPE_CHECKING:
    from pagedkv.models.checkpoint import Checkpoint

_log = logging.getLogger("pagedkv.models")

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], out [T, Hq, D]): a backend's, with the plan bound."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """One layer's weights; norms that a family lacks are None. `rope`: the place of its table, None for none."""

    rope: int | None
    input_norm: Tensor
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Product
    attention_out_norm: Tensor | None
    mlp_norm: Tensor
    mlp: FeedForward | Experts
    mlp_out_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ops:
    """The ops without weights of their own, chosen once."""

    rms_norm: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    head_norm: Callable[..., Any]
    rope: Callable[..., Any]


class NativeDecoder:
    """A decoder described by its config alone. Make one with `load`.

    `nbytes` counts packed weights. Not for two threads at once: the array that attention writes to is kept and reused.
    """

    sinks: Mapping[int, Tensor] = MappingProxyType({})

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        dtype: str,
        packer: Packer,
        layers: tuple[_Layer, ...],
        max_position: int,
    ) -> None:
        self.config = config
        self.why_no_graph = _why_no_graph(config)
        self._ops = _choose_ops(config, backend, dtype)
        self._ropes = [RopeTable(rope, max_position, backend.torch_device) for rope in _ropes(config)]
        self._layers = layers
        self._embedding = packer.embedding()
        self._embedding_multiplier = _embedding_multiplier(config, dtype)
        self._final_norm = packer.norm("model.norm.weight")
        before = packer.nbytes
        self._head = _load_head(packer, config, self._embedding)
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._attended = torch.zeros(
            0, config.num_heads, config.head_dim, dtype=torch_dtype(dtype), device=backend.torch_device
        )
        self.nbytes = packer.nbytes
        # With a head of its own, or none, the table is only looked up in.
        multiplied = self._head is not None and self.nbytes == before
        self.bytes_per_step = self.nbytes - (0 if multiplied else self._embedding.packed.nbytes)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        backend: AttentionBackend,
        dtype: str,
        *,
        progress: Progress | None = None,
        max_model_len: int | None = None,
        plan: WeightPlan | None = None,
    ) -> NativeDecoder:
        """Read, pack and drop one tensor after another; memory peaks at the packed model plus one layer's source.

        `dtype` is "fp32", "bf16" or "fp16"; positions stay below `max_model_len` (None: the model's own limit); `plan`
        says which weights stay in their blocks (None: all become numbers of `dtype`).
        Raises `ModelError` for a tensor that is missing, left over or misshapen.
        """
        packer = Packer(checkpoint, backend, dtype, progress, plan)
        config = checkpoint.config
        max_position = max_model_len or config.max_position
        _log_longrope(config, max_position)
        layers = tuple(_load_layer(packer, config, i, backend, dtype) for i in range(config.num_layers))
        return cls(config, backend, dtype, packer, layers, max_position)

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Logits [n, V] in float32 of the tokens `rows` [n] (None: all T); hidden states [n, H] where vectors are made.

        ids, positions [T] int64 on the backend's device. Calls `attend` once a layer, in order.
        """
        ops, eps = self._ops, self.config.rms_norm_eps
        angles = [table.lookup(positions) for table in self._ropes]
        residual = self._embedded(ids)
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            if index:
                x = ops.add_rms_norm(x, residual, layer.input_norm, eps)
            attended = self._attention(index, layer, x, angles, attend)
            if index == last and rows is not None:
                # Nothing after the last attention mixes tokens: the others are done.
                attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
            x = self._joining(layer.o(attended), layer.attention_out_norm)
            x = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = self._joining(layer.mlp(x), layer.mlp_out_norm)
        x = ops.add_rms_norm(x, residual, self._final_norm, eps)
        return x.float() if self._head is None else self._logits(self._head(x).float())

    def reserve(self, positions: int) -> None:
        """Make the rope tables for positions 0 .. positions - 1 now rather than when they come."""
        for table in self._ropes:
            table.reserve(positions)

    def _embedded(self, ids: Tensor) -> Tensor:
        x = self._embedding(ids)
        return x if self._embedding_multiplier == 1.0 else x.mul_(self._embedding_multiplier)

    def _joining(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """The output of attention or feed-forward as it joins the residual."""
        if norm is not None:
            x = self._ops.rms_norm(x, norm, self.config.rms_norm_eps)
        return x if self.config.residual_multiplier == 1.0 else x.mul_(self.config.residual_multiplier)

    def _logits(self, logits: Tensor) -> Tensor:
        if self.config.logit_divisor != 1.0:
            logits.div_(self.config.logit_divisor)
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _attention(
        self, index: int, layer: _Layer, x: Tensor, angles: list[tuple[Tensor, Tensor]], attend: Attend
    ) -> Tensor:
        """What the heads read, side by side [T, Hq D]: x [T, H] projected, normed, turned and attended."""
        tokens, eps = x.shape[0], self.config.rms_norm_eps
        heads = layer.qkv(x).view(tokens, sum(self._heads), self.config.head_dim)
        q, k, v = heads.split_with_sizes(self._heads, 1)
        if layer.q_norm is not None:
            q = self._ops.head_norm(q, layer.q_norm, eps)
            k = self._ops.head_norm(k, layer.k_norm, eps)
        if layer.rope is not None:
            self._ops.rope(q, k, *angles[layer.rope])
        out = self._attended_rows(tokens)
        attend(index, q, k, v, out)
        return out.flatten(1)

    def _attended_rows(self, tokens: int) -> Tensor:
        """Rows for attention to write to, kept from call to call; zeros at first, so that padding rows are finite."""
        if tokens > self._attended.shape[0]:
            self._attended = self._attended.new_zeros(tokens, *self._attended.shape[1:])
        return self._attended[:tokens]


def _load_head(packer: Packer, config: ModelConfig, table: Projection) -> Product | None:
    """What makes logits of hidden states; None where these are wanted themselves."""
    if config.pooling is not None:
        return None
    return packer.linear("lm_head") if config.own_head else packer.tied(table)


def _why_no_graph(config: ModelConfig) -> str | None:
    if config.pooling is not None:
        return "the model makes vectors of whole texts, and decodes nothing"
    return None if config.experts is None else "its experts are chosen on the host"


def _ropes(config: ModelConfig) -> list[RopeConfig]:
    """The rope tables that layers refer to by their place."""
    return [config.rope, *([] if config.local_rope is None else [config.local_rope])]


def _embedding_multiplier(config: ModelConfig, dtype: str) -> float:
    """Gemma's is a number of the model's dtype, so it is rounded first."""
    multiplier = torch.tensor(config.embedding_multiplier, dtype=torch_dtype(dtype if config.wide_norms else "fp32"))
    return float(multiplier)


def _log_longrope(config: ModelConfig, max_position: int) -> None:
    original = config.rope.original_max_position
    if config.rope.kind == "longrope" and original is not None and max_position > original:
        _log.info(
            "longrope: texts may reach %d positions, so all are turned for long texts; set max_model_len to %d or less "
            "for the turns meant for short ones",
            max_position,
            original,
        )


def _load_layer(packer: Packer, config: ModelConfig, index: int, backend: AttentionBackend, dtype: str) -> _Layer:
    prefix = f"model.layers.{index}"
    attention = f"{prefix}.self_attn"
    rope = config.rope_of(index)
    heads = [f"{attention}.{name}_proj" for name in (("qkv",) if config.fused else ("q", "k", "v"))]
    # Where outputs are normed too, the norm before the feed-forward has a name of its own.
    attention_out, before_mlp = (
        f"{prefix}.post_attention_layernorm.weight",
        f"{prefix}.pre_feedforward_layernorm.weight",
    )
    return _Layer(
        rope=None if rope is None else _ropes(config).index(rope),
        input_norm=packer.norm(f"{prefix}.input_layernorm.weight"),
        qkv=packer.linear(*heads),
        q_norm=packer.norm(f"{attention}.q_norm.weight") if config.qk_norm else None,
        k_norm=packer.norm(f"{attention}.k_norm.weight") if config.qk_norm else None,
        o=packer.linear(f"{attention}.o_proj"),
        attention_out_norm=packer.norm(attention_out) if config.post_norms else None,
        mlp_norm=packer.norm(before_mlp if config.post_norms else attention_out),
        mlp=_load_mlp(packer, config, index, backend, dtype),
        mlp_out_norm=packer.norm(f"{prefix}.post_feedforward_layernorm.weight") if config.post_norms else None,
    )


def _load_mlp(
    packer: Packer, config: ModelConfig, index: int, backend: AttentionBackend, dtype: str
) -> FeedForward | Experts:
    prefix, experts = f"model.layers.{index}", config.experts_of(index)
    inner = config.intermediate_size if experts is None else experts.intermediate_size
    activate = resolve(backend, f"{config.activation}_mul", OpSpec(dtype=dtype, dims={"dim": inner}))
    if experts is not None:
        return load_experts(packer, experts, prefix, activate)
    first = [f"{prefix}.mlp.{name}_proj" for name in (("gate_up",) if config.fused else ("gate", "up"))]
    return FeedForward(gate_up=packer.linear(*first), activate=activate, down=packer.linear(f"{prefix}.mlp.down_proj"))


def _choose_ops(config: ModelConfig, backend: AttentionBackend, dtype: str) -> _Ops:
    def op(name: str, attributes: dict[str, Any] | None = None, **dims: int) -> Callable[..., Any]:
        return resolve(backend, name, OpSpec(dtype=dtype, dims=dims, attributes=attributes or {}))

    hidden = config.hidden_size
    norm = {"wide": True} if config.wide_norms else None
    return _Ops(
        rms_norm=op("rms_norm", norm, dim=hidden),
        add_rms_norm=op("add_rms_norm", norm, dim=hidden),
        head_norm=op("rms_norm", norm, dim=config.head_dim),
        rope=op(
            "rope",
            q_heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rope.dim,
        ),
    )


def workspace_bytes(config: ModelConfig, max_tokens: int, max_rows: int, dtype: str) -> int:
    """An upper bound of the bytes that one `forward` of max_tokens tokens and max_rows rows of logits takes.

    Activations, and logits or hidden states given, with the reference ops, and the whole rope tables; not weights,
    cache or a backend's scratch.
    """
    size, ropes = element_bytes(dtype), len(_ropes(config))
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    qkv = queries + 2 * config.num_kv_heads * config.head_dim
    kept = 2 * hidden * size + queries * size + 4 * config.rope.dim * ropes  # residual, x, out, angles
    norm = hidden * (2 * size + 3 * 4)
    attention = qkv * (2 * size + 3 * 4)
    logits = max_rows * (config.vocab_size if config.pooling is None else hidden) * (size + 4)
    tables = 8 * config.max_position * (config.rope.dim // 2) * ropes
    return max_tokens * (kept + max(norm, attention, _mlp_bytes(config, size))) + logits + tables


def _mlp_bytes(config: ModelConfig, size: int) -> int:
    """Bytes a token takes in a feed-forward; with experts, as if one of them got all tokens."""
    inner = config.intermediate_size * (4 * size + 4)
    if config.experts is None:
        return inner
    experts = config.experts
    routed = experts.per_token * (config.hidden_size * (size + 4) + 4 * 8) + experts.num * (size + 8)
    one = config.hidden_size * 2 * size + experts.intermediate_size * (4 * size + 4)
    return max(inner if experts.dense_layers else 0, routed + one)
