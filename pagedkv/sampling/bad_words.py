"""Words that must not be written, as token ids."""

from __future__ import annotations

from collections.abc import Callable

from pagedkv.api.errors import RequestInvalid


def word_ids(word: str, encode: Callable[[str], list[int]]) -> list[tuple[int, ...]]:
    """The token sequences that write `word`, at the beginning of a text and after a space.

    A tokenizer may have a token of its own for a word with its space; like vLLM (vllm/sampling_params.py) both are
    meant. A sequence that ends with the other would never come to be and is left out.
    """
    plain, spaced = (tuple(encode(space + word.lstrip())) for space in ("", " "))
    if not plain:
        raise RequestInvalid(f"bad_words: {word!r} has no tokens; leave it out", field="bad_words")
    return [plain] if spaced[-len(plain) :] == plain else [plain, spaced]
