"""U03: greedy answers are the same with the prefix cache off, cold and warm."""

from __future__ import annotations

from tests.helpers.engine_rig import engine, greedy, solo, some_prompts, token_ids, transformers_greedy


def test_u03_off_cold_and_warm_give_the_same_ids() -> None:
    (shared,) = some_prompts([20], seed=99)
    prompts = some_prompts([40] * 16) + [shared + tail for tail in some_prompts([20] * 4, seed=1)]
    params = greedy(6)
    with engine(enable_prefix_caching=False, num_blocks=300) as llm:
        off = token_ids(llm.generate(prompts, params, use_tqdm=False))
    with engine(num_blocks=300) as llm:
        cold = llm.generate(prompts, params, use_tqdm=False)
        warm = llm.generate(prompts, params, use_tqdm=False)
    assert token_ids(cold) == off
    assert token_ids(warm) == off
    assert any(o.num_cached_tokens >= 20 for o in cold[17:]), "the four with a common start share it"
    assert all(o.num_cached_tokens == 36 for o in warm)
    for at in (0, 7, 19):
        assert off[at] == solo(prompts[at], params) == transformers_greedy(prompts[at], 6)
