"""All options at once, several rows and steps, against a sampler written the plain way in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagedkv.sampling.adjust import Adjuster, History
from pagedkv.sampling.bad_words import word_ids
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.random import stream_key, uniform
from pagedkv.sampling.sampler import Sampler
from tests.helpers.plain_sampler import INF, adjusted, reference
from tests.sampling.test_sampler import some_logits

VOCAB, STEPS = 8, 5
tokens = st.integers(0, VOCAB - 1)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of SamplingParams, and prompt and end ids."""
    return {
        "temperature": draw(st.sampled_from([0, 0.5, 1.0, 2.0])),
        "top_k": draw(st.sampled_from([0, 0, 2, 5])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.37, 0.81])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 0.013, 0.3])),
        "repetition_penalty": draw(st.sampled_from([1.0, 0.5, 1.3, 2.0])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.7, -2.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.4, -1.1])),
        "logit_bias": draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.3, 4.0]), max_size=3)),
        "allowed_token_ids": draw(st.one_of(st.none(), st.lists(tokens, min_size=1, max_size=6))),
        "bad_words": draw(st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4)),
        "min_tokens": draw(st.integers(0, 3)),
        "stop_token_ids": draw(st.lists(tokens, max_size=2)),
        "seed": draw(st.integers(0, 2**40)),
        "prompt": draw(st.lists(tokens, min_size=1, max_size=6)),
        "end_ids": draw(st.lists(st.integers(0, VOCAB + 5), max_size=2)),
    }


def set_row(sampler: Sampler, row: int, fields: dict[str, Any], output: list[int]) -> None:
    own = {name: value for name, value in fields.items() if name not in ("prompt", "end_ids")}
    words = fields["bad_words"]
    sampler.set_row(row, SamplingParams(**own), fields["end_ids"], 0, 0, fields["prompt"], output, words)


def expected(fields: dict[str, Any], logits: list[float], output: list[int]) -> tuple[np.ndarray | None, float]:
    """Exact probabilities by id (None: nothing is left), and how near to an edge they came."""
    made = adjusted(
        logits,
        fields["prompt"],
        output,
        end_ids=[*fields["end_ids"], *fields["stop_token_ids"]],
        min_tokens=fields["min_tokens"],
        allowed=fields["allowed_token_ids"],
        bad_words=fields["bad_words"],
        bias=fields["logit_bias"],
        repetition=fields["repetition_penalty"],
        frequency=fields["frequency_penalty"],
        presence=fields["presence_penalty"],
    )
    if max(made) == -INF:
        return None, 1.0
    gaps = np.diff(np.unique([value for value in made if value > -INF]))
    gap = float(gaps.min()) if len(gaps) else 1.0
    greedy = fields["temperature"] == 0
    names = ("top_k", "top_p", "min_p")
    cuts = {"top_k": 1} if greedy else {"temperature": fields["temperature"], **{name: fields[name] for name in names}}
    exact, margin = reference(made, **cuts)
    return exact, min(gap, margin)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_u47_fuzz_every_draw_is_the_plain_samplers(data: st.DataObject) -> None:
    """Rows move to other rows in the middle, as after a preemption."""
    everyone = data.draw(st.lists(requests(), min_size=1, max_size=3))
    outputs: list[list[int]] = [[] for _ in everyone]
    sampler, moved = Sampler(6, VOCAB, 0), data.draw(st.integers(1, STEPS))
    first = 1
    for step in range(STEPS):
        if step in (0, moved):
            first = 1 if step == 0 else 4
            for at, fields in enumerate(everyone):
                set_row(sampler, first + at, fields, outputs[at])
        values = st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=VOCAB, max_size=VOCAB)
        logits = [data.draw(values) for _ in everyone]
        rows = np.arange(first, first + len(everyone))
        drawn = sampler(torch.tensor(logits), rows, np.full(len(everyone), step)).tolist()
        for at, fields in enumerate(everyone):
            exact, margin = expected(fields, logits[at], outputs[at])
            assume(margin > 1e-5)
            if exact is None:
                assert drawn[at] == -1
            else:
                _check_draw(exact, drawn[at], fields["seed"], step)
            assume(exact is not None)
            outputs[at].append(drawn[at])


def _check_draw(exact: np.ndarray, token: int, seed: int, step: int) -> None:
    """The token's stretch of [0, 1) holds the generator's number."""
    (number,) = uniform(np.array([stream_key(seed)], np.uint64), np.array([step]))
    end = np.cumsum(exact)[token]
    assert exact[token] > 0
    assert end - exact[token] - 1e-5 < number < end + 1e-5


def test_all_options_of_a_row_change_no_other() -> None:
    """The same tokens alone and between rows that ask for everything and for nothing."""
    params = SamplingParams(
        seed=1, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={3: 2.0}, bad_words=[[5, 6]], top_p=0.9
    )
    limited = SamplingParams(allowed_token_ids=[1, 2, 3], min_tokens=12, presence_penalty=2.0, seed=2)
    order = {1: params, 2: SamplingParams(temperature=0), 3: limited, 4: params}
    logits = torch.stack([some_logits(1000, seed=i) for i in (7, 1, 2, 7)])
    together, alone = Sampler(4, 1000, 0), Sampler(1, 1000, 0)
    for row, p in order.items():
        together.set_row(row, p, (2,), row, 0, [4, 5, 6], [], p.bad_words)  # type: ignore[arg-type]
    alone.set_row(1, params, (2,), 1, 0, [4, 5, 6], [], [(5, 6)])
    untouched = logits.clone()
    for step in range(12):
        index = np.full(4, step)
        drawn = together(logits, np.array([1, 2, 3, 4]), index)
        assert drawn[0] == drawn[3] == alone(logits[:1], np.array([1]), index[:1])[0]
        assert drawn[1] == int(logits[1].argmax())
        assert drawn[2] in (1, 3), "2 is an end id"
    assert torch.equal(logits, untouched)


def test_nobody_asking_leaves_the_very_same_logits() -> None:
    adjuster = Adjuster(3, 10)
    adjuster.set_row(1, SamplingParams(min_tokens=2, stop_token_ids=[1]), (), (), (), ())
    logits = torch.zeros(2, 10)
    assert adjuster.apply(logits, np.array([1, 2]), np.array([2, 0])) is logits
    assert adjuster.apply(logits, np.array([1, 2]), np.array([1, 0])) is not logits


def test_a_number_that_is_none_is_not_hidden_by_what_is_allowed() -> None:
    logits = some_logits(100)[None]
    logits[0, 50] = torch.nan
    sampler = Sampler(1, 100, 0)
    sampler.set_row(1, SamplingParams(allowed_token_ids=[1, 2]), (), 0)
    assert sampler(logits, np.array([1]), np.array([0])).tolist() == [-1]


@given(prompt=st.lists(tokens, max_size=9), output=st.lists(st.integers(0, 300), max_size=200), cut=st.integers(0, 200))
@settings(max_examples=50, deadline=None)
def test_counts_kept_up_are_counts_made_anew(prompt: list[int], output: list[int], cut: int) -> None:
    history = History(prompt, output[:cut])
    for token in output[cut:]:
        history.append(token)
    assert dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True)) == {
        token: float(output.count(token)) for token in {*prompt, *output}
    }


def test_samples_of_a_request_are_streams_of_their_own() -> None:
    def stream(seed: int | None, number: int, sample: int) -> tuple[int, ...]:
        sampler = Sampler(1, 1000, 3)
        sampler.set_row(1, SamplingParams(seed=seed), (), number, sample)
        return tuple(sampler(torch.zeros(20, 1000), np.ones(20, np.int64), np.arange(20)).tolist())

    streams = {stream(seed, number, i) for seed, number in ((5, 0), (None, 1), (None, 2)) for i in range(4)}
    assert len(streams) == 12
    assert stream(5, 0, 2) == stream(5, 9, 2), "a user's seed stands for itself"
    assert stream(5, 0, 0) == stream(5, 0, 0)


@pytest.mark.parametrize(
    ("vocabulary", "sequences"),
    [
        ({"bad": [1], " bad": [2]}, [(1,), (2,)]),
        ({"bad": [1], " bad": [9, 1]}, [(1,)]),
        ({"bad": [1, 2], " bad": [3, 2]}, [(1, 2), (3, 2)]),
    ],
)
def test_bad_words_are_meant_with_a_space_too(vocabulary: dict[str, list[int]], sequences: list[Any]) -> None:
    assert word_ids("bad", vocabulary.__getitem__) == word_ids("  bad", vocabulary.__getitem__) == sequences
