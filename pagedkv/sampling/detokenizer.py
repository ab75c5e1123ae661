"""Text from token ids as they arrive, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MARK = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no character, or not yet."""

_HELD = (
    3  # the longest beginning of a UTF-8 character has three bytes: at most so many marks, or tokens, may yet change
)
_CONTEXT = 8  # prompt tokens that are looked at first for the context
_WINDOW = 24  # tokens in the window that make it worth shortening
_SHORT = range(4, 12)  # lengths tried then; a character has at most four bytes, so one of them starts on a boundary


class Decoder(Protocol):
    """The one method of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Streams a request's text: all pushes and `finish` together are decode(prompt + output) past decode(prompt).

        window ids:    [ context | ... | pending ]
        window text:   [ shown             | new | held marks ]

    A short window of tokens is decoded again for each new one: the context in it keeps what depends on position, such
    as the leading space that SentencePiece decoders take from a text's first word. Trailing replacement marks are held
    back while they may be the beginning of a character, at most three.

    A byte-fallback decoder turns a whole run of byte tokens into marks, one for each byte, as long as the run is not
    valid UTF-8 to its end. Here its characters that were shown stay shown, and only the tokens after them become marks.
    """

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        """`prompt_ids` is context and never shown again.

        A tokenizer whose `byte_fallback` is true (optional, defaults to False until the text shows it) gives one mark
        for each byte of a character that the end cut off; they become one mark.
        """
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._one_mark = bool(getattr(tokenizer, "byte_fallback", False))
        self._ids, self._text = self._context(prompt_ids)
        self._shown = self._text  # the part of the window's text that was given out, or belongs to the prompt
        self._settled = len(self._ids)  # window tokens that are shown in full

    def push(self, ids: Sequence[int]) -> str:
        """Take the next output tokens and return the new text, complete characters only (often empty)."""
        return "".join([self._push(token) for token in ids])

    def finish(self) -> str:
        """Return what was held back; bytes that never became a character are replacement marks."""
        self._resolve()
        rest = self._text[len(self._shown) :]
        self._shown = self._text
        if self._one_mark and rest.endswith(MARK * 2):
            return rest.rstrip(MARK) + MARK
        return rest

    def _push(self, token: int) -> str:
        before = self._text
        self._ids.append(token)
        self._text = self._decode(self._ids)
        if len(self._text) < len(before):
            self._one_mark = True  # several marks became one character: only byte fallback does that
        if self._text == before and not self._decode([token, token]):
            self._ids.pop()  # skipped for good, unlike a first space, of which two would show one
            return ""
        held = min(len(self._text) - len(self._text.rstrip(MARK)), _HELD)
        if not self._text.startswith(self._shown):
            if held and len(self._ids) - self._settled <= _HELD:
                return ""  # a byte-fallback run that became marks and may become characters again
            self._resolve()
        return self._show(held)

    def _show(self, held: int) -> str:
        end = len(self._text) - held
        if end <= len(self._shown) and held:
            return ""
        new = self._text[len(self._shown) : end]
        self._shown = self._text[:end]
        if not held:
            self._settled = len(self._ids)
        if len(self._ids) > _WINDOW:
            self._shorten()
        return new

    def _resolve(self) -> None:
        """Where the window's text contradicts what was shown, go on from the pending tokens alone."""
        if self._text.startswith(self._shown):
            return
        known = self._shown.rstrip(MARK)
        if known != self._shown and self._text.startswith(known):
            self._shown = known  # the prompt ended inside a character, which is now complete
            return
        self._ids = self._ids[self._settled :]
        self._text = self._decode(self._ids)
        self._shown = ""
        self._settled = 0

    def _shorten(self) -> None:
        """Keep the fewest last tokens whose text is the end of the window's, some of it shown."""
        for size in _SHORT:
            text = self._decode(self._ids[-size:])
            gone = len(self._text) - len(text)
            if text and gone < len(self._shown) and self._text.endswith(text):
                self._settled = max(0, self._settled - len(self._ids) + size)
                self._ids = self._ids[-size:]
                self._text, self._shown = text, self._shown[gone:]
                return

    def _context(self, prompt_ids: Sequence[int]) -> tuple[list[int], str]:
        """The prompt's last tokens, enough for some text that does not begin inside a character."""
        size = _CONTEXT
        while True:
            ids = list(prompt_ids[-size:])
            text = self._decode(ids)
            if size >= len(prompt_ids) or (text and not text.startswith(MARK)):
                return ids, text
            size *= 4

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
