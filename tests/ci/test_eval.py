"""The text that quality is measured on: long enough, and English."""

from __future__ import annotations

import pytest

from ci.eval import reference_text
from pagedkv.api.errors import ModelError
from pagedkv.models.checkpoint import open_checkpoint
from pagedkv.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    try:
        return open_checkpoint("demo").tokenizer()
    except ModelError as error:
        pytest.skip(str(error))


def test_the_text_has_the_tokens_that_were_asked_for_and_ends_with_a_chapter(tokenizer: Tokenizer) -> None:
    text = reference_text(tokenizer, 20_000)
    assert 20_000 <= len(tokenizer.encode(text)) < 40_000
    assert text.startswith('The "assert" statement\n')
    words = text.split()
    assert sum(words.count(word) for word in ("the", "of", "is", "a")) > 0.08 * len(words)


def test_more_tokens_than_there_are_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"the text has \d+ tokens, not 10000000: lower --tokens"):
        reference_text(tokenizer, 10_000_000)
