"""U42: a stop text spread over tokens is cut exactly, and only what may still become one is held back."""

from __future__ import annotations

import pytest

from tests.helpers.engine_rig import engine, greedy
from tests.helpers.forced import force, told

TEXT = "abcENDxyz"

CASES = [
    (["END"], False, ["a", "b", "c", "", "", ""], "END", 6),
    (["END"], True, ["a", "b", "c", "", "", "END"], "END", 6),
    (["E", "END"], False, ["a", "b", "c", ""], "E", 4),
    (["E", "END"], True, ["a", "b", "c", "E"], "E", 4),
    (["ENE"], False, ["a", "b", "c", "", "", "END", "x", "y", "z"], None, 9),
    (["xyz!"], False, ["a", "b", "c", "E", "N", "D", "", "", "xyz"], None, 9),
]


@pytest.mark.parametrize(("stops", "include", "pieces", "reason", "tokens"), CASES)
def test_u42_cut_exactly_stream_and_not(
    stops: list[str], include: bool, pieces: list[str], reason: str | None, tokens: int
) -> None:
    params = greedy(len(TEXT), stop=stops, include_stop_str_in_output=include)
    with engine() as llm:
        force(llm, list(TEXT.encode()))
        samples, output = told(llm, "x", params)
        assert samples[0].pieces == pieces
        (whole,) = llm.generate("x", params, use_tqdm=False)
        for answer in (output.outputs[0], whole.outputs[0]):
            assert answer.text == "".join(pieces)
            assert (answer.finish_reason, answer.stop_reason) == ("stop" if reason else "length", reason)
            assert answer.token_ids == list(TEXT.encode()[:tokens]), "the ids end with the token that completed it"


def test_u42_parts_of_characters_and_of_stop_texts() -> None:
    """A stop text of characters of two and three bytes, each byte a token."""
    text = "ač→ž"
    with engine() as llm:
        force(llm, list(text.encode()))
        samples, output = told(llm, "x", greedy(len(text.encode()), stop=["→ž"]))
        assert samples[0].pieces == ["a", "", "č", "", "", "", "", ""]
        assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("ač", "→ž")


@pytest.mark.parametrize(("min_tokens", "tokens", "text"), [(0, 3, ""), (2, 3, ""), (3, 9, "ENDabc"), (5, 9, "ENDabc")])
def test_u42_a_stop_text_within_the_minimum_is_text(min_tokens: int, tokens: int, text: str) -> None:
    with engine() as llm:
        force(llm, list(b"ENDabcEND"))
        samples, output = told(llm, "x", greedy(12, stop=["END"], min_tokens=min_tokens))
        assert (samples[0].text, len(output.outputs[0].token_ids)) == (text, tokens)


def test_u42_an_end_id_is_no_text_and_one_request_stops_alone() -> None:
    with engine() as llm:
        force(llm, list(b"abEND"))
        params = [greedy(9, stop=["END"], stop_token_ids=[ord("D")]), greedy(9), greedy(9, stop=["b"])]
        outputs = llm.generate(["x"] * 3, params, use_tqdm=False)
        assert [(o.outputs[0].text, o.outputs[0].stop_reason) for o in outputs] == [
            ("abEN", ord("D")),
            ("abEND" + "\x00" * 4, None),
            ("a", "b"),
        ]
