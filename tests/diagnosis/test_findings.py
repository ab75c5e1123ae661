"""Levels, the verdict, and the command that a sentence holds."""

from __future__ import annotations

import pytest

from pagedkv.diagnosis.findings import EXIT_CODES, Finding, command_in, verdict, worst_first


def found(level):
    return Finding(level=level, about="system", what=level, why="because")


@pytest.mark.parametrize(
    ("levels", "word", "code"),
    [
        ((), "fine", 0),
        (("note", "note"), "fine", 0),
        (("note", "warning"), "warnings", 1),
        (("warning", "broken", "note"), "broken", 2),
    ],
)
def test_the_worst_decides(levels, word, code):
    assert verdict(map(found, levels)) == word and EXIT_CODES[word] == code


def test_the_worst_comes_first_and_the_order_within_a_level_stays():
    levels = ["note", "warning", "broken", "warning"]
    sorted_ = worst_first([Finding(level=v, about="s", what=str(i), why="") for i, v in enumerate(levels)])
    assert [finding.what for finding in sorted_] == ["2", "1", "3", "0"]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("to get it: run `pip install '.[cuda]'` in the clone again", "pip install '.[cuda]'"),
        ("torch is not installed: pip install torch", "pip install torch"),
        ("update it (pip install -U a-dist) or remove it (pip uninstall a-dist)", "pip install -U a-dist"),
        ("start the container with it (docker run --gpus all)", "docker run --gpus all"),
        ("first source /opt/x/set_env.sh, then again", "source /opt/x/set_env.sh"),
        ("pip install torch --index-url https://example.org/x, as the maker says", None),
        ("pip install 'a>=1,<2' or choose another", "pip install 'a>=1,<2'"),
        ("install it again: pip install -U triton.", "pip install -U triton"),
        ("pip uninstall triton-ascend, then pip install triton", "pip uninstall triton-ascend"),
        ("export the model first, unset nothing, source files are missing", ""),
        ("export A_B=1 and try again", "export A_B=1"),
        ("the driver lists none", ""),
    ],
)
def test_the_command_of_a_sentence(text, command):
    assert command_in(text) == (text.partition(",")[0] if command is None else command)
