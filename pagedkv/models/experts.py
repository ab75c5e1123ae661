"""The feed-forward half of a layer: one for all tokens, or many of which a router picks a few for each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from pagedkv.models.config import ExpertsConfig
from pagedkv.models.packing import Packer, Product


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeedForward:
    """down(activate(gate x, up x)): x [T, H] -> [T, H]."""

    gate_up: Product
    activate: Callable[..., Any]
    down: Product

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.gate_up(x)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experts:
    """The sum of the picked experts' outputs, weighted by the router: x [T, H] -> [T, H].

    Tokens are grouped by expert, so that each expert runs once; a token's outputs are added in the order of its
    router's preference. With a `linear` that keeps a row's bits apart from other rows, so does this.
    """

    router: Product
    experts: tuple[FeedForward, ...]
    per_token: int
    normalize: bool

    def __call__(self, x: Tensor) -> Tensor:
        weights, picked = self._route(x)
        outputs = x.new_empty(picked.numel(), x.shape[1])
        for expert, places in self._groups(picked):
            outputs[places] = expert(x.index_select(0, places // self.per_token))
        shares = outputs.view(*picked.shape, x.shape[1])
        total = shares[:, 0] * weights[:, 0, None]
        for rank in range(1, self.per_token):
            total += shares[:, rank] * weights[:, rank, None]
        return total.to(x.dtype)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, per_token] in float32 and expert numbers, the preferred ones first."""
        weights, picked = self.router(x).float().softmax(-1).topk(self.per_token, dim=-1)
        if self.normalize:
            weights = weights / sum(weights.unbind(-1)).unsqueeze(-1)  # type: ignore[union-attr]
        return weights, picked

    def _groups(self, picked: Tensor) -> Iterator[tuple[FeedForward, Tensor]]:
        """Each expert that some token picked, with the places in the flattened `picked` [T, per_token] that name it."""
        numbers = picked.flatten()
        order = numbers.argsort(stable=True)
        counts = torch.bincount(numbers, minlength=len(self.experts)).tolist()
        for expert, (start, end) in zip(self.experts, pairwise(accumulate(counts, initial=0)), strict=True):
            if end > start:
                yield expert, order[start:end]


def load_experts(packer: Packer, config: ExpertsConfig, prefix: str, activate: Callable[..., Any]) -> Experts:
    """Read and pack the experts of the layer `prefix`, one after the other."""
    block, (gate, up, down) = f"{prefix}.{config.block}", config.names

    def load(name: str) -> FeedForward:
        return FeedForward(
            gate_up=packer.linear(f"{name}.{gate}", f"{name}.{up}"),
            activate=activate,
            down=packer.linear(f"{name}.{down}"),
        )

    return Experts(
        router=packer.linear(f"{block}.gate"),
        experts=tuple(load(f"{block}.experts.{index}") for index in range(config.num)),
        per_token=config.per_token,
        normalize=config.normalize,
    )
