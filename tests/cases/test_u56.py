"""U56: a seed's stream advances with each token, and the same seed gives the same text in one batch."""

from __future__ import annotations

import torch

from tests.helpers.engine_rig import engine, seeded, some_prompts, token_ids
from tests.helpers.forced import replace_logits


def test_u56_uniform_logits_many_ids_and_equal_twins() -> None:
    (prompt,) = some_prompts([5])
    with engine() as llm:
        replace_logits(llm, lambda row, request, index: torch.zeros_like(row))
        params = [seeded(1, 32), seeded(1, 32), seeded(2, 32)]
        one, twin, other = token_ids(llm.generate([prompt] * 3, params, use_tqdm=False))
        assert len(set(one)) > 25
        assert one == twin != other
