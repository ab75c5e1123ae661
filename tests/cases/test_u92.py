"""U92: on the CPU, batched prompts get the answers of single ones, cache on or off, in chunks of three."""

from __future__ import annotations

import pytest

from tests.helpers.engine_rig import engine, greedy, solo, transformers_greedy

PROMPTS = [[256, *f"Question number {n}: what is {n} plus {n * n}?".encode()] for n in (1, 22, 303, 4, 5)]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [3, 64])
def test_u92_five_numbers_alone_and_together(caching: bool, chunk: int) -> None:
    with engine(enable_prefix_caching=caching, max_num_batched_tokens=chunk, max_num_seqs=min(8, chunk)) as llm:
        together = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        alone = [llm.generate(prompt, greedy(6), use_tqdm=False)[0] for prompt in PROMPTS]
        for prompt, a, b in zip(PROMPTS, together, alone, strict=True):
            assert a.outputs[0].token_ids == b.outputs[0].token_ids == solo(prompt, greedy(6))
            assert b.num_cached_tokens == ((len(prompt) - 1) // 4 * 4 if caching else 0)
    assert solo(PROMPTS[2], greedy(6)) == transformers_greedy(PROMPTS[2], 6)
