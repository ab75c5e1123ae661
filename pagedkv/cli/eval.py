"""`pagedkv eval`: a model's perplexity on a text, through the cache that answers use."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedkv.api.errors import ConfigError
from pagedkv.cli.common import model_argument
from pagedkv.cli.model_options import engine_options, engine_settings
from pagedkv.cli.prompt_files import STDIN, placed

if TYPE_CHECKING:
    from pagedkv.engine.scoring import Score

_SEQUENCES = 4  # windows at once: one alone fills most steps, and more would only take memory

_COUNT = click.IntRange(min=1)


@click.command("eval")
@model_argument
@click.option(
    "--text",
    "files",
    multiple=True,
    required=True,
    metavar="FILE",
    help="A text; may be repeated; - is standard input.",
)
@click.option("--context", type=_COUNT, metavar="N", help="Tokens of a window; else as many as there is room for.")
@click.option("--stride", type=_COUNT, metavar="N", help="Tokens from window to window; else half of a window.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a text.")
@engine_options
def eval(
    model: str,
    files: tuple[str, ...],
    context: int | None,
    stride: int | None,
    as_json: bool,
    settings: dict[str, Any],
) -> None:
    """Measure how well MODEL predicts a text: its perplexity, the lower the better.

    Each token but the first is scored once, with at least N of --context minus N of --stride tokens before it where the
    text has them. Compare figures of the same text, tokenizer, context and stride only.

    \b
    pagedkv eval demo --text book.txt
    pagedkv eval ./Qwen3-0.6B --text wiki.txt --context 2048 --stride 512 --json
    """
    from pagedkv.llm import LLM

    texts = [_read(name) for name in files]
    named = {"max_num_seqs": _SEQUENCES, **engine_settings(settings)}
    if context is not None:
        if context < 2:
            raise ConfigError(f"context={context} must be at least 2 tokens: one to read, one to score")
        named = {"max_model_len": context, **named}
    with LLM(model, **named) as llm:
        for name, text in zip(files, texts, strict=True):
            began = time.monotonic()
            with placed(name):
                (score,) = llm.score([text], context=context, stride=stride)
            _show(name, score, time.monotonic() - began, as_json)


def _read(name: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}; check --text") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: byte {error.start} is not UTF-8 ({error.reason}); convert the file") from error


def _show(name: str, score: Score, seconds: float, as_json: bool) -> None:
    if as_json:
        finite = math.isfinite(score.perplexity)
        record = {
            "text": name,
            "perplexity": score.perplexity if finite else None,
            "logprob": score.logprob,
            "tokens": score.tokens,
            "context": score.context,
            "stride": score.stride,
            "windows": score.windows,
            "seconds": seconds,
            "tokens_per_second": score.tokens / seconds,
        }
        click.echo(json.dumps(record))
        return
    windows = "1 window" if score.windows == 1 else f"{score.windows} windows"
    click.echo(
        f"{name}: perplexity {score.perplexity:.4f} over {score.tokens} tokens ({windows} of up to {score.context} "
        f"tokens, {score.stride} apart); {score.tokens / seconds:.1f} tokens/s"
    )
