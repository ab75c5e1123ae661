"""U13: a recycled block loses its old hash, so nobody finds other text in it."""

from __future__ import annotations

from tests.helpers.engine_rig import engine, greedy, solo, some_prompts


def test_u13_evicted_blocks_are_not_found_again() -> None:
    x, y = some_prompts([8, 12])
    with engine(num_blocks=5, block_size=4, max_model_len=17, max_num_seqs=2) as llm:
        pool = llm.engine.scheduler.pool
        for prompt in (x, y, x):
            present = len(llm.engine.scheduler.index)
            (output,) = llm.generate(prompt, greedy(3), use_tqdm=False)
            assert output.outputs[0].token_ids == solo(prompt, greedy(3))
            assert output.num_cached_tokens <= 4 * present
        assert output.num_cached_tokens == 0, "Y took all four blocks"
        assert len(llm.engine.scheduler.index) == pool.num_cached


def test_u13_what_was_not_evicted_is_still_found() -> None:
    x, y = some_prompts([8, 3])
    with engine(num_blocks=5, block_size=4, max_model_len=17, max_num_seqs=2) as llm:
        outputs = [llm.generate(prompt, greedy(2), use_tqdm=False)[0] for prompt in (x, y, x)]
        assert [o.num_cached_tokens for o in outputs] == [0, 0, 4]
        assert outputs[2].outputs[0].token_ids == solo(x, greedy(2))
