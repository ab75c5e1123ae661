"""From logits to token ids, for a batch whose rows ask for different things.

A row's result is a function of its own logits, parameters, seed and index, bit for bit: every number that another row
could reach is either exact (sums of whole numbers, sorted values) or elementwise.

    adjusted logits ─┬─ rows that the backend's own ops do ──▶ greedy or sample ──▶ ids, one transfer
                     └─ all others ──▶ largest logit, truncation, weights, draw, here
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.api import Event
from pagedkv.api.errors import ConfigError
from pagedkv.sampling.adjust import Adjuster
from pagedkv.sampling.guided import Guide
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.random import derived_key, sample_key, stream_key, uniform
from pagedkv.sampling.truncation import Cut, draw_cut
from pagedkv.sampling.weights import HOTTEST, Ids, Weights, only_infinite

Int32 = npt.NDArray[np.int32]
Rows = npt.NDArray[np.integer[Any]]
Int64 = npt.NDArray[np.int64]
Top = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

_LAST = 1 - 2.0**-24  # the largest float32 below 1, which numbers nearer to 1 would become


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceOps:
    """Ops that sample where the logits lie, meaning what `pagedkv.ops` says, and a copy to the host.

    `sample` None: random rows come to the host.
    """

    greedy: Callable[[torch.Tensor], torch.Tensor]
    sample: Callable[..., torch.Tensor] | None
    to_host: Callable[[torch.Tensor], tuple[Event, Any]]

    def warm_up(self, vocab_size: int, device: str) -> None:
        """Call each op once, so that no request waits for what is built at a first call."""
        logits, ones = torch.zeros(1, vocab_size, device=device), torch.ones(1, device=device)
        self.greedy(logits)
        if self.sample is not None:
            self.sample(logits, ones * 0.5, ones, ones.to(torch.int32), ones)


class Sampler:
    """Draws one token per row. Parameters live in arrays by row, so that a step costs no Python per greedy row."""

    def __init__(self, max_rows: int, vocab_size: int, seed: int, device: DeviceOps | None = None) -> None:
        """Room for rows 0 .. `max_rows` (row 0 is unused); `seed` serves requests that have none of their own.

        `device`: what the backend does itself, for logits that lie there.
        """
        count = max_rows + 1
        self._device = device
        self.vocab_size = vocab_size
        self._seed = seed
        self._greedy = np.ones(count, np.bool_)
        self._temperature = np.ones(count, np.float64)
        self._top_k = np.full(count, vocab_size, np.int64)
        self._top_p = np.ones(count, np.float64)
        self._min_p = np.zeros(count, np.float64)
        self._cuts = np.zeros(count, np.bool_)
        self._key = np.zeros(count, np.uint64)
        self._adjuster = Adjuster(count, vocab_size)

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        end_ids: Sequence[int],
        seed: int,
        sample: int = 0,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        guide: Guide | None = None,
    ) -> None:
        """Give `row` to a request; again after a preemption, where the tokens so far continue the same stream.

        `end_ids` and the request's stop ids are masked while fewer than `min_tokens` tokens exist. `seed` numbers the
        stream of a request without a seed of its own; `params.seed` stands for itself, whatever the engine's seed.
        `sample` 1, 2, ... are further streams of the same request. `bad_words` are token sequences never completed.
        `guide` is where `output` left the request's grammar.
        """
        own = params.seed
        self._key[row] = sample_key(stream_key(own) if own is not None else derived_key(self._seed, seed), sample)
        self._greedy[row] = params.greedy
        self._temperature[row] = params.temperature
        self._top_k[row] = min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._cuts[row] = self._top_k[row] < self.vocab_size or params.top_p < 1 or params.min_p > 0
        self._adjuster.set_row(row, params, end_ids, prompt, output, bad_words, guide)

    def __call__(self, logits: torch.Tensor, rows: Rows, index: Int64) -> Int32:
        """Draw: logits [n, V] float32 on any device, rows [n], index [n] (tokens the row already has) -> ids [n].

        -1 stands for a row whose logits hold a NaN or are all minus infinity. Plus infinity means certainty, shared
        equally where there are several (a backend's op takes the first). Of equal logits the lowest id is the most
        probable. Logits are not changed. The rows' tokens are remembered where a penalty or a bad word depends on them.
        Raises `ConfigError` for another number of columns than the vocabulary's.
        """
        if logits.ndim != 2 or logits.shape[1] != self.vocab_size:
            shape = tuple(logits.shape)
            raise ConfigError(f"logits of shape {shape} given to a sampler for a vocabulary of {self.vocab_size}")
        logits = self._adjuster.apply(logits.detach().to(torch.float32), rows, index)
        device = self._device
        ids = self._here(logits, rows, index) if device is None else self._there(device, logits, rows, index)
        self._adjuster.record(rows, ids)
        return ids.astype(np.int32)

    # -- on the device -------------------------------------------------------------------------------------------------

    def _there(self, device: DeviceOps, logits: torch.Tensor, rows: Rows, index: Int64) -> Ids:
        """Ids [n], by the backend's ops as far as they go."""
        theirs = self._theirs(device, rows)
        if not theirs.any():
            return self._here(logits, rows, index)
        random = theirs & ~self._greedy[rows]
        if device.sample is not None and random.any():
            drawn = device.sample(logits, *self._columns(logits.device, rows, index, random))
        else:
            drawn = device.greedy(logits)
        done, ids = device.to_host(drawn)
        rest = self._part(logits, rows, index, np.flatnonzero(~theirs))
        done.join()
        found: Ids = ids.astype(np.int64)
        found[~theirs] = rest
        return found

    def _theirs(self, device: DeviceOps, rows: Rows) -> Mask:
        """Which rows the backend's ops do [n]: greedy ones, and those that temperature, top-k and top-p describe."""
        greedy = self._greedy[rows]
        return greedy if device.sample is None else greedy | (self._min_p[rows] == 0)

    def _columns(self, device: torch.device, rows: Rows, index: Int64, random: Mask) -> tuple[torch.Tensor, ...]:
        """numbers, temperature, top_k, top_p [n] of `sample`, in one transfer; what is not `random` [n] is greedy."""
        columns = np.empty((4, len(rows)), np.float32)
        columns[0] = np.minimum(uniform(self._key[rows], index), _LAST)
        columns[1] = np.where(random, np.minimum(self._temperature[rows], HOTTEST), 0)
        columns[2].view(np.int32)[:] = self._top_k[rows]
        columns[3] = self._top_p[rows]
        numbers, temperature, top_k, top_p = torch.from_numpy(columns).to(device)
        return numbers, temperature, top_k.view(torch.int32), top_p

    # -- here ----------------------------------------------------------------------------------------------------------

    def _here(self, logits: torch.Tensor, rows: Rows, index: Int64) -> Ids:
        """Ids [n], whatever the rows ask for."""
        best, top = _most_probable(logits)
        bad = np.isnan(top) | (top == -np.inf)
        best[bad] = -1
        random = np.flatnonzero(~(self._greedy[rows] | bad))
        if random.size:
            self._draw(best, logits, top, random, rows, index)
        return best

    def _part(self, logits: torch.Tensor, rows: Rows, index: Int64, at: Ids) -> Ids:
        """Ids of the rows at the places `at` [m] alone: [m]."""
        if not at.size:
            return at
        return self._here(logits[torch.from_numpy(at).to(logits.device)], rows[at], index[at])

    def _draw(self, out: Ids, logits: torch.Tensor, top: Top, random: Ids, rows: Rows, index: Int64) -> None:
        """Fill `out` at the positions `random`."""
        certain = random[top[random] == np.inf]
        if certain.size:
            logits, top = only_infinite(logits, top, certain)
        weights = Weights(logits, top, self._temperature[rows])
        numbers = uniform(self._key[rows[random]], index[random])
        cut = self._cuts[rows[random]]
        plain = random[~cut]
        if plain.size:
            out[plain] = weights.draw(plain, numbers[~cut])
        if cut.any():
            out[random[cut]] = draw_cut(logits, random[cut], self._cut(weights, top, random[cut], rows), numbers[cut])

    def _cut(self, weights: Weights, top: Top, chosen: Ids, rows: Rows) -> list[Cut]:
        own = rows[chosen]
        mass = np.full(len(own), np.nan)
        alone = (self._top_k[own] == self.vocab_size) & (self._min_p[own] == 0)  # top-p of the whole vocabulary
        if alone.any():
            mass[alone] = weights.mass(chosen[alone])
        columns = (self._temperature[own], top[chosen], self._top_k[own], self._top_p[own], self._min_p[own], mass)
        return [Cut(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def _most_probable(logits: torch.Tensor) -> tuple[Ids, Top]:
    """The first id of each row's largest logit, and that logit; a NaN counts as larger than anything."""
    if logits.device.type == "cpu":  # numpy's is ten times faster there
        host = logits.numpy()
        best = host.argmax(1)
        return best, host[np.arange(len(best)), best]
    ids = logits.argmax(1)
    return ids.cpu().numpy(), logits.gather(1, ids[:, None])[:, 0].cpu().numpy()
