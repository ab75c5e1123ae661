"""What single requests change about their logits before a token is drawn.

The order is that of vLLM's sampler (vllm/v1/sample/sampler.py): grammar, allowed ids, bad words, min tokens, logit
bias, then penalties, and after these temperature, min-p, top-k and top-p (see `truncation`). The repetition penalty is
that of Keskar et al., "CTRL" (2019), and counts prompt and output; presence and frequency penalty are those of the
OpenAI API and count the output only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.sampling.guided import Guide
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.weights import Ids

Float32s = npt.NDArray[np.float32]
Rows = npt.NDArray[np.integer[Any]]

_NO_IDS: Ids = np.zeros(0, np.int64)
_FIRST_ROOM = 64
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS = torch.from_numpy(np.where(_BITS, np.inf, -np.inf).astype(np.float32))
"""For each byte of a mask, what eight logits are at most: [256, 8]."""

Place: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""Where in logits [n, V]: batch rows and token ids, one pair for each number."""


class Adjuster:
    """The requests' changes by row. A batch in which nobody asks for any costs two look-ups in all."""

    def __init__(self, count: int, vocab_size: int) -> None:
        """Rows 0 .. `count` - 1."""
        self._vocab_size = vocab_size
        self._min_tokens = np.zeros(count, np.int64)
        self._end_ids: list[Ids] = [_NO_IDS] * count
        self._asks = np.zeros(count, np.bool_)
        self._follows = np.zeros(count, np.bool_)
        self._wishes: dict[int, Wishes] = {}

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        end_ids: Sequence[int],
        prompt: Sequence[int],
        output: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        guide: Guide | None = None,
    ) -> None:
        """Give `row` to a request, whose tokens so far are `prompt` and `output`; `guide` is after them."""
        self._min_tokens[row] = params.min_tokens
        # An id outside the vocabulary (some files name such an end token) is never drawn: nothing to mask.
        inside = {i for i in (*end_ids, *params.stop_token_ids) if 0 <= i < self._vocab_size}
        self._end_ids[row] = np.array(sorted(inside), np.int64)
        wishes = Wishes(params, prompt, output, bad_words, guide)
        self._asks[row] = wishes.any
        self._follows[row] = wishes.follows
        if wishes.any:
            self._wishes[row] = wishes
        else:
            self._wishes.pop(row, None)

    def apply(self, logits: torch.Tensor, rows: Rows, index: Ids) -> torch.Tensor:
        """The changed logits [n, V] of `rows` [n], which have `index` [n] output tokens; `logits` itself stays."""
        early = np.flatnonzero(index < self._min_tokens[rows])
        asking = np.flatnonzero(self._asks[rows])
        if not early.size and not asking.size:
            return logits
        changed = logits.clone()
        wishes = [(at, self._wishes[row]) for at, row in zip(asking.tolist(), rows[asking].tolist(), strict=True)]
        _guide(changed, [(at, w.guide) for at, w in wishes if w.guide is not None])
        _allow(changed, [(at, w.denied(changed)) for at, w in wishes if w.allowed is not None])
        masked = [(at, w.masked()) for at, w in wishes if w.bad_words]
        masked += [(at, self._end_ids[row]) for at, row in zip(early.tolist(), rows[early].tolist(), strict=True)]
        _mask(changed, masked)
        _add(changed, [(at, w.bias) for at, w in wishes if w.bias is not None])
        _penalize(changed, [(at, w) for at, w in wishes if w.history is not None])
        return changed

    def record(self, rows: Rows, ids: Ids) -> None:
        """Take in the ids that were drawn; -1 is none."""
        for at in np.flatnonzero(self._follows[rows] & (ids >= 0)).tolist():
            self._wishes[int(rows[at])].append(int(ids[at]))


class Wishes:
    """What one request asks for, and what of its tokens that depends on."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        guide: Guide | None,
    ) -> None:
        self.guide = guide
        self.allowed: tuple[int, ...] | None = params.allowed_token_ids
        self._denied: torch.Tensor | None = None
        self.bias = _bias(params.logit_bias) if params.logit_bias else None
        self.bad_words = [tuple(word) for word in bad_words]
        self._longest = max(map(len, self.bad_words), default=1) - 1
        self._last = list(output[-self._longest :]) if self._longest else []
        self.repetition = params.repetition_penalty
        self.frequency, self.presence = params.frequency_penalty, params.presence_penalty
        self.history: History | None = None
        if self.repetition != 1 or self.frequency or self.presence:
            self.history = History(prompt if self.repetition != 1 else (), output)

    @property
    def any(self) -> bool:
        """Whether there is anything to do."""
        masks = self.guide is not None or self.allowed is not None or bool(self.bad_words)
        return masks or self.bias is not None or self.history is not None

    @property
    def follows(self) -> bool:
        """Whether the output matters."""
        return self.guide is not None or self.history is not None or self._longest > 0

    def append(self, token: int) -> None:
        """The output goes on with `token`."""
        if self.guide is not None:
            self.guide.append(token)
        if self.history is not None:
            self.history.append(token)
        if self._longest:
            self._last = [*self._last, token][-self._longest :]

    def denied(self, logits: torch.Tensor) -> torch.Tensor:
        """Which ids are not allowed [V], on the device of `logits` [n, V]; made once."""
        if self._denied is None:
            self._denied = torch.ones(logits.shape[1], dtype=torch.bool)
            self._denied[list(self.allowed or ())] = False
            self._denied = self._denied.to(logits.device)
        return self._denied

    def masked(self) -> Ids:
        """The ids that would complete a bad word."""
        ends = [word[-1] for word in self.bad_words if len(word) == 1 or self._ends_with(word[:-1])]
        return np.array(ends, np.int64)

    def _ends_with(self, ids: tuple[int, ...]) -> bool:
        return tuple(self._last[-len(ids) :]) == ids


class History:
    """The distinct tokens of a sequence, and how often each was generated, kept up to date one token at a time."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        distinct = np.unique(np.concatenate([np.asarray(prompt, np.int64), np.asarray(output, np.int64)]))
        self._ids = distinct
        self._counts = np.zeros(len(distinct), np.float32)
        np.add.at(self._counts, np.searchsorted(distinct, np.asarray(output, np.int64)), 1)
        self._size = len(distinct)
        self._at = {token: at for at, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> Ids:
        """The distinct tokens."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Float32s:
        """How often each of `ids` was generated, 0 for one of the prompt alone."""
        return self._counts[: self._size]

    def append(self, token: int) -> None:
        """Count one generated token."""
        at = self._at.get(token)
        if at is None:
            at = self._at[token] = self._size
            if at == len(self._ids):
                room = max(_FIRST_ROOM, at)
                self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
            self._ids[at] = token
            self._size += 1
        self._counts[at] += 1


def _bias(pairs: Iterable[tuple[int, float]]) -> tuple[Ids, Float32s]:
    ids, values = zip(*pairs, strict=True)
    return np.array(ids, np.int64), np.array(values, np.float32)


def _place(device: torch.device, ids: Sequence[tuple[int, Ids]]) -> Place:
    rows = np.repeat([at for at, _ in ids], [len(row_ids) for _, row_ids in ids])
    both = torch.from_numpy(np.stack([rows, np.concatenate([row_ids for _, row_ids in ids])])).to(device)
    return both[0], both[1]


def _guide(changed: torch.Tensor, guides: Sequence[tuple[int, Guide]]) -> None:
    """Minus infinity for what a row's grammar does not allow; a NaN stays one."""
    if not guides:
        return
    bits = torch.from_numpy(np.stack([guide.allowed() for _, guide in guides])).to(changed.device)
    bounds = _BOUNDS.to(changed.device).index_select(0, bits.view(-1).to(torch.int32)).view(len(guides), -1)
    for (at, _), bound in zip(guides, bounds, strict=True):
        row = changed[at]
        torch.minimum(row, bound[: len(row)], out=row)


def _allow(changed: torch.Tensor, denied: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Minus infinity for what is not allowed; a NaN stays one, since it tells of a broken row."""
    for at, mask in denied:
        row = changed[at]
        changed[at] = torch.where(mask & ~row.isnan(), -torch.inf, row)


def _mask(changed: torch.Tensor, ids: Sequence[tuple[int, Ids]]) -> None:
    if ids:
        changed[_place(changed.device, ids)] = -torch.inf


def _add(changed: torch.Tensor, bias: Sequence[tuple[int, tuple[Ids, Float32s]]]) -> None:
    if not bias:
        return
    values = torch.from_numpy(np.concatenate([values for _, (_, values) in bias])).to(changed.device)
    place = _place(changed.device, [(at, ids) for at, (ids, _) in bias])
    changed[place] = changed[place] + values


def _penalize(changed: torch.Tensor, wishes: Sequence[tuple[int, Wishes]]) -> None:
    histories = [(at, w, w.history) for at, w in wishes if w.history is not None and len(w.history.ids)]
    if not histories:
        return
    place = _place(changed.device, [(at, history.ids) for at, _, history in histories])
    sizes = [len(history.ids) for _, _, history in histories]

    def spread(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(changed.device)

    repetition = spread([w.repetition for _, w, _ in histories])
    counts = torch.from_numpy(np.concatenate([history.counts for _, _, history in histories])).to(changed.device)
    values = changed[place]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - spread([w.frequency for _, w, _ in histories]) * counts
    values = values - spread([w.presence for _, w, _ in histories]) * (counts > 0)
    changed[place] = values
