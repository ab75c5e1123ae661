"""`workspace_bytes` is an upper bound of what a step takes, and not a wild one."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pagedkv.models.native import NativeDecoder, workspace_bytes
from tests.helpers.plain import OpsOnlyBackend, StateCheckpoint
from tests.helpers.tiny_models import tiny_model


class PeakBytes(TorchDispatchMode):
    """Follows the storages that ops return, and the most bytes that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._now -= size


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {"intermediate_size": 512}),
        ("qwen3", {"head_dim": 64, "num_key_value_heads": 4}),
        ("llama", {"vocab_size": 8192}),
        ("llama", {"hidden_size": 256, "head_dim": 8, "intermediate_size": 16}),
        ("gemma2", {"intermediate_size": 512}),
        ("mixtral", {"intermediate_size": 256, "num_local_experts": 2}),
        ("qwen3_moe", {"moe_intermediate_size": 16, "num_experts_per_tok": 8, "hidden_size": 256}),
    ],
    ids=["mlp", "heads", "vocabulary", "hidden", "gemma", "experts", "many experts"],
)
def test_a_step_stays_below_the_bound(tmp_path: Path, family: str, sizes: dict[str, int], dtype: str) -> None:
    folder = tiny_model(tmp_path, family, max_position_embeddings=1024, **sizes)
    model = NativeDecoder.load(StateCheckpoint.open(folder), OpsOnlyBackend(), dtype)
    tokens, rows = 700, 300
    ids, positions, chosen = (torch.arange(n) % 256 for n in (tokens, tokens, rows))
    with PeakBytes() as measured:
        model.forward(ids, positions, lambda layer, q, k, v, out: None, chosen)
    bound = workspace_bytes(model.config, tokens, rows, dtype)
    assert measured.peak <= bound <= 3 * measured.peak
