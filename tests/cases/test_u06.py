"""U06: only complete, written blocks are hits; a block that the same step computes is none yet."""

from __future__ import annotations

import pytest

from tests.helpers.core_rig import Rig
from tests.helpers.core_rig import solo as core_solo
from tests.helpers.engine_rig import engine, greedy, solo, some_prompts


@pytest.mark.parametrize("budget", [6, 9, 16, 30])
def test_u06_two_prompts_with_a_common_start_in_one_step(budget: int) -> None:
    (common,) = some_prompts([12])
    prompts = [[*common, 1, 2], [*common, 3, 4, 5]]
    with engine(max_num_batched_tokens=budget, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, greedy(5), use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == solo(prompt, greedy(5))


def test_u06_the_second_reads_no_slot_that_is_not_written() -> None:
    common = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    rig = Rig(max_num_batched_tokens=6, num_blocks=20)
    first, second = rig.add([*common, 1], 4), rig.add([*common, 2], 4)
    rig.step()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, None), "the budget went to the first"
    rig.step()
    rig.drain()  # the rig fails when a row reads a slot that holds anything but its own prefix
    assert first.output_ids == core_solo([*common, 1], 4)
    assert second.output_ids == core_solo([*common, 2], 4)
    assert second.num_cached_tokens is not None and second.num_cached_tokens % 4 == 0
