"""Texts on their way to vectors: hidden states are added up as steps give them, and divided when all are there."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api.errors import RequestInvalid
from pagedkv.core.request import Reason, Request
from pagedkv.core.scheduler import Scheduler
from pagedkv.core.step import Step
from pagedkv.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagedkv.engine.prompts import Prompt
from pagedkv.models.pooling import Pooling
from pagedkv.sampling.pooling import PoolingParams

_log = logging.getLogger("pagedkv.engine")

Floats = npt.NDArray[np.float64]

_TINY = 1e-12
"""The least length that a vector is divided by, as in torch's `normalize`."""
_REASONS = {Reason.LENGTH: "stop"}
"""A text that was computed to its end lacks nothing."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Text:
    """One request. `taken`: the sum of the hidden states given so far, and the position that comes next.

    The two change at once, so that a step which an interrupt undid is not counted twice.
    """

    request: Request
    prompt: Prompt
    params: PoolingParams
    metrics: RequestMetrics
    positions: range
    taken: tuple[Floats, int]

    def take(self, states: npt.NDArray[np.float32], first: int) -> bool:
        """Add hidden states [n, H] of the positions from `first` on; returns whether all is finite."""
        total, following = self.taken
        new = states[following - first :]
        if len(new):
            self.taken = total + new.sum(axis=0, dtype=np.float64), following + len(new)
        return bool(np.isfinite(self.taken[0]).all())


class Embedder:
    """The open requests of a model that gives vectors, by the scheduler's ids; a part of the engine."""

    def __init__(self, scheduler: Scheduler, pooling: Pooling) -> None:
        self.pooling = pooling
        self._scheduler = scheduler
        self._texts: dict[int, _Text] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def check(self, prompt: Prompt, params: PoolingParams) -> None:
        """Raise `RequestInvalid` or `RequestTooLong` for what can give no vector."""
        wanted, size, sizes = params.dimensions, self.pooling.size, self.pooling.sizes
        if wanted is not None and wanted > size:
            raise RequestInvalid(
                f"dimensions={wanted} is more than the {size} numbers of this model's vectors: ask for fewer, or leave "
                "it out",
                field="dimensions",
            )
        if wanted not in (None, size) and sizes and wanted not in sizes:
            listed = ", ".join(map(str, sizes))
            raise RequestInvalid(
                f"dimensions={wanted} is none of the sizes that this model was trained for: {listed}",
                field="dimensions",
            )
        self._scheduler.limit(len(prompt.ids), 0)

    def add(self, prompt: Prompt, params: PoolingParams, label: str, priority: int) -> int:
        """Queue a request that was checked, and return its id."""
        positions = self.pooling.positions(len(prompt.ids))
        request = self._scheduler.add(
            prompt.ids, label=label, max_tokens=0, priority=priority, salt=prompt.salt, wanted=positions
        )
        self._texts[request.id] = _Text(
            request=request,
            prompt=prompt,
            params=params,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            positions=positions,
            taken=self._nothing(positions),
        )
        return request.id

    def _nothing(self, positions: range) -> tuple[Floats, int]:
        return np.zeros(self.pooling.size), positions.start

    def admit(self, request: Request, now: float) -> None:
        """A step works on the request."""
        metrics = self._texts[request.id].metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = now

    def take(self, step: Step, states: torch.Tensor) -> list[Request]:
        """Take in the hidden states [n, H] that a step gives; returns the requests for which they are unusable."""
        if not len(step.scored):
            return []
        rows, positions = step.scored_rows, step.positions.take(step.scored)
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        parts = np.split(states.cpu().numpy(), starts[1:])
        owners = self._scheduler.owners(rows[starts])
        return [
            request
            for request, part, first in zip(owners, parts, positions[starts].tolist(), strict=True)
            if not self._texts[request.id].take(part, first)
        ]

    def end(self, request: Request) -> RequestOutput:
        """Describe a request that has finished, and forget it."""
        text = self._texts.pop(request.id)
        text.metrics.finished_time = time.monotonic()
        text.metrics.num_preemptions, text.metrics.num_swaps = request.num_preemptions, request.num_swaps
        reason = request.reason or Reason.ERROR
        if reason is Reason.ERROR:
            _log.error(
                "request %s ended: no usable hidden states (the model gave NaN, or infinite ones)", request.label
            )
        return RequestOutput(
            request_id=request.label,
            prompt=text.prompt.text,
            prompt_token_ids=text.prompt.ids.tolist(),
            outputs=[
                CompletionOutput(index=0, text="", token_ids=[], finish_reason=_REASONS.get(reason, reason.value))
            ],
            finished=True,
            num_cached_tokens=request.num_cached_tokens or 0,
            num_host_cached_tokens=request.num_host_cached_tokens,
            embedding=self._vector(text) if reason is Reason.LENGTH else None,
            metrics=text.metrics,
        )

    def _vector(self, text: _Text) -> list[float]:
        vector = text.taken[0][: text.params.dimensions] / len(text.positions)
        normalize = self.pooling.normalize if text.params.normalize is None else text.params.normalize
        if normalize:
            vector = vector / max(float(np.linalg.norm(vector)), _TINY)
        values: list[float] = vector.astype(np.float32).tolist()
        return values

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request in any state; None if unknown or finished."""
        text = self._texts.get(request_id)
        if text is None:
            return None
        self._scheduler.abort(text.request)
        return self.end(text.request)

    def start_over(self) -> None:
        """Forget all hidden states, once no request holds a row: other weights give others."""
        for text in self._texts.values():
            text.taken = self._nothing(text.positions)
            text.request.scored = text.positions.start

    def clear(self) -> None:
        """Forget every request."""
        self._texts.clear()
