"""Probabilities of whole rows as exact whole numbers, and the draw that inverts their distribution function.

exp is elementwise and gives the same bits wherever a logit lies; whole numbers below 2**53 add up exactly in float64,
in any order. So neither a neighbour in the batch nor a device's way of summing can move a draw.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_BLOCK = 256  # tokens that are summed before the draw looks inside
_AT_ONCE = 64  # rows in work at a time on a device; on the host it is one, which stays in the cache
_LEAST = -64.0  # exp of less is 0 at every scale, 2**52 at most; torch takes up to fifteen times as long for it
_COLDEST, HOTTEST = 1e-30, 1e30  # beyond these float32 would divide by 0 or by infinity, to NaN


class Weights:
    """exp((logit - top) / temperature) of rows of logits, as whole multiples of 1 / `scale`.

    What rounds to 0 has less than 2**-30 of the top token's probability (vocabularies up to 2**21).
    """

    def __init__(
        self, logits: torch.Tensor, top: npt.NDArray[np.float32], temperature: Floats, at_once: int | None = None
    ) -> None:
        """Logits [n, V] float32, the largest of each row [n], finite where a row is asked for, temperature [n].

        `at_once` rows are in work at a time; None chooses for the device.
        """
        self._logits = logits
        self._top = torch.from_numpy(top).to(logits.device)[:, None]
        heat = np.clip(temperature, _COLDEST, HOTTEST).astype(np.float32)
        self._temperature = torch.from_numpy(heat).to(logits.device)[:, None]
        self._vocab_size = logits.shape[1]
        self._at_once = at_once or (1 if logits.device.type == "cpu" else _AT_ONCE)
        self.scale = 2.0 ** (52 - (self._vocab_size - 1).bit_length())  # the vocabulary's sum is then at most 2**52

    def mass(self, rows: Ids) -> Floats:
        """The sum of each row's weights, relative to its top token: [m]."""
        total: Floats = self._blocks(rows).sum(1) / self.scale
        return total

    def draw(self, rows: Ids, numbers: Floats) -> Ids:
        """For numbers [m] in [0, 1) the first ids whose running sum exceeds number * total: [m]."""
        each = np.arange(len(rows))
        mass = self._blocks(rows)
        ends = mass.cumsum(1)
        aim = numbers * ends[:, -1]
        block = (ends <= aim[:, None]).sum(1)
        aim -= ends[each, block] - mass[each, block]
        inside = self._inside(rows, block).cumsum(1, dtype=np.float64)
        ids: Ids = block * _BLOCK + (inside <= aim[:, None]).sum(1)
        return ids

    def _blocks(self, rows: Ids) -> Floats:
        """Sums of `_BLOCK` weights each: [m, blocks]. Rows' weights exist a few at a time, in one workspace."""
        step = self._at_once
        count = -(-self._vocab_size // _BLOCK)
        work = self._logits.new_zeros((min(step, len(rows)), count * _BLOCK))
        sums = self._logits.new_empty((len(rows), count), dtype=torch.float64)
        for start in range(0, len(rows), step):
            part = sums[start : start + step]
            self._fill(work[: len(part), : self._vocab_size], rows[start : start + step])
            torch.sum(work[: len(part)].view(len(part), count, _BLOCK), 2, dtype=torch.float64, out=part)
        return sums.cpu().numpy()

    def _fill(self, out: torch.Tensor, rows: Ids) -> None:
        """Write the weights of `rows` to `out` [m, V]."""
        if len(rows) == 1:  # a view: nothing is gathered
            which: torch.Tensor | slice = slice(int(rows[0]), int(rows[0]) + 1)
        else:
            which = torch.from_numpy(rows).to(out.device)
        torch.sub(self._logits[which], self._top[which], out=out)
        self._finish(out, which)

    def _inside(self, rows: Ids, block: Ids) -> npt.NDArray[np.float32]:
        """The weights in one block of each row, 0 past the vocabulary: [m, _BLOCK]."""
        device = self._logits.device
        which = torch.from_numpy(rows).to(device)[:, None]
        ids = torch.from_numpy(block).to(device)[:, None] * _BLOCK + torch.arange(_BLOCK, device=device)
        part = self._logits[which, ids.clamp(max=self._vocab_size - 1)]
        self._finish(part.sub_(self._top[which[:, 0]]), which[:, 0])
        return part.masked_fill_(ids >= self._vocab_size, 0).cpu().numpy()

    def _finish(self, below_top: torch.Tensor, which: torch.Tensor | slice) -> None:
        """Turn logit - top into weights, in place."""
        below_top.div_(self._temperature[which]).clamp_(min=_LEAST).exp_().mul_(self.scale).round_()


def only_infinite(logits: torch.Tensor, top: Float32s, certain: Ids) -> tuple[torch.Tensor, Float32s]:
    """Copies in which the rows `certain` hold 0 for plus infinity and minus infinity elsewhere, and their top is 0."""
    place = torch.from_numpy(certain).to(logits.device)
    logits, top = logits.clone(), top.copy()
    logits[place] = torch.where(logits[place] == torch.inf, 0.0, -torch.inf)
    top[certain] = 0
    return logits, top
