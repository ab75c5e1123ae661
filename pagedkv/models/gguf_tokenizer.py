"""Builds the tokenizer that a GGUF file's metadata describes.

    tokenizer.ggml.model "gpt2"    byte-level BPE: tokens, merges, and the name of the rule that splits text first
    tokenizer.ggml.model "llama"   SentencePiece BPE: tokens with scores; the merges follow from them

Splitting rules and defaults follow `llama-vocab.cpp` of llama.cpp.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from pagedkv.api.errors import ModelError
from pagedkv.models.gguf import ArrayRef, GgufFile
from pagedkv.models.gguf_config import CONTROL, END_TEXTS, end_ids, token_id
from pagedkv.models.tokenizer import Affixes, Tokenizer

_log = logging.getLogger("pagedkv.models")

NORMAL, UNKNOWN, USER_DEFINED = 1, 2, 4
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
MAX_PIECE_CHARS = 256

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LATER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_LATER}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_LATER}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRule:
    """How text is cut before the merges: expressions applied one after the other to what the former left."""

    patterns: tuple[str, ...]
    add_bos: bool = False
    ignore_merges: bool = False
    nfc: bool = False


_DIGITS_GPT2 = SplitRule(patterns=(r"\p{N}", _GPT2))
_PLAIN_GPT2 = SplitRule(patterns=(_GPT2,))
_LLAMA3_RULE = SplitRule(patterns=(_LLAMA3,), add_bos=True, ignore_merges=True)
_DEFAULT_RULE = SplitRule(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

SPLIT_RULES: Mapping[str, SplitRule] = {
    "codeshell": _DIGITS_GPT2,
    "dbrx": SplitRule(patterns=(_LLAMA3,)),
    "default": _DEFAULT_RULE,
    "falcon3": _LLAMA3_RULE,
    "gpt-2": _PLAIN_GPT2,
    "gpt-4o": SplitRule(patterns=(_GPT4O,)),
    "llama-bpe": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "mpt": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "qwen2": SplitRule(patterns=(_QWEN2,), nfc=True),
    "refact": _DIGITS_GPT2,
    "smaug-bpe": SplitRule(patterns=(_LLAMA3,)),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "tekken": SplitRule(patterns=(_TEKKEN,), add_bos=True, ignore_merges=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    file: GgufFile
    texts: list[str]
    types: list[int]

    @property
    def ids(self) -> dict[str, int]:
        ids = {text: index for index, text in enumerate(self.texts)}
        if len(ids) != len(self.texts):
            seen: set[str] = set()
            twice = next(text for text in self.texts if text in seen or seen.add(text))  # type: ignore[func-returns-value]
            raise ModelError(f"{self.file.path}: the vocabulary holds token {twice!r} twice. Convert the model again.")
        return ids

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.file.metadata.get(f"tokenizer.ggml.{name}", default))


def load_gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer in `file`. Raises `ModelError` naming the kind or the splitting rule that is not known."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        known = ", ".join(sorted(_BUILDERS))
        raise ModelError(
            f"{file.path}: tokenizer {kind!r} is not known (known: {known}). Name another with tokenizer=."
        )
    vocabulary = _read_vocabulary(file)
    try:
        backend, add_bos = _BUILDERS[kind](vocabulary)
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception for merges that do not fit the vocabulary
        raise ModelError(f"{file.path}: the tokenizer cannot be built: {error}. Convert the model again.") from error
    _add_special(backend, vocabulary)
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        special_tokens=_special_texts(vocabulary),
        eos_token_ids=end_ids(file),
        chat_template=template if isinstance(template, str) else None,
        affixes=_affixes(vocabulary, add_bos),
        template_source=str(file.path),
    )


def _read_vocabulary(file: GgufFile) -> _Vocabulary:
    texts = [str(text) for text in file.array("tokenizer.ggml.tokens")]
    # llama.cpp names empty tokens in this way, so that every id has a text of its own.
    texts = [text or f"[EMPTY_{index}]" for index, text in enumerate(texts)]
    types = [NORMAL] * len(texts)
    if "tokenizer.ggml.token_type" in file.metadata:
        types = np.asarray(file.array("tokenizer.ggml.token_type")).tolist()
    if len(types) != len(texts):
        raise ModelError(f"{file.path}: {len(texts)} tokens, but {len(types)} token types. Convert the model again.")
    return _Vocabulary(file=file, texts=texts, types=types)


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    file = vocabulary.file
    rule = _split_rule(file)
    merges: list[Any] = [tuple(merge.split(" ", 1)) for merge in map(str, file.array("tokenizer.ggml.merges"))]
    model = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=rule.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    splits: list[Any] = [pre_tokenizers.Split(tokenizers.Regex(text), "isolated") for text in rule.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos


def _split_rule(file: GgufFile) -> SplitRule:
    name = file.metadata.get("tokenizer.ggml.pre")
    if name is None:
        _log.warning(
            "%s names no splitting rule; using 'default', which may cost quality. Convert it again.", file.path
        )
        return _DEFAULT_RULE
    if name not in SPLIT_RULES:
        known = ", ".join(sorted(SPLIT_RULES))
        raise ModelError(f"{file.path}: splitting rule {name!r} is not known ({known}). Name another with tokenizer=.")
    return SPLIT_RULES[name]


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    file = vocabulary.file
    for key in ("tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.remove_extra_whitespaces"):
        value = file.metadata.get(key)
        if value and not (isinstance(value, ArrayRef) and value.count == 0):
            raise ModelError(
                f"{file.path}: {key} is set, and normalizing text is not built. Name another with tokenizer=."
            )
    unknown = token_id(file, "unknown")
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_merges_from_scores(vocabulary),
        unk_token=None if unknown is None else vocabulary.texts[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = vocabulary.flag("add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third one, the best score of the result first.

    SentencePiece joins the neighbours whose result scores best; so the rank of a merge is the rank of its result.
    """
    file, ids = vocabulary.file, vocabulary.ids
    scores = np.asarray(file.array("tokenizer.ggml.scores"), np.float64)
    if len(scores) != len(ids) or np.isnan(scores).any():
        raise ModelError(f"{file.path}: the scores of the vocabulary are damaged. Convert the model again.")
    merges: list[tuple[str, str]] = []
    for index in np.argsort(-scores, kind="stable"):
        piece = vocabulary.texts[index]
        if vocabulary.types[index] != NORMAL:
            continue
        if len(piece) > MAX_PIECE_CHARS:
            raise ModelError(f"{file.path}: token {index} is {len(piece)} characters long, over {MAX_PIECE_CHARS}.")
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += [(left, right) for left, right in halves if left in ids and right in ids]
    return merges


def _add_special(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens are matched in the text and skipped on output; user-defined ones are matched only."""
    special, plain = [], []
    for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True):
        if kind in (CONTROL, UNKNOWN) or text in END_TEXTS:
            special.append(tokenizers.AddedToken(text, special=True, normalized=False))
        elif kind == USER_DEFINED:
            plain.append(tokenizers.AddedToken(text, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _special_texts(vocabulary: _Vocabulary) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: token_id(vocabulary.file, key) for name, key in names.items()}
    return {name: vocabulary.texts[index] for name, index in ids.items() if index is not None}


def _affixes(vocabulary: _Vocabulary, add_bos: bool) -> Affixes:
    def ids(flag: str, name: str, default: bool) -> Sequence[int]:
        if not vocabulary.flag(flag, default):
            return ()
        index = token_id(vocabulary.file, name)
        if index is None:
            raise ModelError(f"{vocabulary.file.path}: {flag} is set, but there is no {name}_token_id.")
        return (index,)

    return Affixes(tuple(ids("add_bos_token", "bos", add_bos)), tuple(ids("add_eos_token", "eos", False)))


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
