"""The tensors of a GGUF model under the names, in the shapes and in the order of rows of Hugging Face.

Names and layouts: `gguf-py/gguf/constants.py` and `convert_hf_to_gguf.py` of https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagedkv.api.errors import ModelError
from pagedkv.models.config import ModelConfig
from pagedkv.models.gguf import GgufFile, TensorInfo
from pagedkv.models.gguf_rope import INTERLEAVED_ROPE, ROPE_TENSORS
from pagedkv.models.tensor_shapes import Shape
from pagedkv.ops.gguf_quants import Bytes, dequantized

if TYPE_CHECKING:
    import torch

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FAMILY_NAMES: Mapping[str, Mapping[str, str]] = {
    "gemma2": _GEMMA_NAMES,
    "gemma3": _GEMMA_NAMES,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
_EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
"""Tensors [experts, out, in]: each expert's matrix is one of Hugging Face's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor is: one of the file, or one expert's part of it; `heads` that llama.cpp put in pairs, or 0."""

    info: TensorInfo
    expert: int | None = None
    heads: int = 0

    @property
    def shape(self) -> Shape:
        """As Hugging Face has it."""
        return self.info.shape if self.expert is None else self.info.shape[1:]


def hf_names(name: str, info: TensorInfo, architecture: str) -> Iterator[tuple[str, int | None]]:
    """What Hugging Face calls the tensor `name`, or each expert's part of it; itself where it has no counterpart."""
    stem, _, kind = name.rpartition(".")
    block, _, rest = stem.partition(".")
    index, _, part = rest.partition(".")
    if stem in _GLOBAL_NAMES:
        yield f"{_GLOBAL_NAMES[stem]}.{kind}", None
    elif block == "blk" and part in _EXPERT_NAMES and len(info.shape) == 3:
        for expert in range(info.shape[0]):
            yield f"model.layers.{index}.mlp.experts.{expert}.{_EXPERT_NAMES[part]}.{kind}", expert
    elif block == "blk" and (ours := _FAMILY_NAMES.get(architecture, {}).get(part) or _LAYER_NAMES.get(part)):
        yield f"model.layers.{index}.{ours}.{kind}", None
    else:
        yield name, None


class GgufTensors:
    """Access by Hugging Face names. `places` has every tensor of the file but those of rope, known names or not."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        architecture = str(file.metadata["general.architecture"])
        interleaved = architecture in INTERLEAVED_ROPE
        self.places = {
            ours: Place(info=info, expert=expert, heads=_heads(ours, config) if interleaved else 0)
            for name, info in file.tensors.items()
            if name not in ROPE_TENSORS
            for ours, expert in hf_names(name, info, architecture)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the file."""
        return sum({place.info.name: place.info.nbytes for place in self.places.values()}.values())

    def formats(self, names: Iterable[str]) -> dict[str, str]:
        """The types in which the file holds these tensors."""
        return {name: self.places[name].info.type.name for name in names}

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized tensor in `dtype`."""
        place = self.places[name]
        return dequantized(self._raw(place), place.info.type, place.shape, dtype)

    def blocks(self, name: str) -> Bytes:
        """A matrix as it is stored, in Hugging Face's order of rows: [N, bytes of a row], perhaps a read-only view."""
        place = self.places[name]
        return self._raw(place).reshape(place.shape[0], -1)

    def _raw(self, place: Place) -> Bytes:
        raw = self._file.raw(place.info)
        if place.expert is not None:
            # Whole matrices, so whole rows, so whole quantization blocks.
            size = len(raw) // place.info.shape[0]
            raw = raw[place.expert * size : (place.expert + 1) * size]
        return _halves_from_pairs(raw, place.info, place.heads) if place.heads else raw


def _heads(name: str, config: ModelConfig) -> int:
    """How many heads the rows of a rotated projection belong to; 0 for every other tensor."""
    if ".q_proj." in name:
        return config.num_heads
    return config.num_kv_heads if ".k_proj." in name else 0


def _halves_from_pairs(raw: Bytes, info: TensorInfo, num_heads: int) -> Bytes:
    """Undo llama.cpp's order of q and k rows: in each head (2i, 2i + 1) there is (i, i + dim / 2) here.

    raw [bytes] of a tensor [heads * dim, ...] -> the same bytes, whole rows moved. Source: `permute` in llama.cpp's
    convert_hf_to_gguf.py. Raises `ModelError` for a quantized bias, whose rows share blocks.
    """
    rows = info.shape[0]
    if info.type.quantized and len(info.shape) == 1:
        raise ModelError(
            f"tensor {info.name!r} is a bias of type {info.type.name}; biases are read as F32, F16 or BF16."
        )
    pairs = raw.reshape(num_heads, rows // num_heads // 2, 2, len(raw) // rows)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)
