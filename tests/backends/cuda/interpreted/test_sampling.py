"""Sampling against a sorted list in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.api import ContractViolation, OpSpec
from pagedkv.ops import REFERENCE
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.sampler import DeviceOps, Sampler
from pagedkv_cuda.kernels.sampling import greedy, sample
from tests.backends.cuda.double import double

INF = float("inf")


def kept(row: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """(ids, ascending, and weights of the tokens that stay), by sorting."""
    row = row.astype(np.float64)
    order = np.lexsort((np.arange(len(row)), -row))
    order = order[row[order] > -INF][:top_k]
    weights = np.exp((row[order] - row.max()) / temperature)
    if top_p < 1:
        enough = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1
        order, weights = order[:enough], weights[:enough]
    by_id = np.argsort(order)
    return order[by_id], weights[by_id]


def draws(row, temperature, top_k, top_p, numbers):
    n = len(numbers)
    full = [torch.full((n,), value, dtype=torch.float32) for value in (temperature, top_p)]
    logits = torch.from_numpy(np.broadcast_to(row, (n, len(row))).copy())
    numbers = torch.tensor(numbers, dtype=torch.float32)
    return sample(logits, numbers, full[0], torch.full((n,), top_k, dtype=torch.int32), full[1]).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 300, 1.0), (0.7, 5, 1.0), (1.3, 300, 0.6), (1.0, 7, 0.55), (1.0, 1, 0.5), (1.0, 300, 0.0), (2.0, 290, 0.97)],
)
def test_draws_come_from_what_is_kept_in_its_order(temperature, top_k, top_p):
    row = np.random.default_rng(1).standard_normal(300).astype(np.float32) * 3
    row[10:14] = -INF
    ids, weights = kept(row, temperature, top_k, top_p)
    edges = np.cumsum(weights) / weights.sum()
    chosen = np.unique(np.linspace(0, len(ids) - 1, 3).astype(int))
    middles = [edges[i] - weights[i] / weights.sum() / 2 for i in chosen]
    assert draws(row, temperature, top_k, top_p, middles) == ids[chosen].tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (40, 0.28), (40, 0.51)])
def test_a_tie_at_the_edge_keeps_the_lower_ids(top_k, top_p):
    row = np.full(40, -2.0, np.float32)
    row[[5, 9, 21, 30]] = 1.5
    ids, weights = kept(row, 1.0, top_k, top_p)
    middles = (np.arange(len(ids)) + 0.5) / len(ids)
    assert (weights == weights[0]).all()
    assert draws(row, 1.0, top_k, top_p, middles) == ids.tolist()


def test_the_last_number_before_one_still_finds_a_kept_id():
    row = np.array([1.0, 0.0, -INF, -50.0], np.float32)
    assert draws(row, 1.0, 2, 1.0, [1 - 2**-24]) == [1]


def test_greedy_and_its_special_rows():
    logits = torch.tensor(
        [[0.0, 2, 2, -1], [-INF, -INF, -INF, -INF], [1, float("nan"), 0, 9], [3, INF, INF, 0], [-INF, -5, -0.0, 0]]
    )
    assert greedy(logits).tolist() == [1, -1, -1, 1, 2]
    n = len(logits)
    ones, k = torch.ones(n), torch.full((n,), 4, dtype=torch.int32)
    assert sample(logits, torch.full((n,), 0.5), torch.zeros(n), k, ones).tolist() == [1, -1, -1, 1, 2]
    assert sample(logits[1:4], torch.full((3,), 0.5), ones[:3], k[:3], ones[:3]).tolist() == [-1, -1, 1]


def test_greedy_over_several_steps_of_a_16_bit_vocabulary():
    logits = torch.zeros((2, 10_000), dtype=torch.bfloat16)
    logits[0, 9_999], logits[1, 4_100], logits[1, 8_000] = 1.0, 2.0, 2.0
    assert greedy(logits).tolist() == [9_999, 4_100]


# -- rows of a real batch ----------------------------------------------------------------------------------------------

NAN = float("nan")
ROWS = (
    (1.0, 5003, 1.0),
    (0.7, 40, 1.0),
    (1.3, 5003, 0.8),
    (2.0, 900, 0.6),
    (0.0, 5, 0.5),
    (1.0, 1, 1.0),
    (1.0, 5003, 1e-9),
)


def columns(count: int, vocab: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """numbers, temperature, top_k, top_p as the engine hands them over: rows of one tensor, so of any alignment."""
    rows = np.array([ROWS[i % len(ROWS)] for i in range(count)])
    table = torch.empty(4, count)
    table[0] = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    table[1], table[3] = torch.from_numpy(rows[:, 0]), torch.from_numpy(rows[:, 2])
    table[2].view(torch.int32).copy_(torch.from_numpy(rows[:, 1].clip(max=vocab)))
    return table[0], table[1], table[2].view(torch.int32), table[3]


@pytest.mark.parametrize(("vocab", "dtype"), [(5003, torch.float32), (130, torch.bfloat16), (1, torch.float32)])
def test_rows_of_all_kinds_agree_with_the_reference(vocab, dtype):
    """U58: in one batch, each row its own parameters; at an edge of 1e-6 either neighbour will do."""
    logits = (3 * torch.randn(len(ROWS), vocab, generator=torch.Generator().manual_seed(7))).to(dtype)
    numbers, temperature, top_k, top_p = columns(len(ROWS), vocab)
    allowed = [
        REFERENCE["sample"](
            logits, (numbers.double() + aside).clamp(0, 1 - 2**-53), temperature, top_k, top_p + cut * (top_p < 1)
        )
        for aside in (-1e-6, 0, 1e-6)
        for cut in (-1e-6, 0, 1e-6)
    ]
    got = sample(logits, numbers, temperature, top_k, top_p)
    assert all(got[i] in [ids[i] for ids in allowed] for i in range(len(ROWS)))


def test_broken_and_certain_rows_do_not_touch_their_neighbours():
    vocab = 4100
    logits = 3 * torch.randn(7, vocab, generator=torch.Generator().manual_seed(3))
    numbers, ones = columns(7, vocab)[0], torch.ones(7)
    given = (numbers, ones, torch.full((7,), vocab, dtype=torch.int32), ones)
    want = sample(logits, *given).tolist()
    logits[1, vocab - 1] = NAN
    logits[2] = -INF
    logits[3, [4099, 4097]] = INF
    want[1:4] = [-1, -1, 4097]
    assert sample(logits, *given).tolist() == want
    assert greedy(logits).tolist()[1:4] == [-1, -1, 4097]


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (5000, 0.5)])
def test_a_tie_that_lies_in_several_steps_keeps_the_lower_ids(top_k, top_p):
    row = np.full(5000, -40.0, np.float32)
    row[[4090, 4095, 4096, 4600, 4999]] = 2.0
    ids, _ = kept(row, 1.0, top_k, top_p)
    assert ids.tolist() == [4090, 4095, 4096]
    assert draws(row, 1.0, top_k, top_p, (np.arange(3) + 0.5) / 3) == ids.tolist()


@pytest.mark.parametrize(
    ("which", "wrong", "said"),
    [
        (0, torch.zeros(3, 8).T, "rows are contiguous"),
        (0, torch.zeros(3, 8, dtype=torch.int32), "floating-point"),
        (0, torch.zeros(3), "floating-point"),
        (1, torch.zeros(2), "numbers of shape"),
        (2, torch.zeros(3, dtype=torch.float64), "temperature of shape"),
        (3, torch.ones(3), "top_k of shape"),
        (4, torch.ones(6)[::2], "top_p of shape"),
    ],
)
def test_arguments_are_checked(which, wrong, said):
    given = [torch.zeros(3, 8), torch.zeros(3), torch.zeros(3), torch.ones(3, dtype=torch.int32), torch.ones(3)]
    assert sample(*given).tolist() == [0, 0, 0]
    given[which] = wrong
    with pytest.raises(ContractViolation, match=said):
        sample(*given)
    if which == 0:
        with pytest.raises(ContractViolation, match=said):
            greedy(wrong)


def test_no_rows_are_no_launch():
    none = torch.empty(0)
    assert greedy(torch.empty(0, 8)).shape == (0,)
    assert sample(torch.empty(0, 8), none, none, none.int(), none).shape == (0,)


# -- through the backend -----------------------------------------------------------------------------------------------


def test_the_backend_gives_both_ops_with_its_kernels_and_none_without():
    spec = OpSpec(dtype="fp32", dims={"vocab": 50})
    kernels, torch_only = double("triton"), double("torch")
    for name in ("greedy", "sample"):
        assert kernels.op(name, spec) is not None
        assert kernels.op(name, OpSpec(dtype="fp32", attributes={"of_tomorrow": 1})) is None
        assert torch_only.op(name, spec) is None
    assert kernels.op("greedy", spec)(torch.eye(3, 50)).tolist() == [0, 1, 2]


def test_the_sampler_draws_with_the_kernels_what_it_draws_without():
    """U54, U58: greedy, cut, plain and min-p rows in one batch, a broken one among them."""
    backend, spec = double("triton"), OpSpec(dtype="fp32", dims={"vocab": 90})
    ops = DeviceOps(greedy=backend.op("greedy", spec), sample=backend.op("sample", spec), to_host=backend.to_host)
    fields = ({"temperature": 0}, {"top_k": 9}, {"top_p": 0.8, "temperature": 1.4}, {"min_p": 0.1}, {}, {})
    here, there = Sampler(6, 90, 0), Sampler(6, 90, 0, ops)
    for sampler in (here, there):
        for row, asked in enumerate(fields, start=1):
            sampler.set_row(row, SamplingParams(seed=row, **asked), (), 0)
    rows = np.arange(1, 7, dtype=np.int32)
    for step in range(2):
        logits = 3 * torch.randn(6, 90, generator=torch.Generator().manual_seed(step))
        logits[5, 40] = NAN
        want = here(logits, rows, np.full(6, step)).tolist()
        assert there(logits, rows, np.full(6, step)).tolist() == want
        assert want[5] == -1
