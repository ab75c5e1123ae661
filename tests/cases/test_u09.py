"""U09: a salt keeps one tenant's cached prompts from being met, and so timed, by another."""

from __future__ import annotations

from tests.helpers.engine_rig import engine, greedy, solo, some_prompts


def test_u09_a_prefix_is_reused_inside_one_salt_only() -> None:
    (prompt,) = some_prompts([16])
    with engine() as llm:
        cached = []
        for salt in ("a", "b", "a", None):
            (output,) = llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, greedy(3), use_tqdm=False)
            assert output.outputs[0].token_ids == solo(prompt, greedy(3))
            cached.append(output.num_cached_tokens)
        assert cached == [0, 0, 12, 0]


def test_u09_text_and_bytes_that_look_alike_are_one_salt_and_parts_are_others() -> None:
    (prompt,) = some_prompts([16])
    with engine() as llm:
        cached = []
        for salt in ("ab", b"ab", "a", "abc", "", "\ud800"):
            (output,) = llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, greedy(1), use_tqdm=False)
            cached.append(output.num_cached_tokens)
        assert cached == [0, 12, 0, 0, 0, 0]
