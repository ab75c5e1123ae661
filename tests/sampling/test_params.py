"""What SamplingParams accepts, what it refuses, and what the refusal says."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from pagedkv.api.errors import ConfigError, RequestInvalid
from pagedkv.sampling.params import SamplingParams


def test_the_defaults_are_those_users_know() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (1.0, 1.0, 0, 0.0, 16)
    assert not params.greedy


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("temperature", float("nan"), "at least 0"),
        ("temperature", float("inf"), "finite"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", "1", "finite number"),
        ("temperature", True, "finite number"),
        ("temperature", None, "finite number"),
        ("temperature", 10**400, "finite number"),
        ("top_p", -1e-9, "from 0 to 1"),
        ("top_p", 1.01, "from 0 to 1"),
        ("top_p", float("nan"), "from 0 to 1"),
        ("top_k", -2, "at least -1"),
        ("top_k", 2.0, "an integer"),
        ("top_k", True, "an integer"),
        ("min_p", 1.5, "from 0 to 1"),
        ("min_p", -0.5, "from 0 to 1"),
        ("seed", 2**63, "-2**63"),
        ("seed", -(2**63) - 1, "-2**63"),
        ("seed", 1.5, "an integer"),
        ("seed", False, "an integer"),
        ("max_tokens", -1, "at least 1"),
        ("max_tokens", -5, "at least 1"),
        ("max_tokens", 1.0, "an integer"),
        ("min_tokens", -1, "at least 0"),
        ("stop_token_ids", [1, -1], "integers of at least 0"),
        ("stop_token_ids", [True], "integers of at least 0"),
        ("stop_token_ids", ["1"], "integers of at least 0"),
        ("stop_token_ids", "12", "a list of token ids"),
        ("stop_token_ids", 7, "a list of token ids"),
        ("n", 0, "from 1 to 16384"),
        ("n", 16_385, "from 1 to 16384"),
        ("n", True, "an integer"),
        ("n", 1.0, "an integer"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", -1.0, "above 0"),
        ("repetition_penalty", float("inf"), "finite"),
        ("presence_penalty", 2.01, "from -2 to 2"),
        ("frequency_penalty", -2.01, "from -2 to 2"),
        ("frequency_penalty", float("nan"), "from -2 to 2"),
        ("logprobs", -2, "-1 for all"),
        ("logprobs", True, "an integer"),
        ("prompt_logprobs", "1", "an integer"),
        ("logit_bias", {"x": 5}, "a mapping of token ids"),
        ("logit_bias", {"-1": 5}, "a mapping of token ids"),
        ("logit_bias", {-1: 5}, "a mapping of token ids"),
        ("logit_bias", {1.5: 5}, "a mapping of token ids"),
        ("logit_bias", {True: 5}, "a mapping of token ids"),
        ("logit_bias", {"\u00b2": 5}, "a mapping of token ids"),
        ("logit_bias", {5: 100.5}, "from -100 to 100"),
        ("logit_bias", {5: float("nan")}, "finite"),
        ("logit_bias", {5: None}, "finite"),
        ("logit_bias", {5: 1, "5": 1}, "each id once"),
        ("logit_bias", [5], "a mapping of token ids"),
        ("logit_bias", [(5, 1, 1)], "a mapping of token ids"),
        ("logit_bias", "5", "a mapping of token ids"),
        ("logit_bias", 5, "a mapping of token ids"),
        ("allowed_token_ids", [], "at least one token id"),
        ("allowed_token_ids", [-1], "integers of at least 0"),
        ("allowed_token_ids", ["1"], "integers of at least 0"),
        ("bad_words", "x", "a list of texts"),
        ("bad_words", [""], "not blank"),
        ("bad_words", [" "], "not blank"),
        ("bad_words", [[]], "not blank"),
        ("bad_words", [[-1]], "lists of token ids"),
        ("bad_words", [5], "lists of token ids"),
        ("stop", "", "none of them empty"),
        ("stop", ["END", ""], "none of them empty"),
        ("stop", [b"END"], "a list of texts"),
        ("stop", [5], "a list of texts"),
        ("stop", 5, "a list of texts"),
        ("include_stop_str_in_output", 1, "True or False"),
        ("ignore_eos", 1, "True or False"),
        ("detokenize", None, "True or False"),
    ],
)
def test_absurd_values_are_refused_with_the_range(field: str, value: Any, accepted: str) -> None:
    with pytest.raises(RequestInvalid, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert accepted in str(caught.value)
    assert repr(value) in str(caught.value)


def test_all_wrong_fields_stand_in_one_error() -> None:
    with pytest.raises(RequestInvalid) as caught:
        SamplingParams(temperature=-1, top_p=2, stop_token_ids=[-3])
    assert all(name in str(caught.value) for name in ("temperature", "top_p", "stop_token_ids"))
    assert caught.value.field == "temperature"


def test_more_tokens_demanded_than_allowed() -> None:
    with pytest.raises(RequestInvalid, match=r"min_tokens \(20\) must not exceed max_tokens \(16\)") as caught:
        SamplingParams(min_tokens=20)
    assert caught.value.field == "min_tokens"
    assert SamplingParams(min_tokens=20, max_tokens=None).min_tokens == 20


CONTRADICTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0}, "max_tokens", "only scores the prompt"),
    ({"max_tokens": 0, "prompt_logprobs": 1, "n": 2}, "n", "n=2 answers need tokens"),
    ({"n": 2, "temperature": 0}, "n", "greedy answers would all be the same"),
    ({"n": 2, "temperature": 1e-6}, "n", "greedy answers"),
    ({"n": 3, "top_k": 1}, "n", "n=3 greedy answers"),
    ({"n": 2, "top_p": 0}, "n", "greedy answers"),
    ({"stop": "x", "detokenize": False}, "stop", "detokenize=False makes none"),
    ({"max_tokens": 0, "prompt_logprobs": 0, "min_tokens": 1}, "min_tokens", "must not exceed"),
]


@pytest.mark.parametrize(("fields", "field", "reason"), CONTRADICTIONS)
def test_fields_that_contradict_each_other(fields: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(RequestInvalid, match=reason) as caught:
        SamplingParams(**fields)
    assert caught.value.field == field


def test_contradictions_and_wrong_values_stand_in_one_error() -> None:
    with pytest.raises(RequestInvalid) as caught:
        SamplingParams(top_p=2, max_tokens=3, min_tokens=4, stop="x", detokenize=False, n=2, temperature=0)
    text = str(caught.value)
    assert text.count("; ") == 2
    assert "top_p must be" in text and "min_tokens (4)" in text and "stop looks for text" in text
    assert "greedy answers" not in text, "nothing is said about n while top_p, which it rests on, is wrong"


def test_lists_become_plain_and_may_be_given_back() -> None:
    params = SamplingParams(
        logit_bias={"7": 1, 3: -100.0, np.int64(5): np.float32(0.5)},
        allowed_token_ids=[np.int32(4), 2, 4],
        bad_words=["x", [1, 2], "x"],
        stop="END",
        n=2,
        logprobs=-1,
        prompt_logprobs=0,
    )
    assert params.logit_bias == ((3, -100.0), (5, 0.5), (7, 1.0))
    assert params.allowed_token_ids == (4, 2)
    assert params.bad_words == ("x", (1, 2))
    assert params.stop == ("END",)
    assert hash(dataclasses.replace(params)) == hash(params) == hash(pickle.loads(pickle.dumps(params)))
    none = SamplingParams(logit_bias=None, bad_words=None, stop=None)
    assert none == SamplingParams() == SamplingParams(logit_bias={}, bad_words=[], stop=[])


def test_ids_of_every_field_are_checked_together() -> None:
    params = SamplingParams(
        stop_token_ids=[10], logit_bias={"999999": 5}, allowed_token_ids=[1, 11], bad_words=[[2, 12]], logprobs=11
    )
    with pytest.raises(RequestInvalid) as caught:
        params.check_ids(10)
    for part in ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words", "logprobs must be at most"):
        assert part in str(caught.value)
    assert caught.value.field == "stop_token_ids"
    params.check_ids(1_000_000)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean temperature"):
        SamplingParams(temprature=0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did you mean top_p"):
        dataclasses.replace(SamplingParams(), topp=0.5)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="known are temperature, top_p"):
        SamplingParams(xyzzy=0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="named settings only"):
        SamplingParams(0.5)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [
        ("best_of", None, 3),
        ("spaces_between_special_tokens", True, False),
        ("logits_processors", [], [print]),
        ("truncate_prompt_tokens", None, 8),
    ],
)
def test_names_that_are_not_built_yet(name: str, neutral: Any, other: Any) -> None:
    assert SamplingParams(**{name: neutral}) == SamplingParams()
    with pytest.raises(ConfigError, match=f"{name} is not built yet"):
        SamplingParams(**{name: other})


def test_values_become_plain_types() -> None:
    params = SamplingParams(
        temperature=0, top_k=np.int64(5), top_p=np.float32(0.5), stop_token_ids=[np.int32(3)], max_tokens=None
    )
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert params.stop_token_ids == (3,)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]
    assert hash(params) == hash(dataclasses.replace(params))


@pytest.mark.parametrize(
    ("settings", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1e-6}, True),
        ({"temperature": 1e-4}, False),
        ({"top_p": 0}, True),
        ({"top_k": 1}, True),
        ({"top_k": -1}, False),
        ({"top_k": 10**9}, False),
    ],
)
def test_u58_what_is_greedy(settings: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**settings).greedy is greedy


def test_ids_outside_the_vocabulary() -> None:
    params = SamplingParams(stop_token_ids=[3, 100, 7, 101])
    params.check_ids(102)
    with pytest.raises(RequestInvalid, match=r"from 0 to 99, got \[100, 101\]") as caught:
        params.check_ids(100)
    assert caught.value.field == "stop_token_ids"


def test_copies_and_pickles() -> None:
    params = SamplingParams(temperature=0.5, seed=-1, stop_token_ids=[1])
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3  # type: ignore[misc]
