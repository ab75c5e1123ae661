"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes a text on up to the first stop string, and holds back only what may still become one.

    The first is the one that is complete first, whatever the pieces were; of several that end at one character, the
    longest. It is left out of the text, or ends it with `include`.
    """

    def __init__(self, strings: Sequence[str], include: bool) -> None:
        self._matchers = [_Matcher(text) for text in strings]
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, new: str, armed: bool = True) -> str:
        """Take the next piece and return the text that is now certain. After `found` is set nothing more may come.

        A stop string that is complete while not `armed` is text like any other.
        """
        text = self._held + new
        for end, character in enumerate(new, start=len(self._held) + 1):
            complete = [matcher.text for matcher in self._matchers if matcher.follow(character)]
            if complete and armed:
                self.found = max(complete, key=len)
                self._held = ""
                return text[: end if self._include else end - len(self.found)]
        certain = len(text) - max(matcher.matched for matcher in self._matchers)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held back, now that nothing more comes."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """One string's search, a character at a time.

    Knuth, Morris and Pratt, "Fast pattern matching in strings" (SIAM J. Comput. 6, 1977).
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # the longest beginning of `text` that the text so far ends with
        self._borders = _borders(text)

    def follow(self, character: str) -> bool:
        """Whether `text` is complete with this character."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        self.matched += self.text[self.matched] == character
        if self.matched < len(self.text):
            return False
        self.matched = self._borders[-1]
        return True


def _borders(text: str) -> list[int]:
    """For each beginning of `text`, the length of its longest end that is a shorter beginning."""
    borders, matched = [0] * len(text), 0
    for at in range(1, len(text)):
        while matched and text[matched] != text[at]:
            matched = borders[matched - 1]
        matched += text[matched] == text[at]
        borders[at] = matched
    return borders
