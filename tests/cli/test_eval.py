"""`pagedkv eval`: perplexity equal to transformers', on standard output; bad input named before anything runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pagedkv.cli import main as cli
from tests.helpers.engine_rig import folder, transformers_logits
from tests.helpers.tiny_models import BOS

ONE_THREAD = ("--backend", "cpu", "--backend-option", "threads=1", "--dtype", "float32", "-q")
TEXT = "Žluťoučký kůň went home. " * 4


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(TEXT, "utf-8")
    return path


def run(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(cli.pagedkv, ["eval", str(folder()), *arguments, *ONE_THREAD], input=stdin)


def perplexity(ids: list[int], context: int, stride: int) -> float:
    """As transformers' guide computes it: a window's tokens that were scored before have no loss."""
    total, before = 0.0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        losses = torch.nn.functional.cross_entropy(
            transformers_logits(ids[begin:end]).double()[:-1], torch.tensor(ids[begin + 1 : end]), reduction="none"
        )
        total += float(losses[-(end - before) :].sum())
        before = end
        if end == len(ids):
            break
    return math.exp(total / (len(ids) - 1))


@pytest.mark.parametrize(("context", "stride"), [(None, None), (32, 8), (20, 19)])
def test_the_perplexity_is_that_of_transformers(book: Path, context: int | None, stride: int | None) -> None:
    sizes = () if context is None else ("--context", str(context), "--stride", str(stride))
    result = run("--text", str(book), "--json", *sizes)
    assert result.exit_code == 0, result.output
    (row,) = map(json.loads, result.stdout.splitlines())
    ids = [BOS, *TEXT.encode()]
    assert row["perplexity"] == pytest.approx(perplexity(ids, context or 256, stride or 128), rel=1e-3)
    assert row["tokens"] == len(ids) - 1 and row["text"] == str(book)
    assert row["logprob"] == pytest.approx(-row["tokens"] * math.log(row["perplexity"]))
    assert (row["context"], row["stride"]) == (context or 256, stride or 128)
    assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])


def test_several_texts_for_people_and_standard_input(book: Path) -> None:
    result = run("--text", str(book), "--text", "-", stdin="a horse")
    assert result.exit_code == 0, result.output
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{book}: perplexity ") and f"over {len(TEXT.encode())} tokens (1 window of" in first
    assert second.startswith("-: perplexity ") and "tokens/s" in second


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ((), None, "Missing option '--text'"),
        (("--text", "/no/such/file"), None, "/no/such/file cannot be read: No such file"),
        (("--text", "-"), b"\xff", "byte 0 is not UTF-8"),
        (("--text", "-"), "", "-: a text of one token has nothing to score"),
        (("--text", "-", "--context", "9", "--stride", "9"), "abc", "stride=9 must be a whole number from 1 to 8"),
        (("--text", "-", "--context", "1"), "abc", "context=1 must be at least 2 tokens"),
        (("--text", "-", "--context", "999"), "abc", "max_model_len=999"),
        (("--text", "-", "--stride", "0"), "abc", "Invalid value for '--stride'"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], stdin: Any, message: str) -> None:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 2, result.output
    assert message in result.stderr and "Traceback" not in result.stderr
