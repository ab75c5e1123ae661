"""Whether a bridged model computes what its own library computes: two short sequences, packed and in two pieces.

A state that is not in the cache, a position taken from the place in the batch, or a rule misread gives other logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import isnan

import torch
from torch import Tensor

from pagedkv.api import LayerSpec
from pagedkv.api.errors import ModelError
from pagedkv.models.decoder import Attend

_log = logging.getLogger("pagedkv.models")

LENGTHS, CUTS = (5, 7), (3, 6)
"""Tokens of the two sequences, and how many of each come first."""

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Accepted difference of logits, as a part of their own spread: noise of the dtype, far from what an error gives."""

Forward = Callable[[Tensor, Tensor, Attend, Tensor | None], Tensor]


def sequences(vocab_size: int) -> list[list[int]]:
    """Two token sequences, spread over the vocabulary and different everywhere."""
    ids = [(2 + 7 * i * i + 13 * i) * 9973 % vocab_size for i in range(sum(LENGTHS))]
    return [ids[: LENGTHS[0]], ids[LENGTHS[0] :]]


def check(
    forward: Forward,
    alone: Callable[[Sequence[int]], Tensor],
    specs: Sequence[LayerSpec],
    sinks: dict[int, Tensor],
    vocab_size: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Compare `forward` over packed pieces with `alone` [T, V] of each sequence. Raises `ModelError` when they differ.

    `sinks` may be filled by the very forward that is checked: it is read after the projections of each call.
    """
    texts = sequences(vocab_size)
    cache = _Cache(specs, sinks)
    got: list[list[Tensor]] = [[], []]
    for step in (0, 1):
        spans = [((0, cut), (cut, len(text)))[step] for text, cut in zip(texts, CUTS, strict=True)]
        ids = [token for text, (a, b) in zip(texts, spans, strict=True) for token in text[a:b]]
        positions = [p for a, b in spans for p in range(a, b)]
        cache.counts = [b - a for a, b in spans]
        rows = torch.arange(len(ids), device=device)
        logits = forward(_tensor(ids, device), _tensor(positions, device), cache.attend, rows)
        for kept, part in zip(got, torch.split(logits, cache.counts), strict=True):
            kept.append(part)
    errors = [_difference(torch.cat(kept), alone(text)) for kept, text in zip(got, texts, strict=True)]
    error = sum(errors) if any(map(isnan, errors)) else max(errors)
    _log.info("bridge check: logits differ from the library's own by %.1e of their spread", error)
    if isnan(error):
        raise ModelError("the logits are not numbers: the weights are damaged, or exceed the range of the dtype")
    if error > TOLERANCES[dtype]:
        raise ModelError(
            f"the model gives other logits with a paged cache than alone (off by {error:.2g} of their spread): it "
            "keeps a state outside attention, or takes positions from the batch. It cannot run through the bridge"
        )


def _difference(got: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of the expected logits around their mean; NaN when either is.

    Logits that hardly differ among themselves are measured by a thousandth of their size.
    """
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return float((got - expected).norm() / torch.maximum(spread, 1e-3 * expected.norm()).clamp(min=1e-30))


def _tensor(values: Sequence[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


class _Cache:
    """Keys and values of both sequences, and plain attention over them. `counts`: query tokens of each this step."""

    def __init__(self, specs: Sequence[LayerSpec], sinks: dict[int, Tensor]) -> None:
        self._specs, self._sinks = specs, sinks
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.counts: list[int] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        start = 0
        for number, count in enumerate(self.counts):
            rows, at = slice(start, start + count), (layer, number)
            old = self._kept.get(at, (k[:0], v[:0]))
            keys, values = torch.cat([old[0], k[rows]]), torch.cat([old[1], v[rows]])
            self._kept[at] = keys, values
            out[rows] = plain_attention(self._specs[layer], q[rows], keys, values, self._sinks.get(layer)).to(out.dtype)
            start += count


def plain_attention(spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """The contract's attention of the last n tokens q [n, Hq, Dk] over k, v [c, Hkv, D], in float32: [n, Hq, Dv]."""
    group = spec.q_heads // spec.kv_heads
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,chd->hnc", q.float(), k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    query = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    key = torch.arange(len(k), device=q.device)[None]
    hidden = (key > query) if spec.window is None else (key > query) | (key <= query - spec.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.to(q.device).float().view(-1, 1, 1).expand(-1, len(q), 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(k)]
    return torch.einsum("hnc,chd->nhd", weights, v)
