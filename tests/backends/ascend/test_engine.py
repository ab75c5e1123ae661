"""The engine on the Ascend backend's double, in 16 bits: answers beside transformers' in float32.

Emulation: the vendor's operators are float32 stand-ins written from its documents. A token is right if transformers
gives it, in float32 and after the same tokens, a logit within `NEAR` of the largest: rounding may swap neighbours, no
more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagedkv import LLM, RequestOutput
from pagedkv.errors import UnsupportedError
from tests.helpers.engine_rig import drained, folder, greedy, seeded, some_prompts, token_ids
from tests.helpers.tiny_models import hf_logits

NEAR = 0.05
HEAD = some_prompts([40], seed=86)[0]
PROMPTS = [*some_prompts([3, 21, 150], seed=87), [*HEAD, 7, 8, 9], [*HEAD, 5, 4]]
"""Short ones, one that is read in pieces, and two that share their first 40 tokens."""
SETTINGS: dict[str, Any] = {
    "backend": "ascend-double",
    "backend_options": {},
    "dtype": "float16",
    "block_size": 32,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_blocks": 64,
}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that offers the double."""
    info = tmp_path / "ascend_double-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ascend-double\nVersion: 1.0\n")
    target = "tests.backends.ascend.double_descriptor:DOUBLE"
    (info / "entry_points.txt").write_text(f"[pagedkv.backends]\nascend-double = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@contextmanager
def llm_of(family: str, **settings: Any) -> Iterator[tuple[LLM, Path]]:
    """An engine over a tiny model with heads of 16, which must have come to rest when the block ends."""
    place = folder(family, head_dim=16)
    with LLM(place, **SETTINGS | settings) as llm:
        yield llm, place
        drained(llm)


def wrong(outputs: Sequence[RequestOutput], place: Path) -> Iterator[str]:
    """Tokens that transformers would not have given."""
    for prompt, given in zip(PROMPTS, token_ids(outputs), strict=True):
        logits = hf_logits(place, prompt + given)
        for at, token in enumerate(given, len(prompt) - 1):
            behind = float(logits[at].max() - logits[at, token])
            if behind > NEAR:
                yield f"prompt of {len(prompt)}, place {at}: {token} is {behind:.3f} behind"


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_answers_are_transformers_own(block_size: int) -> None:
    with llm_of("mistral", block_size=block_size) as (llm, place):
        for _ in range(2):  # the second time prompts are found in the cache
            outputs = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
            assert list(wrong(outputs, place)) == []
        longest = outputs[2]
        assert longest.num_cached_tokens == 150 // block_size * block_size


@pytest.mark.parametrize(("family", "block_size"), [("mistral_window", 16), ("gemma3", 32), ("mistral_window", 128)])
def test_windows(family: str, block_size: int) -> None:
    with llm_of(family, block_size=block_size) as (llm, place):
        assert list(wrong(llm.generate(PROMPTS, greedy(12), use_tqdm=False), place)) == []


def test_recorded_steps_give_what_eager_ones_give() -> None:
    with llm_of("mistral") as (llm, _):
        eager = token_ids(llm.generate(PROMPTS, greedy(12), use_tqdm=False))
        assert llm.metrics().replayed_steps == 0
    with llm_of("mistral", enforce_eager=False) as (llm, place):
        recorded = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
        assert token_ids(recorded) == eager and list(wrong(recorded, place)) == []
        assert llm.metrics().replayed_steps > 0


def test_swapping_gives_the_tokens_of_a_pool_that_holds_everything() -> None:
    params = seeded(3, 24)
    with llm_of("mistral", block_size=16) as (llm, _):
        wanted = token_ids(llm.generate(PROMPTS, params, use_tqdm=False))
        assert llm.metrics().preemptions == 0
    small: dict[str, Any] = {"block_size": 16, "num_blocks": 16, "swap_blocks": 60, "preemption_mode": "swap"}
    with llm_of("mistral", copy_bandwidth="1GB", **small) as (llm, _):
        assert token_ids(llm.generate(PROMPTS, params, use_tqdm=False)) == wanted
        assert llm.metrics().preemptions > 0


def test_a_model_with_a_softcap_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="no attention operator of torch-npu takes a softcap"):
        LLM(folder("gemma2"), **SETTINGS)
