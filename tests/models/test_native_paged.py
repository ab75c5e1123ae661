"""The decoder over a real pool: two sequences in shuffled blocks, fed in chunks, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pagedkv.api import AttentionBackend, Batch, GroupSpec, Limits, PoolSpec, World
from pagedkv.models.native import NativeDecoder
from pagedkv_cpu.descriptor import CpuDescriptor
from tests.helpers.plain import StateCheckpoint
from tests.helpers.tiny_models import BOS, hf_logits, tiny_model

LENGTHS = (29, 17)
SAMPLE = (
    "llama_bias",
    "mistral_window",
    "qwen2_window",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3_longrope",
    "mixtral",
    "qwen3_moe_mixed",
    "granite",
    "smollm3",
)


@pytest.fixture(scope="module")
def backend() -> Iterator[AttentionBackend]:
    made = CpuDescriptor().create(0, {"threads": 1}, World())
    yield made
    made.close()


class Sequences:
    """Two sequences in one pool, each with its row of a block table; `step` runs some tokens of both."""

    def __init__(self, model: NativeDecoder, backend: AttentionBackend, block_size: int) -> None:
        self._model, self._backend, self._size = model, backend, block_size
        width = -(-max(LENGTHS) // block_size)
        group = GroupSpec(layers=model.config.layer_specs(), block_size=block_size, kv_dtype="fp32")
        limits = Limits(rows=2, tokens=sum(LENGTHS), context=max(LENGTHS))
        needed = {"batch_invariant", *(["window"] if any(model.config.windows) else [])}
        needed |= {"softcap"} if model.config.attention_softcap else set()
        self.pool = backend.alloc_pool(
            PoolSpec(
                groups=(group,),
                num_blocks=1 + 2 * width,
                dtype="fp32",
                limits=limits,
                features=frozenset(needed),
            )
        )
        order = np.random.default_rng(0).permutation(np.arange(1, 1 + 2 * width, dtype=np.int32))
        self._table = np.concatenate([np.zeros((1, width), np.int32), order.reshape(2, width)])
        self._done = [0, 0]

    def step(self, chunks: list[list[int]]) -> list[torch.Tensor]:
        """Logits of each sequence's next tokens."""
        counts = [len(c) for c in chunks]
        starts, ends = self._done, [d + n for d, n in zip(self._done, counts, strict=True)]
        positions = np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)])
        row = np.repeat([1, 2], counts)
        slots = self._table[row, positions // self._size].astype(np.int64) * self._size + positions % self._size
        batch = Batch(
            num_seqs=2,
            num_tokens=sum(counts),
            cu_q=np.cumsum([0, *counts], dtype=np.int32),
            ctx_len=np.array(ends, np.int32),
            block_table=self._table,
            rows=np.array([1, 2], np.int32),
            slots=slots,
            max_q=max(counts),
            max_ctx=max(ends),
            num_decode=2 if counts == [1, 1] else 0,
        )
        plan = self._backend.plan(self.pool, 0, batch)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
            self._backend.attend(plan, layer, q, k, v, out)

        ids = torch.tensor([i for c in chunks for i in c])
        logits = self._model.forward(ids, torch.from_numpy(positions), attend, None)
        self._done = ends
        return list(logits.split(counts))


def _run(model: NativeDecoder, backend: AttentionBackend, size: int, ids: list[list[int]], whole: bool) -> list:
    """All logits of both sequences, prompts whole or in chunks, the last five tokens one by one."""
    sequences = Sequences(model, backend, size)
    bounds = [[0, n - 5] if whole else [0, 4, n // 2, n - 5] for n in LENGTHS]
    steps = [b + [b[-1] + i + 1 for i in range(5)] for b in bounds]
    parts = [
        sequences.step([s[a[i] : a[i + 1]] for s, a in zip(ids, steps, strict=True)]) for i in range(len(steps[0]) - 1)
    ]
    sequences.pool.close()
    return [torch.cat([p[i] for p in parts]) for i in range(2)]


@pytest.mark.parametrize(("family", "size"), [(name, (1, 3, 4, 16)[at % 4]) for at, name in enumerate(SAMPLE)])
def test_chunked_and_whole_give_transformers_logits(
    tmp_path: Path, backend: AttentionBackend, family: str, size: int
) -> None:
    folder = tiny_model(tmp_path, family)
    model = NativeDecoder.load(StateCheckpoint.open(folder), backend, "fp32")
    rng = np.random.default_rng(1)
    ids = [[BOS, *rng.integers(0, 256, n - 1).tolist()] for n in LENGTHS]
    expected = [hf_logits(folder, sequence) for sequence in ids]
    whole, chunked = (_run(model, backend, size, ids, choice) for choice in (True, False))
    for logits, in_chunks, right in zip(whole, chunked, expected, strict=True):
        torch.testing.assert_close(logits, right, atol=1e-4, rtol=1e-4)
        assert torch.equal(in_chunks, logits), "batch_invariant: a row's bits do not depend on chunking"
