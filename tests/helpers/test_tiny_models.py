"""The helper itself: what other tests build on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.helpers.tiny_models import BOS, EOS, FAMILIES, VOCAB_SIZE, hf_greedy, hf_logits, tiny_model


def test_the_tokenizer_is_one_token_a_byte(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model(tmp_path) / "tokenizer.json"))
    text = "Hé\n\x00 ÿ😀"
    ids = tokenizer.encode(text).ids
    assert ids == [BOS, *text.encode()]
    assert tokenizer.decode([*ids, EOS]) == text
    assert tokenizer.get_vocab_size() == 258 < VOCAB_SIZE


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_vary_and_repeat(tmp_path: Path, family: str) -> None:
    folder = tiny_model(tmp_path, family)
    first, second = hf_greedy(folder, [BOS, 1, 2, 3], 12), hf_greedy(folder, [BOS, 9, 8], 12)
    assert len(first) == len(second) == 12
    assert len(set(first)) > 2
    assert first != second
    assert hf_logits(folder, [BOS, 1, 2, 3])[-1].argmax() == first[0]


def test_an_ignored_end_is_a_token_like_any_other(tmp_path: Path) -> None:
    prompt = [BOS, 1, 2, 3]
    free = hf_greedy(tiny_model(tmp_path), prompt, 12)
    folder = tiny_model(tmp_path, eos_token_id=[free[4], EOS])
    assert hf_greedy(folder, prompt, 12) == free
    assert hf_greedy(folder, prompt, 12, ignore_eos=False) == free[: free.index(free[4]) + 1]
