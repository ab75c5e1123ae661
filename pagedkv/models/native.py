"""The native decoder: Llama-shaped models as few, fused calls per layer over packed tokens of many sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagedkv.api import AttentionBackend, OpSpec
from pagedkv.models.config import ModelConfig
from pagedkv.models.packing import Packer, Progress, Projection, element_bytes, torch_dtype
from pagedkv.models.rope import RopeTable
from pagedkv.ops import resolve

if TYPE_CHECKING:
    from pagedkv.models.checkpoint import Checkpoint

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], out [T, Hq, D]): a backend's, with the plan bound."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """One layer's weights; the head norms are None where the family has none."""

    input_norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ops:
    """The ops without weights of their own, chosen once."""

    embedding: Callable[..., Any]
    rms_norm: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    head_norm: Callable[..., Any]
    rope: Callable[..., Any]
    silu_mul: Callable[..., Any]


class NativeDecoder:
    """A decoder described by its config alone. Make one with `load`.

    `nbytes` counts packed weights. Not for two threads at once: the array that attention writes to is kept and reused.
    """

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, dtype: str, packer: Packer, layers: tuple[_Layer, ...]
    ) -> None:
        self.config = config
        self._ops = _choose_ops(config, backend, dtype)
        self._rope = RopeTable(config.rope, config.max_position, backend.torch_device)
        self._layers = layers
        self._embeddings = packer.plain("model.embed_tokens.weight")
        self._final_norm = packer.plain("model.norm.weight")
        self._head = packer.tied(self._embeddings) if config.tie_word_embeddings else packer.linear("lm_head")
        self._heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self._attended = torch.zeros(
            0, config.num_heads, config.head_dim, dtype=torch_dtype(dtype), device=backend.torch_device
        )
        self.nbytes = packer.nbytes

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, backend: AttentionBackend, dtype: str, *, progress: Progress | None = None
    ) -> NativeDecoder:
        """Read, pack and drop one tensor after another; memory peaks at the packed model plus one layer's source.

        `dtype` is "fp32", "bf16" or "fp16". Raises `ModelError` for a tensor that is missing, left over or misshapen.
        """
        packer = Packer(checkpoint, backend, dtype, progress)
        config = checkpoint.config
        layers = tuple(_load_layer(packer, config, f"model.layers.{i}") for i in range(config.num_layers))
        return cls(config, backend, dtype, packer, layers)

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Logits [n, V] in float32 of the tokens `rows` [n] (None: all T).

        ids, positions [T] int64 on the backend's device. Calls `attend` once a layer, in order.
        """
        ops, eps = self._ops, self.config.rms_norm_eps
        angles = self._rope.lookup(positions)
        residual = ops.embedding(ids, self._embeddings)
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            if index:
                x = ops.add_rms_norm(x, residual, layer.input_norm, eps)
            attended = self._attention(index, layer, x, angles, attend)
            if index == last and rows is not None:
                # Nothing after the last attention mixes tokens: the others are done.
                attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
            x = ops.add_rms_norm(layer.o(attended), residual, layer.mlp_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
        x = ops.add_rms_norm(x, residual, self._final_norm, eps)
        return self._head(x).float()

    def reserve(self, positions: int) -> None:
        """Make the rope table for positions 0 .. positions - 1 now rather than when they come."""
        self._rope.reserve(positions)

    def _attention(self, index: int, layer: _Layer, x: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """What the heads read, side by side [T, Hq D]: x [T, H] projected, normed, turned and attended."""
        tokens, eps = x.shape[0], self.config.rms_norm_eps
        heads = layer.qkv(x).view(tokens, sum(self._heads), self.config.head_dim)
        q, k, v = torch.split(heads, self._heads, dim=1)
        if layer.q_norm is not None:
            q = self._ops.head_norm(q, layer.q_norm, eps)
            k = self._ops.head_norm(k, layer.k_norm, eps)
        self._ops.rope(q, k, *angles)
        out = self._attended_rows(tokens)
        attend(index, q, k, v, out)
        return out.flatten(1)

    def _attended_rows(self, tokens: int) -> Tensor:
        """Rows for attention to write to, kept from call to call; zeros at first, so that padding rows are finite."""
        if tokens > self._attended.shape[0]:
            self._attended = self._attended.new_zeros(tokens, *self._attended.shape[1:])
        return self._attended[:tokens]


def _load_layer(packer: Packer, config: ModelConfig, prefix: str) -> _Layer:
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return _Layer(
        input_norm=packer.plain(f"{prefix}.input_layernorm.weight"),
        qkv=packer.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        q_norm=packer.plain(f"{attention}.q_norm.weight") if config.qk_norm else None,
        k_norm=packer.plain(f"{attention}.k_norm.weight") if config.qk_norm else None,
        o=packer.linear(f"{attention}.o_proj"),
        mlp_norm=packer.plain(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=packer.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=packer.linear(f"{mlp}.down_proj"),
    )


def _choose_ops(config: ModelConfig, backend: AttentionBackend, dtype: str) -> _Ops:
    def op(name: str, **dims: int) -> Callable[..., Any]:
        return resolve(backend, name, OpSpec(dtype=dtype, dims=dims))

    hidden = config.hidden_size
    return _Ops(
        embedding=op("embedding", vocab=config.vocab_size, dim=hidden),
        rms_norm=op("rms_norm", dim=hidden),
        add_rms_norm=op("add_rms_norm", dim=hidden),
        head_norm=op("rms_norm", dim=config.head_dim),
        rope=op(
            "rope",
            q_heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rope.dim,
        ),
        silu_mul=op("silu_mul", dim=config.intermediate_size),
    )


def workspace_bytes(config: ModelConfig, max_tokens: int, max_rows: int, dtype: str) -> int:
    """An upper bound of the bytes that one `forward` of max_tokens tokens and max_rows logit rows takes.

    Activations and logits with the reference ops, and the whole rope table; not weights, cache or a backend's scratch.
    """
    size = element_bytes(dtype)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    qkv = queries + 2 * config.num_kv_heads * config.head_dim
    kept = 2 * hidden * size + queries * size + 4 * config.rope.dim  # residual, x, out, angles
    norm = hidden * (2 * size + 3 * 4)
    attention = qkv * (2 * size + 3 * 4)
    mlp = inner * (4 * size + 4)
    logits = max_rows * config.vocab_size * (size + 4)
    table = 8 * config.max_position * (config.rope.dim // 2)
    return max_tokens * (kept + max(norm, attention, mlp)) + logits + table
