"""U64: n samples share the prompt's blocks, differ, come again under a seed; the prompt is counted once."""

from __future__ import annotations

from typing import Any

from tests.helpers.engine_rig import drained, engine, seeded, some_prompts

(PROMPT,) = some_prompts([6])
PARAMS = seeded(5, 7, n=3)


def texts(output: Any) -> list[str]:
    return [answer.text for answer in output.outputs]


def test_u64_three_different_texts_the_same_on_rerun_from_shared_blocks() -> None:
    with engine(block_size=4) as llm:
        (first,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
        assert len(set(texts(first))) == 3
        assert [answer.index for answer in first.outputs] == [0, 1, 2]
        assert llm.engine.stats.computed_tokens == 6 + 3 * 6, "the prompt once, and each token but the last"
        assert (len(first.prompt_token_ids), first.num_cached_tokens) == (6, 0)
        (again,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
        assert texts(again) == texts(first)
        assert again.num_cached_tokens == 4
    with engine(block_size=4, seed=77) as llm:
        assert texts(llm.generate(PROMPT, PARAMS, use_tqdm=False)[0]) == texts(first)


def test_u64_blocks_are_shared_until_written() -> None:
    with engine(block_size=4) as llm:
        pool, scheduler = llm.engine.scheduler.pool, llm.engine.scheduler
        llm.engine.add_request(PROMPT, PARAMS)
        llm.engine.step()
        tables = [scheduler.rows.held(request.row) for request in scheduler.running]
        assert len(tables) == 3 and tables[0] == tables[1] == tables[2]
        assert pool.num_used == 2, "two blocks for three samples"
        llm.engine.step()
        tables = [scheduler.rows.held(request.row) for request in scheduler.running]
        assert len({table[0] for table in tables}) == 1 and len({table[1] for table in tables}) == 3
        assert pool.num_used == 4, "the last block of the prompt is copied by whoever writes it first"
        peak = 0
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
            peak = max(peak, pool.num_used)
        assert peak == 1 + 3 * 2 < 3 * 3


def test_u64_samples_that_find_no_row_wait_and_hit_the_cache() -> None:
    with engine(block_size=4) as llm:
        (whole,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    with engine(block_size=4, max_num_seqs=2) as llm:
        (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
        assert texts(output) == texts(whole)
        assert output.num_cached_tokens == 0
        assert llm.engine.stats.computed_tokens == 6 + 3 * 6 + 2, "the third computes again what is no whole block"


def test_u64_abort_ends_all_and_frees_all() -> None:
    with engine() as llm:
        stream = llm.stream(PROMPT, seeded(5, 40, n=3))
        for _ in range(5):
            _, output = next(stream)
        assert len(output.outputs) == 3 and not output.finished
        stream.close()
        drained(llm)
