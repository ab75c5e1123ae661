"""U15: what nobody uses stays cached, and gauges tell in-use from cached."""

from __future__ import annotations

from tests.helpers.engine_rig import engine, greedy, some_prompts


def test_u15_a_finished_request_leaves_its_prefix_behind() -> None:
    (prompt,) = some_prompts([16])
    with engine() as llm:
        pool = llm.engine.scheduler.pool
        assert (pool.num_used, pool.num_cached) == (0, 0)
        llm.generate(prompt, greedy(5), use_tqdm=False)
        assert (pool.num_used, pool.num_cached) == (0, 5), "20 of 21 tokens were stored"
        assert pool.available == pool.usable, "cached blocks are there for whoever needs them"
        (again,) = llm.generate(prompt, greedy(5), use_tqdm=False)
        assert again.num_cached_tokens == 12


def test_u15_the_least_recently_used_goes_first() -> None:
    old, new, big = some_prompts([8, 8, 12])
    with engine(num_blocks=7, block_size=4, max_model_len=24, max_num_seqs=2) as llm:
        for prompt in (old, new):
            llm.generate(prompt, greedy(1), use_tqdm=False)
        llm.generate(big, greedy(5), use_tqdm=False)  # 4 blocks: 2 free ones, then the two of `old`
        assert llm.generate(new, greedy(1), use_tqdm=False)[0].num_cached_tokens == 4
        assert llm.generate(old, greedy(1), use_tqdm=False)[0].num_cached_tokens == 0
