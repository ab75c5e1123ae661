"""U32: with chunked prefill off, a prompt above a step's tokens is refused at once, never a hang."""

from __future__ import annotations

import pytest

from pagedkv.errors import RequestTooLong
from tests.helpers.engine_rig import engine, greedy, solo, some_prompts


def test_u32_refused_within_one_call_and_the_next_one_works() -> None:
    long, short = some_prompts([12, 6])
    with engine(max_num_batched_tokens=8, max_num_seqs=4, enable_chunked_prefill=False) as llm:
        with pytest.raises(RequestTooLong, match="max_num_batched_tokens=8 while chunked prefill is off") as caught:
            llm.generate(long, greedy(3), use_tqdm=False)
        assert (caught.value.needed, caught.value.available) == (12, 8)
        assert llm.generate(short, greedy(3), use_tqdm=False)[0].outputs[0].token_ids == solo(short, greedy(3))


def test_u32_prompts_that_fit_a_step_alone_wait_for_their_turn() -> None:
    prompts = some_prompts([8, 7, 5, 3, 8])
    with engine(max_num_batched_tokens=8, max_num_seqs=4, enable_chunked_prefill=False) as llm:
        outputs = llm.generate(prompts, greedy(12), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [solo(p, greedy(12)) for p in prompts]
