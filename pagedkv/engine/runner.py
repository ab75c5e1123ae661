"""Runs one step on the backend: copy, plan once, all layers, logits."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from pagedkv.api import AttentionBackend, Pool
from pagedkv.core.step import Step
from pagedkv.engine.graphs import DecodeGraphs
from pagedkv.models.decoder import Decoder

_CLEAR = 4096  # blocks cleared in one call


class Runner:
    """The model, its pool and the backend, and the steps recorded on them; knows nothing of requests."""

    def __init__(
        self,
        backend: AttentionBackend,
        pool: Pool,
        model: Decoder,
        *,
        nan_safe: bool,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.backend = backend
        self.pool = pool
        self.model = model
        self.graphs = graphs
        self._device = backend.torch_device
        if not nan_safe:
            self._clear()

    def _clear(self) -> None:
        """Blocks never written may hold NaN, which such a backend would read: copy the null block over them."""
        for start in range(1, self.pool.num_blocks, _CLEAR):
            to = np.arange(start, min(start + _CLEAR, self.pool.num_blocks), dtype=np.int32)
            pairs = np.stack([np.zeros_like(to), to], axis=1)
            self.backend.wait(self.backend.copy_blocks(self.pool, self.pool, pairs))

    def run(self, step: Step) -> torch.Tensor:
        """Logits [len(step.logits_at), vocabulary] in fp32, on the backend's device; the next step may change them."""
        if len(step.copies):
            self.backend.wait(self.backend.copy_blocks(self.pool, self.pool, step.copies))
        logits = None if self.graphs is None else self.graphs.run(step)
        return self._eagerly(step) if logits is None else logits

    def _eagerly(self, step: Step) -> torch.Tensor:
        plan = self.backend.plan(self.pool, 0, step.batch)
        return self.model.forward(
            self._tensor(step.input_ids),
            self._tensor(step.positions),
            partial(self.backend.attend, plan),
            self._tensor(step.logits_at),
        )

    def _tensor(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self._device)

    def close(self) -> None:
        """Give recordings, pool and device back."""
        if self.graphs is not None:
            self.graphs.close()
        self.pool.close()
        self.backend.close()
