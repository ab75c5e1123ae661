"""U52: what penalties count. Repetition: prompt and output; presence and frequency: the output only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import SamplingParams
from pagedkv.sampling.adjust import Adjuster
from tests.helpers.engine_rig import engine, greedy
from tests.helpers.forced import replace_logits

A, B, C, D = range(4)
LOGITS = [2.0, -3.0, 4.0, -1.0]

EXACT: list[tuple[dict[str, float], list[list[float]]]] = [
    # 2 / 1.5 and -3 * 1.5 from the start, for a and b stand in the prompt; c and d once they are written
    (
        {"repetition_penalty": 1.5},
        [[2 / 1.5, -4.5, 4.0, -1.0], [2 / 1.5, -4.5, 4 / 1.5, -1.0], [2 / 1.5, -4.5, 4 / 1.5, -1.5]],
    ),
    ({"presence_penalty": 0.5}, [LOGITS, [2.0, -3.0, 3.5, -1.0], [2.0, -3.0, 3.5, -1.5]]),
    ({"frequency_penalty": 0.25}, [LOGITS, [2.0, -3.0, 3.75, -1.0], [2.0, -3.0, 3.75, -1.25]]),
    (
        {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        [[1.0, -6.0, 4.0, -1.0], [1.0, -6.0, 1.25, -1.0], [1.0, -6.0, 1.25, -2.75]],
    ),
]


@pytest.mark.parametrize(("names", "rows"), EXACT)
def test_u52_adjusted_logits_by_hand(names: dict[str, Any], rows: list[list[float]]) -> None:
    """Prompt a a b, then c and d are written."""
    adjuster = Adjuster(2, 4)
    adjuster.set_row(1, SamplingParams(**names), (), [A, A, B], [], ())
    row = np.array([1])
    for index, want in enumerate(rows):
        got = adjuster.apply(torch.tensor([LOGITS]), row, np.array([index]))
        assert got[0].tolist() == pytest.approx(want, rel=1e-6)
        adjuster.record(row, np.array([[C, D, A][index]]))
    again = Adjuster(2, 4)
    again.set_row(1, SamplingParams(**names), (), [A, A, B], [C, D], ())
    assert again.apply(torch.tensor([LOGITS]), row, np.array([2]))[0].tolist() == pytest.approx(rows[2], rel=1e-6)


def test_u52_frequency_grows_with_each_time_and_presence_does_not() -> None:
    adjuster = Adjuster(2, 4)
    adjuster.set_row(1, SamplingParams(frequency_penalty=1.5, presence_penalty=0.25), (), [A, A, B], [C, C, C], ())
    got = adjuster.apply(torch.tensor([LOGITS]), np.array([1]), np.array([3]))
    assert got[0].tolist() == [2.0, -3.0, 4.0 - 3 * 1.5 - 0.25, -1.0]


@pytest.mark.parametrize(
    ("names", "want"),
    [
        ({"repetition_penalty": 1.5}, "CCCC"),  # c keeps 5 / 1.5 = 3.3; a of the prompt has 3.2 / 1.5
        ({"presence_penalty": 2.0}, "CACC"),  # c 5, then c 3 and a 3.2, then a 1.2 and c still 3
        ({"frequency_penalty": 1.0}, "CCAC"),  # c 5, 4, 3, then a 3.2, then a 2.2 and c 3
    ],
)
def test_u52_through_the_engine(names: dict[str, Any], want: str) -> None:
    """Constant logits c 5, a 3.2: which one is written at each position follows from the formulas."""
    constant = torch.full((320,), -50.0)
    constant[ord("c")], constant[ord("a")] = 5.0, 3.2
    with engine() as llm:
        replace_logits(llm, lambda row, request, index: constant)
        (output,) = llm.generate([ord("a"), ord("a"), ord("b")], greedy(4, **names), use_tqdm=False)
        assert output.outputs[0].text.upper() == want
