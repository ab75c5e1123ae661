"""U94: prefix caching on the CPU works, and the start log says whether it is on."""

from __future__ import annotations

import logging

import pytest

from tests.helpers.engine_rig import engine, greedy, some_prompts


@pytest.mark.parametrize("on", [True, False])
def test_u94_the_log_says_what_is_on_and_the_second_call_shows_it(on: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagedkv")
    (prompt,) = some_prompts([20])
    with engine(enable_prefix_caching=on) as llm:
        text = "on" if on else "off"
        assert f"prefix caching {text}, chunked prefill on (64 tokens a step)" in caplog.text
        llm.generate(prompt, greedy(2), use_tqdm=False)
        cached = llm.generate(prompt, greedy(2), use_tqdm=False)[0].num_cached_tokens
        assert cached == (16 if on else 0)
        assert "prefix_hit" in llm.engine.parts.choice.features
