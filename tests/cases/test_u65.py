"""U65: generate called from several threads. Right: the calls share one engine, and each answers as if alone."""

from __future__ import annotations

import threading

from tests.helpers.engine_rig import engine, greedy, solo, some_prompts, token_ids


def test_u65_four_threads_share_one_engine() -> None:
    work = [some_prompts([3 + n, 9, 4 + n], seed=n) for n in range(4)]
    results: dict[int, list[list[int]]] = {}
    with engine() as llm:

        def run(n: int) -> None:
            results[n] = [
                ids for prompt in work[n] for ids in token_ids(llm.generate([prompt], greedy(6), use_tqdm=False))
            ]

        threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results == {n: [solo(p, greedy(6)) for p in prompts] for n, prompts in enumerate(work)}
        assert llm.engine.stats.steps < 4 * 3 * 6, "some steps served several threads"
