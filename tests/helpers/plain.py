"""Stand-ins for a decoder's surroundings: a checkpoint over a folder, a backend without a pool, dense attention."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from pagedkv.api import AttentionBackend, LayerSpec, OpSpec
from pagedkv.models.config import ModelConfig
from pagedkv.models.hf_config import parse_hf_config


class StateCheckpoint:
    """A checkpoint over tensors in memory; `read` lists the names asked for, in order."""

    format = "safetensors"
    quantization = None

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor], path: Path = Path("in-memory")) -> None:
        self.config = config
        self.path = path
        self.tensors = dict(tensors)
        self.read: list[str] = []

    @classmethod
    def open(cls, folder: Path) -> StateCheckpoint:
        """The model that `tiny_model` saved."""
        config, generation = (json.loads((folder / f"{n}.json").read_text()) for n in ("config", "generation_config"))
        return cls(parse_hf_config(config, generation), load_file(folder / "model.safetensors"), folder)

    @property
    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        self.read.append(name)
        return self.tensors[name].to(dtype, copy=True).contiguous()

    def tokenizer(self) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        pass


class OpsOnlyBackend(AttentionBackend):
    """A backend that has no pool, for code that only asks it for ops; `ops` maps a name to what `op` returns."""

    def __init__(self, ops: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self.ops = dict(ops or {})
        self.asked: list[tuple[str, OpSpec]] = []

    def op(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        self.asked.append((name, spec))
        return self.ops.get(name)

    def capabilities(self) -> Any:
        raise NotImplementedError

    def pool_cost(self, spec: Any) -> Any:
        raise NotImplementedError

    def alloc_pool(self, spec: Any) -> Any:
        raise NotImplementedError

    def plan(self, pool: Any, group: Any, batch: Any) -> Any:
        raise NotImplementedError

    def attend(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def copy_blocks(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class DenseAttention:
    """`attend` for one sequence fed in chunks: keeps all keys and values, scores every pair in float64."""

    def __init__(self, layers: tuple[LayerSpec, ...]) -> None:
        self._layers = layers
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        spec = self._layers[layer]
        if layer in self._kv:
            k, v = torch.cat([self._kv[layer][0], k]), torch.cat([self._kv[layer][1], v])
        self._kv[layer] = (k.clone(), v.clone())
        group = spec.q_heads // spec.kv_heads
        keys, values = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
        scores = torch.einsum("thd,shd->hts", q.double(), keys) * spec.scale
        if spec.softcap is not None:
            scores = torch.tanh(scores / spec.softcap) * spec.softcap
        scores.masked_fill_(~_visible(spec, q.shape[0], k.shape[0]), float("-inf"))
        out.copy_(torch.einsum("hts,shd->thd", scores.softmax(-1), values))


def _visible(spec: LayerSpec, queries: int, keys: int) -> Tensor:
    p = torch.arange(keys - queries, keys)[:, None]
    i = torch.arange(keys)[None, :]
    visible = i <= p
    return visible if spec.window is None else visible & (i > p - spec.window)
