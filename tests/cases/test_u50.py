"""U50: as many outputs as prompts, in their order; one too long prompt is one error that names it."""

from __future__ import annotations

import pytest

from pagedkv import RequestOutput
from pagedkv.errors import RequestInvalid, RequestTooLong
from tests.helpers.engine_rig import drained, engine, greedy, solo, some_prompts, token_ids
from tests.helpers.tiny_models import BOS


def test_u50_a_too_long_prompt_in_a_list() -> None:
    first, long, last = some_prompts([5, 100, 7])
    with engine(max_model_len=32) as llm:
        with pytest.raises(RequestTooLong, match=r"^prompt 1: prompt of 100 tokens .* max_model_len is 32") as caught:
            llm.generate([first, long, last], greedy(4), use_tqdm=False)
        assert (caught.value.needed, caught.value.available) == (104, 32)
        drained(llm)
        assert llm.engine.stats.steps == 0, "nothing of that list was computed"
        outputs = llm.generate([first, last], greedy(4), use_tqdm=False)
        assert token_ids(outputs) == [solo(first, greedy(4)), solo(last, greedy(4))]


def test_u50_order_is_that_of_the_prompts_whoever_ends_first() -> None:
    prompts = some_prompts([3, 9, 4, 20, 1, 6])
    params = [greedy(n) for n in (9, 1, 5, 3, 12, 2)]
    with engine(max_num_seqs=3) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False, priority=[3, 1, 0, 2, 2, 0])
        assert [o.prompt_token_ids for o in outputs] == prompts
        assert [o.request_id for o in outputs] == [str(n) for n in range(6)]
        assert token_ids(outputs) == [solo(p, q) for p, q in zip(prompts, params, strict=True)]


def test_u50_errors_in_the_place_of_their_prompts() -> None:
    first, long, last = some_prompts([5, 100, 7])
    prompts = [first, long, "", last, [999], {"prompt_token_ids": first, "salt": "x"}]
    with engine(max_model_len=32) as llm:
        outputs = llm.generate(prompts, greedy(4), use_tqdm=False, return_errors=True)
        assert len(outputs) == len(prompts)
        answered = [n for n, output in enumerate(outputs) if isinstance(output, RequestOutput)]
        assert answered == [0, 2, 3], "an empty text begins with the start token"
        good = [output for output in outputs if isinstance(output, RequestOutput)]
        assert token_ids(good) == [solo(p, greedy(4)) for p in (first, [BOS], last)]
        assert [output.request_id for output in good] == ["0", "2", "3"]
        assert isinstance(outputs[1], RequestTooLong) and outputs[1].needed == 104
        assert isinstance(outputs[4], RequestInvalid) and outputs[4].field == "prompt_token_ids"
        assert isinstance(outputs[5], RequestInvalid) and str(outputs[5]).startswith(
            "prompt 5: prompt has unknown keys"
        )


def test_u50_errors_of_the_call_itself_are_raised_all_the_same() -> None:
    with engine(max_model_len=32) as llm:
        assert llm.generate([], greedy(4), use_tqdm=False, return_errors=True) == []
        (alone,) = llm.generate([[999]], greedy(4), use_tqdm=False, return_errors=True)
        assert isinstance(alone, RequestInvalid)
        with pytest.raises(RequestInvalid, match="2 sampling_params for 1 prompts"):
            llm.generate(["x"], [greedy(4)] * 2, use_tqdm=False, return_errors=True)
