"""Prompts in every form that callers bring, normalized once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from pagedkv.api.errors import RequestInvalid
from pagedkv.api.records import Int32
from pagedkv.models.tokenizer import Tokenizer

PromptType: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; a mapping may carry "cache_salt"."""

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt; `text` is None when ids were given. Cached prefixes are shared only within one `salt`."""

    text: str | None
    ids: Int32
    salt: bytes = b""


def is_single(prompts: Any) -> bool:
    """Whether `prompts` is one prompt rather than a list of them."""
    if isinstance(prompts, str | Mapping):
        return True
    if isinstance(prompts, np.ndarray) and prompts.ndim > 0:
        return prompts.ndim == 1
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise RequestInvalid(
            f"prompts of type {type(prompts).__name__}: give text, token ids, a mapping, or a list of those",
            field="prompt",
        )
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer)


def read_prompt(prompt: Any, tokenizer: Tokenizer | None, vocab_size: int) -> Prompt:
    """Tokenize and check one prompt. Raises `RequestInvalid` naming the field."""
    salt = b""
    text: str | None = None
    ids: Any = prompt
    if isinstance(prompt, Mapping):
        text, ids, salt = _read_mapping(prompt)
    elif isinstance(prompt, str):
        text = prompt
        ids = None
    if text is not None and ids is None:
        ids = _encode(text, tokenizer)
    return Prompt(text=text, ids=_check_ids(ids, vocab_size), salt=salt)


def _read_mapping(prompt: Mapping[str, Any]) -> tuple[str | None, Any, bytes]:
    unknown = sorted(set(prompt) - set(_KEYS))
    if unknown:
        raise RequestInvalid(f"prompt has unknown keys {unknown}; known are {', '.join(_KEYS)}", field="prompt")
    text, ids, salt = (prompt.get(key) for key in _KEYS)
    if text is None and ids is None:
        raise RequestInvalid('a prompt mapping needs "prompt" or "prompt_token_ids"', field="prompt")
    if text is not None and not isinstance(text, str):
        raise RequestInvalid(f'"prompt" must be text, not {type(text).__name__}', field="prompt")
    if salt is not None and not isinstance(salt, str | bytes):
        raise RequestInvalid(f'"cache_salt" must be text, not {type(salt).__name__}', field="cache_salt")
    # A lone surrogate is no UTF-8, but as good a salt as any other text.
    return text, ids, salt.encode(errors="surrogatepass") if isinstance(salt, str) else salt or b""


def _encode(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise RequestInvalid(
            "text needs a tokenizer, but there is none: give prompt_token_ids, or a tokenizer", field="prompt"
        )
    return tokenizer.encode(text)


def _check_ids(ids: Any, vocab_size: int) -> Int32:
    if isinstance(ids, np.ndarray):
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes | bytearray):
        raise RequestInvalid(f"token ids must be a list of whole numbers, not {type(ids).__name__}", field="prompt")
    if not ids:
        raise RequestInvalid("the prompt is empty: give at least one token", field="prompt")
    for at, i in enumerate(ids):
        if isinstance(i, bool) or not isinstance(i, int | np.integer):
            raise RequestInvalid(f"token ids must be whole numbers, found {i!r} at {at}", field="prompt_token_ids")
        if not 0 <= i < vocab_size:
            raise RequestInvalid(
                f"token id {i} at {at} is outside the vocabulary of {vocab_size}", field="prompt_token_ids"
            )
    return np.asarray(ids, dtype=np.int32)
