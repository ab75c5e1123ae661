"""After a change of weights nothing is used that the old ones computed, wherever it lies."""

from __future__ import annotations

import pytest

from pagedkv import LLM
from tests.helpers.engine_rig import SETTINGS, drained, folder, greedy, some_prompts, token_ids

PROMPTS = some_prompts([13, 22, 9])
NEW = {"seed": 5}


def _change(llm: LLM, other: LLM) -> None:
    """The other engine's model takes this one's place, over this one's pool."""
    llm.engine.parts.runner.model = other.engine.parts.runner.model


@pytest.mark.parametrize("swap_blocks", [0, 40])
@pytest.mark.parametrize("told", [True, False])
def test_old_keys_and_values_are_used_until_the_engine_is_told(swap_blocks: int, told: bool) -> None:
    small = SETTINGS | {"num_blocks": 17, "swap_blocks": swap_blocks}
    with LLM(folder(**NEW), **SETTINGS) as new, LLM(folder(), **small) as llm:
        expected = new.generate(PROMPTS, greedy(), use_tqdm=False)
        first = llm.generate(PROMPTS, greedy(), use_tqdm=False)
        assert token_ids(first) != token_ids(expected)
        _change(llm, new)
        if told:
            llm.weights_changed()
        again = llm.generate(PROMPTS, greedy(), use_tqdm=False)
        if told:
            assert token_ids(again) == token_ids(expected)
            assert [output.num_cached_tokens for output in again] == [0] * len(PROMPTS)
        else:
            assert any(output.num_cached_tokens for output in again)
        drained(llm)


def test_an_open_request_goes_on_with_the_new_weights() -> None:
    with LLM(folder(**NEW), **SETTINGS) as new, LLM(folder(), **SETTINGS) as llm:
        stream = llm.stream(PROMPTS[0], greedy(12))
        last: list[int] = []
        for _, output in stream:
            last = list(output.outputs[0].token_ids)
            if len(last) == 5:
                _change(llm, new)
                llm.weights_changed()
        rest = new.generate([PROMPTS[0] + last[:5]], greedy(7), use_tqdm=False)
        assert last == last[:5] + token_ids(rest)[0]
        drained(llm)
