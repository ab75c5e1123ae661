"""The sampler with a backend's own ops: which rows they get, what comes to the host, and what is drawn.

The ops are the references, over a copy to the host that holds nonsense until its event is joined.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagedkv.api import Event
from pagedkv.ops import REFERENCE
from pagedkv.sampling import sampler as sampler_module
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.random import stream_key, uniform
from pagedkv.sampling.sampler import DeviceOps, Sampler
from tests.helpers.plain_sampler import reference

INF, NAN = float("inf"), float("nan")
VOCAB = 300


class Late(Event):
    """Fills an array when it is joined."""

    def __init__(self, target: npt.NDArray[Any], values: torch.Tensor) -> None:
        self._target, self._values = target, values

    def join(self, timeout: float | None = None) -> None:
        self._target[:] = self._values.numpy()


class Device:
    """The references, counted."""

    def __init__(self, *, sample: bool = True) -> None:
        self.calls: list[str] = []
        self.copied: list[torch.Tensor] = []
        self.columns: tuple[torch.Tensor, ...] = ()
        self.ops = DeviceOps(greedy=self._greedy, sample=self._sample if sample else None, to_host=self._to_host)

    def _greedy(self, logits: torch.Tensor) -> torch.Tensor:
        self.calls.append("greedy")
        return REFERENCE["greedy"](logits)

    def _sample(self, logits: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
        self.calls.append("sample")
        self.columns = columns
        return REFERENCE["sample"](logits, *columns)

    def _to_host(self, tensor: torch.Tensor) -> tuple[Event, Any]:
        self.copied.append(tensor)
        host = np.full(tuple(tensor.shape), -77, np.int32)
        return Late(host, tensor.clone()), host


KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(seed=3),
    "cold": SamplingParams(seed=3, temperature=0.2),
    "hot": SamplingParams(seed=3, temperature=1e300),
    "top-k": SamplingParams(seed=3, top_k=20),
    "top-k and top-p": SamplingParams(seed=3, top_k=50, top_p=0.9),
    "top-p": SamplingParams(seed=3, top_p=0.95, temperature=1.3),
    "min-p": SamplingParams(seed=3, min_p=0.02),
}
HERE = "min-p"
"""The kind that no op of a backend covers."""


def sampler_of(*params: SamplingParams, device: Device | None = None, **fields: Any) -> Sampler:
    made = Sampler(len(params), VOCAB, 0, None if device is None else device.ops)
    for row, one in enumerate(params, start=1):
        made.set_row(row, one, fields.get("end_ids", ()), seed=row)
    return made


def some_logits(count: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed))


def ids(sampler: Sampler, logits: torch.Tensor, step: int = 0) -> list[int]:
    """One step of all rows."""
    return sampler(logits, np.arange(1, 1 + len(logits), dtype=np.int32), np.full(len(logits), step)).tolist()


def draws(params: SamplingParams, row: torch.Tensor, count: int, device: Device | None) -> list[int]:
    """One request at `count` indices, always from the same logits."""
    sampler = sampler_of(params, device=device)
    return sampler(row.expand(count, VOCAB), np.ones(count, np.int32), np.arange(count)).tolist()


# -- what goes where ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "calls"),
    [
        (("greedy",) * 3, ["greedy"]),
        (("greedy", "top-k", "cold"), ["sample"]),
        (("min-p", "min-p"), []),
        (("greedy", "min-p"), ["greedy"]),
        (("plain", "min-p", "greedy"), ["sample"]),
    ],
    ids=str,
)
def test_one_op_and_one_copy_of_ids_at_most(kinds: tuple[str, ...], calls: list[str]) -> None:
    params, device = [KINDS[kind] for kind in kinds], Device()
    logits = some_logits(len(kinds))
    assert ids(sampler_of(*params, device=device), logits) == ids(sampler_of(*params), logits)
    assert device.calls == calls
    assert [(tensor.dtype, len(tensor)) for tensor in device.copied] == [(torch.int32, len(kinds))] * len(calls)


def test_without_a_sample_op_random_rows_are_drawn_here_bit_for_bit() -> None:
    params, device = list(KINDS.values()), Device(sample=False)
    mine, theirs = sampler_of(*params), sampler_of(*params, device=device)
    for step in range(20):
        logits = some_logits(len(params), seed=step)
        assert ids(theirs, logits, step) == ids(mine, logits, step)
    assert set(device.calls) == {"greedy"} and len(device.copied) == 20


def test_no_rows_ask_for_nothing() -> None:
    device = Device()
    got = sampler_of(KINDS["plain"], device=device)(torch.zeros(0, VOCAB), np.zeros(0, np.int32), np.zeros(0, np.int64))
    assert got.shape == (0,) and got.dtype == np.int32
    assert device.calls == []


def test_what_a_request_changes_about_its_logits_comes_before() -> None:
    """Bias, bans and ends, over greedy and random rows: the ops see the changed logits, and the rest is untouched."""
    everyone = [
        SamplingParams(temperature=0, logit_bias={7: 100}),
        SamplingParams(seed=1, allowed_token_ids=[5, 9]),
        SamplingParams(temperature=0, min_tokens=2),
        SamplingParams(temperature=0),
    ]
    logits = some_logits(4)
    logits[2:, 11], logits[2:, 80] = 50.0, 40.0
    got = ids(sampler_of(*everyone, device=Device(), end_ids=(11,)), logits)
    assert got[0] == 7
    assert got[1] in (5, 9)
    assert got[2:] == [80, 11]


def test_penalties_follow_ids_that_came_from_the_device() -> None:
    """U60: with a heavy penalty no token comes twice, though every id was found on the device."""
    params, logits = SamplingParams(temperature=0, frequency_penalty=2.0), torch.linspace(0, 1, VOCAB)[None]
    sampler = sampler_of(params, device=Device())
    assert [ids(sampler, logits, step)[0] for step in range(5)] == [299, 298, 297, 296, 295]


# -- what is drawn -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != HERE])
def test_draws_are_those_of_the_host_but_at_an_edge(kind: str) -> None:
    """With the same numbers: the same tokens wherever no edge is within 1e-6 of the number."""
    params, row, count = KINDS[kind], some_logits(1, seed=4)[0], 500
    there, here = draws(params, row, count, Device()), draws(params, row, count, None)
    if params.greedy:
        assert there == here == [int(row.argmax())] * count
        return
    cuts = {"top_k": params.top_k, "top_p": params.top_p}
    exact, margin = reference(row.tolist(), temperature=params.temperature, **cuts)
    assert margin > 1e-6
    numbers = uniform(np.full(count, stream_key(3), np.uint64), np.arange(count))
    ends = np.append(0, exact.cumsum())
    clear = np.abs(ends[None, :] - numbers[:, None]).min(1) > 1e-6
    assert clear.sum() > 490
    assert np.array_equal(np.array(there)[clear], np.searchsorted(ends[1:], numbers[clear], side="right"))
    assert np.array_equal(np.array(there)[clear], np.array(here)[clear])


@pytest.mark.parametrize("kind", ["plain", "top-k and top-p", "top-p"])
def test_frequencies_follow_the_exact_probabilities(kind: str) -> None:
    """Chi-square over 4,000 draws of a fixed seed; a limit of 5 standard deviations."""
    params, row, count = KINDS[kind], some_logits(1, seed=9)[0], 4_000
    cuts = {"top_k": params.top_k, "top_p": params.top_p}
    exact, _ = reference(row.tolist(), temperature=params.temperature, **cuts)
    seen = np.bincount(draws(params, row, count, Device()), minlength=VOCAB)
    assert not seen[exact == 0].any()
    rare = exact * count < 5
    want = np.append(exact[~rare], exact[rare].sum()) * count
    got = np.append(seen[~rare], seen[rare].sum())
    want, got = want[want > 0], got[want > 0]
    freedom = len(want) - 1
    assert float(((got - want) ** 2 / want).sum()) < freedom + 5 * np.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("kind", KINDS)
def test_u54_alone_and_in_any_company(kind: str) -> None:
    mine = some_logits(1, seed=1)
    alone = [ids(sampler_of(KINDS[kind], device=Device()), mine, step)[0] for step in (0, 1, 40)]
    for size, place in ((2, 1), (5, 0), (8, 7)):
        company = [*KINDS.values(), *KINDS.values()][: size - 1]
        company.insert(place, KINDS[kind])
        sampler, logits = sampler_of(*company, device=Device()), some_logits(size, seed=10)
        logits[place] = mine[0]
        assert [ids(sampler, logits, step)[place] for step in (0, 1, 40)] == alone


def test_u56_the_stream_advances_and_a_seed_repeats_it() -> None:
    flat = torch.zeros(VOCAB)
    first = draws(SamplingParams(seed=1), flat, 32, Device())
    assert len(set(first)) > 25
    assert draws(SamplingParams(seed=1), flat, 32, Device()) == first
    assert draws(SamplingParams(seed=2), flat, 32, Device()) != first


def test_numbers_stay_below_one_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "uniform", lambda keys, index: np.full(len(keys), 1 - 2.0**-53))
    device = Device()
    assert draws(KINDS["plain"], torch.zeros(VOCAB), 1, device) == [VOCAB - 1]
    numbers, temperature, top_k, top_p = device.columns
    assert numbers.tolist() == [1 - 2.0**-24]
    assert (top_k.dtype, top_k.tolist()) == (torch.int32, [VOCAB])
    assert (temperature.tolist(), top_p.tolist()) == ([1.0], [1.0])


@pytest.mark.parametrize("bad", [NAN, -INF])
def test_u58_a_row_without_usable_logits_is_the_only_one_that_fails(bad: float) -> None:
    params = list(KINDS.values())
    logits = some_logits(len(params))
    good = ids(sampler_of(*params, device=Device()), logits)
    for broken in range(len(params)):
        worse = logits.clone()
        worse[broken, 299 if np.isnan(bad) else slice(None)] = bad
        want = [*good[:broken], -1, *good[broken + 1 :]]
        assert ids(sampler_of(*params, device=Device()), worse) == want


def test_plus_infinity_is_certain() -> None:
    row = some_logits(1)[0]
    row[[290, 5]] = INF
    for kind in ("greedy", "plain", "top-k and top-p"):
        assert set(draws(KINDS[kind], row, 20, Device())) == {5}


@pytest.mark.parametrize(("sample", "calls"), [(True, ["greedy", "sample"]), (False, ["greedy"])])
def test_a_warm_up_calls_each_op_once_with_what_it_takes(sample: bool, calls: list[str]) -> None:
    device = Device(sample=sample)
    device.ops.warm_up(VOCAB, "cpu")
    assert device.calls == calls and device.copied == []
    if sample:
        given = [(tuple(column.shape), column.dtype) for column in device.columns]
        assert given == [((1,), torch.float32)] * 2 + [((1,), torch.int32), ((1,), torch.float32)]
