"""U50: as many outputs as prompts, in their order; one too long prompt is one error that names it."""

from __future__ import annotations

import pytest

from pagedkv.errors import RequestTooLong
from tests.helpers.engine_rig import drained, engine, greedy, solo, some_prompts, token_ids


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
