"""Stop strings against a search that looks at the whole text at each character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.sampling.stop import StopStrings

words = st.text("ab", min_size=1, max_size=5)
pieces = st.lists(st.tuples(st.text("ab", max_size=4), st.booleans()), max_size=10)


def first_stop(text: list[tuple[str, bool]], stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop string ends, and which one it is: the plain way."""
    so_far = ""
    for character, armed in text:
        so_far += character
        complete = [stop for stop in stops if armed and so_far.endswith(stop)]
        if complete:
            return len(so_far), max(complete, key=len)
    return None


def may_become(text: str, stops: list[str]) -> int:
    """How many characters at the end of `text` begin a stop string."""
    return max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))


@given(pieces=pieces, stops=st.lists(words, min_size=1, max_size=3), include=st.booleans())
@settings(max_examples=400, deadline=None)
def test_the_first_is_found_and_no_character_more_is_held_back(
    pieces: list[tuple[str, bool]], stops: list[str], include: bool
) -> None:
    search, shown, characters = StopStrings(stops, include), "", []
    for piece, armed in pieces:
        shown += search.push(piece, armed)
        characters += [(character, armed) for character in piece]
        whole = "".join(character for character, _ in characters)
        found = first_stop(characters, stops)
        if found is None:
            assert search.found is None
            assert shown == whole[: len(whole) - may_become(whole, stops)]
        else:
            end, stop = found
            assert search.found == stop
            assert shown == whole[: end if include else end - len(stop)]
            assert search.finish() == ""
            return
    assert shown + search.finish() == "".join(character for character, _ in characters)


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_u42_the_pieces_do_not_matter(size: int) -> None:
    text = "abcENDxyz"
    for stops, include, want, stop in (
        (["END"], False, "abc", "END"),
        (["END"], True, "abcEND", "END"),
        (["E", "END"], False, "abc", "E"),
        (["END", "E"], True, "abcE", "E"),
        (["ENDx", "ND"], False, "abcE", "ND"),
        (["cEND", "END"], False, "ab", "cEND"),
    ):
        search, shown = StopStrings(stops, include), ""
        for at in range(0, len(text), size):
            shown += search.push(text[at : at + size])
            if search.found is not None:
                break
        assert (shown, search.found) == (want, stop)


def test_a_long_stop_string_costs_a_step_per_character() -> None:
    """A hundred thousand characters that nearly match all the time: quadratic work would take minutes."""
    search = StopStrings(["a" * 50_000 + "b"], False)
    shown = "".join(search.push("a" * 1000) for _ in range(100))
    assert len(shown) == 50_000
    assert shown + search.finish() == "a" * 100_000
