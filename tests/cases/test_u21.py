"""U21: what can never fit is refused at submission, with the numbers, and blocks nobody."""

from __future__ import annotations

import pytest

from pagedkv.errors import RequestTooLong
from tests.helpers.engine_rig import engine, greedy, solo, some_prompts


def test_u21_refused_with_numbers_while_the_others_go_on() -> None:
    long, middle, short = some_prompts([20, 10, 4])
    with engine(num_blocks=5, block_size=4, max_model_len=64) as llm:
        with pytest.raises(RequestTooLong, match="the cache holds 17") as caught:
            llm.engine.add_request(long, greedy(1))
        assert (caught.value.needed, caught.value.available) == (21, 17)
        with pytest.raises(RequestTooLong, match=r"10 tokens \+ max_tokens=30") as caught:
            llm.engine.add_request(middle, greedy(30))
        assert (caught.value.needed, caught.value.available) == (40, 17)
        unlimited = llm.engine.add_request(middle, greedy(None))
        behind = llm.engine.add_request(short, greedy(6))
        done = {}
        while llm.engine.has_unfinished_requests():
            done |= dict(llm.engine.step())
        assert done[unlimited].outputs[0].finish_reason == "length"
        assert done[unlimited].outputs[0].token_ids == solo(middle, greedy(7))
        assert done[behind].outputs[0].token_ids == solo(short, greedy(6))


def test_u21_the_longest_that_fits_is_answered() -> None:
    (prompt,) = some_prompts([16])
    with engine(num_blocks=5, block_size=4, max_model_len=64) as llm:
        assert llm.generate(prompt, greedy(1), use_tqdm=False)[0].outputs[0].token_ids == solo(prompt, greedy(1))
