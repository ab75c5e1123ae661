"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from pagedkv.api.errors import ModelError, RequestInvalid

_log = logging.getLogger("pagedkv.models")

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Affixes:
    """Ids that `add_special_tokens` puts in front of a text and behind it."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()


class Tokenizer:
    """A model's tokenizer and chat template. Thread-safe: nothing changes after it was made."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        affixes: Affixes | None = None,
        template_source: str = "the model",
    ) -> None:
        """`special_tokens` maps "bos_token", ... to texts. `affixes` None leaves them to the backend's own rule."""
        self._backend = backend
        self._affixes = affixes
        self._template_source = template_source
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id: int | None = self._id_of("bos_token")
        own = self._id_of("eos_token")
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_token_ids, *([] if own is None else [own])]))
        self.special_ids: frozenset[int] = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens in it are recognized. Raises `RequestInvalid` for what is no text."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text, in parallel."""
        for text in texts:
            _check_text(text)
        own = add_special_tokens and self._affixes is None
        encoded = [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=own)]
        if add_special_tokens and self._affixes is not None:
            encoded = [[*self._affixes.prefix, *ids, *self._affixes.suffix] for ids in encoded]
        return encoded

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no valid UTF-8 become U+FFFD, ids beyond the vocabulary nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def to_json(self) -> str:
        """What `tokenizers` writes to a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as the model's template writes it; encode it with `add_special_tokens=False`.

        `chat_template` is used instead of the model's. `kwargs` are the template's own variables (`tools`,
        `enable_thinking`, ...). Raises `ModelError` when there is no template or it fails, `RequestInvalid` when it
        refuses the messages.
        """
        template = self.chat_template if chat_template is None else chat_template
        if template is None:
            raise ModelError(
                f"{self._template_source} has no chat template. Use a chat model, put a chat_template.jinja beside it, "
                "or send a plain prompt."
            )
        from pagedkv.models.chat_template import render

        variables = {"tools": None, "documents": None, **self.special_tokens, **kwargs}
        return render(template, messages, add_generation_prompt=add_generation_prompt, **variables)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestInvalid(f"a text is needed, got {type(text).__name__}", field="prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestInvalid(
            f"the text holds a lone surrogate at character {error.start}; remove it", field="prompt"
        ) from error


def load_hf_tokenizer(folder: Path, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """The tokenizer of a folder in Hugging Face layout: tokenizer.json, tokenizer_config.json, chat_template.jinja.

    `eos_token_ids` are those of the model's configuration; the tokenizer's own is added. Which special tokens frame a
    text is what tokenizer.json says; add_bos_token beside it describes older tokenizers. Raises `ModelError`.
    """
    backend = _read_backend(folder)
    config = read_json(folder / "tokenizer_config.json", {})
    special_tokens = _special_texts(folder, config)
    _add_missing(backend, config, special_tokens, folder)
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_token_ids=eos_token_ids,
        chat_template=_chat_template(folder, config),
        template_source=str(folder),
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(_no_tokenizer(folder))
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise ModelError(f"{path}: cannot be read as a tokenizer: {error}. Download it again.") from error
    backend.no_truncation()  # a limit left in the file would cut prompts silently
    backend.no_padding()
    return backend


def _no_tokenizer(folder: Path) -> str:
    convert = (
        f'Make one once, where transformers is installed: python -c "from transformers import AutoTokenizer as A; '
        f"A.from_pretrained('{folder}').save_pretrained('{folder}')\"; or name another folder with tokenizer=."
    )
    for name, what in (("tokenizer.model", "SentencePiece"), ("vocab.json", "vocabulary and merges")):
        if (folder / name).exists():
            return f"{folder} has only a {what} file ({name}), and tokenizer.json is needed. {convert}"
    return f"{folder} has no tokenizer.json. Copy it there, or name a folder that has one with tokenizer=."


def _special_texts(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ...: texts, written plainly or as {"content": text}."""
    source = {**read_json(folder / "special_tokens_map.json", {}), **config}
    texts = {}
    for name in SPECIAL_NAMES:
        value = source.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


def _add_missing(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str], folder: Path
) -> None:
    """Tokens that stand in tokenizer_config.json alone, and the special ones that tokenizer.json does not mark."""
    listed = config.get("added_tokens_decoder") or {}
    for index, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is None:
            fields = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            token = tokenizers.AddedToken(entry["content"], special=bool(entry.get("special", False)), **fields)
            backend.add_tokens([token])
            _check_id(backend, entry["content"], int(index), folder)
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for name, text in special_tokens.items():
        if backend.token_to_id(text) is None:
            _log.warning("%s: %s %r is not in the vocabulary; ignored", folder, name, text)
        elif text not in known:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def _check_id(backend: tokenizers.Tokenizer, text: str, index: int, folder: Path) -> None:
    if (got := backend.token_to_id(text)) != index:
        raise ModelError(
            f"{folder}: tokenizer_config.json gives token {text!r} the id {index}, tokenizer.json leads to {got}. "
            "The two files do not belong together: download both again."
        )


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: cannot be read: {error}.") from error
    found = config.get("chat_template", read_json(folder / "chat_template.json", {}).get("chat_template"))
    if isinstance(found, list):  # several, by name
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    return found if isinstance(found, str) else None


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in `path`, or `default` where the file is missing. Raises `ModelError` naming the file."""
    if default is not None and not path.is_file():
        return default
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}. Download it again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object. Download it again.")
    return value
