"""`pagedkv generate`: answer one or more prompts."""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from pagedkv.api.errors import RequestInvalid
from pagedkv.cli.common import Failure, model_argument
from pagedkv.cli.model_options import engine_options, engine_settings
from pagedkv.cli.prompt_files import STDIN, Job, placed, read_jobs
from pagedkv.cli.sampling_options import sampling_options

if TYPE_CHECKING:
    from pagedkv.engine.engine import LLMEngine
    from pagedkv.engine.outputs import RequestOutput
    from pagedkv.engine.prompts import Prompt
    from pagedkv.models.tokenizer import Tokenizer

MAX_TOKENS = 128
_HEAD = 60  # characters of a prompt in its heading
_log = logging.getLogger("pagedkv.cli")


@click.command("generate")
@model_argument
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="A prompt; may be repeated.")
@click.option(
    "--prompt-file",
    "files",
    multiple=True,
    metavar="FILE",
    help="Prompts from a file, one a line: text, or JSON objects (all lines of a .jsonl file); - is standard input.",
)
@sampling_options(MAX_TOKENS)
@click.option("--chat", is_flag=True, help="Put each prompt as a user's message into the model's chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message.")
@click.option("--stream", is_flag=True, help="Print pieces as they come.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a prompt; with --stream one a piece.")
@engine_options
def generate(
    model: str,
    prompts: tuple[str, ...],
    files: tuple[str, ...],
    sampling: dict[str, Any],
    settings: dict[str, Any],
    **options: Any,
) -> None:
    """Answer one or more prompts with MODEL: a folder, a .gguf file, a hub id, or demo.

    Several prompts are computed together. Answers come in the order of the prompts, on standard output.

    A line of JSON has "prompt" or "prompt_token_ids", and may have "id", "cache_salt" and sampling settings of its own
    ("max_tokens", "temperature", "seed", ...). Blank lines do not count. Without --prompt and --prompt-file, prompts
    are read from standard input.

    \b
    pagedkv generate demo --chat --prompt "Explain photosynthesis in one sentence."
    pagedkv generate demo --prompt "Once upon a time" --temperature 0.8 --seed 1 --stream
    pagedkv generate demo --prompt-file prompts.jsonl --json > answers.jsonl
    """
    if options["system"] is not None and not options["chat"]:
        raise click.UsageError("--system needs --chat: only a chat template has a place for it")
    jobs = read_jobs(prompts, files or _stdin(prompts), sampling)
    if not jobs:
        raise click.UsageError("there is no prompt: standard input or the file has blank lines only")
    for job in jobs:
        _check_shown(job, options["as_json"])
    _run(model, jobs, settings, options)


def _stdin(prompts: Sequence[str]) -> tuple[str, ...]:
    if prompts:
        return ()
    if sys.stdin.isatty():
        raise click.UsageError('there is no prompt; for example: pagedkv generate demo --prompt "Once upon a time"')
    return (STDIN,)


def _run(model: str, jobs: Sequence[Job], settings: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    from pagedkv.config import EngineConfig
    from pagedkv.llm import LLM

    named = engine_settings(settings)
    if "max_num_seqs" not in named:  # room for more sequences than there are would only cost memory
        named["max_num_seqs"] = min(len(jobs), EngineConfig(model=model).max_num_seqs)
    with LLM(model, **named) as llm:
        ready = [_prepare(llm.engine, job, options["chat"], options["system"]) for job in jobs]
        _answer(llm.engine, jobs, ready, stream=options["stream"], as_json=options["as_json"])


def _check_shown(job: Job, as_json: bool) -> None:
    """Refuse what would be computed and not shown."""
    with placed(job.where):
        if job.params.n > 1:
            raise RequestInvalid(
                f"n={job.params.n}: here each prompt has one answer; repeat the prompt, or use LLM.generate", field="n"
            )
        for field in ("logprobs", "prompt_logprobs"):
            if not as_json and getattr(job.params, field) is not None:
                raise RequestInvalid(f"{field} has no place in plain text: add --json", field=field)


def _prepare(engine: LLMEngine, job: Job, chat: bool, system: str | None) -> Prompt:
    """Tokenize and check one prompt; an error says where it came from."""
    with placed(job.where):
        ids = _chat_ids(engine.tokenizer, job, system) if chat else job.ids
        fields = {"prompt": job.text, "prompt_token_ids": ids, "cache_salt": job.salt}
        return engine.prepare({name: value for name, value in fields.items() if value is not None}, job.params)


def _chat_ids(tokenizer: Tokenizer | None, job: Job, system: str | None) -> list[int]:
    if job.text is None or job.ids is not None:
        raise RequestInvalid("--chat needs text, not token ids; leave --chat or the ids out", field="prompt_token_ids")
    if tokenizer is None:
        raise RequestInvalid("--chat needs a tokenizer", field="prompt")
    messages = [{"role": "system", "content": system}] if system is not None else []
    text = tokenizer.apply_chat_template([*messages, {"role": "user", "content": job.text}])
    return tokenizer.encode(text, add_special_tokens=False)  # the template has written them already


# -- answers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What is new of one answer; without --stream that is all of it. `output` comes with the last piece."""

    number: int
    text: str
    ids: list[int]
    output: RequestOutput | None


def _answer(engine: LLMEngine, jobs: Sequence[Job], ready: Sequence[Prompt], *, stream: bool, as_json: bool) -> None:
    # A bar and results on one terminal would disturb each other: first the bar, or only the stream.
    together, began = sys.stdout.isatty(), time.monotonic()
    pieces = _pieces(engine, jobs, ready, stream=stream, bar=not (stream and together))
    if together and not stream:
        pieces = iter(list(pieces))
    if not (stream and as_json):
        pieces = in_order(pieces, len(jobs))
    printer = JsonPrinter(jobs, stream) if as_json else TextPrinter(jobs)
    outputs = []
    for piece in pieces:
        printer.show(piece)
        if piece.output is not None:
            outputs.append(piece.output)
    _summarize(outputs, time.monotonic() - began)


def _pieces(
    engine: LLMEngine, jobs: Sequence[Job], ready: Sequence[Prompt], *, stream: bool, bar: bool
) -> Iterator[Piece]:
    """Run everything; pieces in the order in which they come about."""
    from pagedkv.progress import GenerationBar

    numbers = {
        engine.add_request(prompt, job.params, request_id=str(job.id), stream=stream): number
        for number, (job, prompt) in enumerate(zip(jobs, ready, strict=True))
    }
    seen = dict.fromkeys(numbers, 0)
    with GenerationBar(len(jobs), enabled=bar) as shown:
        while engine.has_unfinished_requests():
            for key, output in engine.step():
                shown.update(output)
                answer = output.outputs[0]
                new, seen[key] = answer.token_ids[seen[key] :], len(answer.token_ids)
                done = output if output.finished else None
                yield Piece(number=numbers[key], text=answer.new_text, ids=new, output=done)


def in_order(pieces: Iterator[Piece], count: int) -> Iterator[Piece]:
    """The same pieces, one prompt after the other; what comes too early waits for its turn."""
    held: list[deque[Piece]] = [deque() for _ in range(count)]
    turn = 0
    for piece in pieces:
        held[piece.number].append(piece)
        while turn < count and held[turn]:
            first = held[turn].popleft()
            yield first
            turn += first.output is not None


class TextPrinter:
    """Answers as text, under headings if there are several. Takes pieces in the order of the prompts."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._current = -1

    def show(self, piece: Piece) -> None:
        """Print one piece, and the line's end after the last."""
        if piece.number != self._current and len(self._jobs) > 1:
            click.echo(("\n" if self._current >= 0 else "") + self._heading(piece.number))
        self._current = piece.number
        click.echo(piece.text, nl=piece.output is not None)

    def _heading(self, number: int) -> str:
        text = self._jobs[number].text
        first = "token ids" if text is None else " ".join(text.split())
        return f"==> {number + 1} of {len(self._jobs)}: {first[:_HEAD]}{'...' if len(first) > _HEAD else ''} <=="


class JsonPrinter:
    """One JSON object a line: an answer, or with --stream a piece of one, the rest in its last piece."""

    def __init__(self, jobs: Sequence[Job], stream: bool) -> None:
        self._jobs = jobs
        self._stream = stream

    def show(self, piece: Piece) -> None:
        """Print one piece as an object."""
        job = self._jobs[piece.number]
        record: dict[str, Any] = {"id": job.id}
        if not self._stream:
            record["prompt"] = job.text
        record |= {"text": piece.text, "token_ids": piece.ids, "finish_reason": None}
        if piece.output is not None:
            record |= _ending(piece.output)
        # Escapes where the stream could not take every character.
        unicode = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
        click.echo(json.dumps(record, ensure_ascii=not unicode))


def _ending(output: RequestOutput) -> dict[str, Any]:
    """What is known of a finished answer; times in seconds since the request was queued."""
    metrics, answer = output.metrics, output.outputs[0]
    finished = metrics.finished_time
    return {
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        **_logprobs(output),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "timings": {
            "time_in_queue": metrics.time_in_queue,
            "time_to_first_token": metrics.time_to_first_token,
            "total_time": None if finished is None else finished - metrics.arrival_time,
        },
    }


def _logprobs(output: RequestOutput) -> dict[str, Any]:
    """The log-probabilities that were asked for: for each token, records by id."""
    asked = {"logprobs": output.outputs[0].logprobs, "prompt_logprobs": output.prompt_logprobs}
    return {
        name: [at and {token: asdict(record) for token, record in at.items()} for at in tokens]
        for name, tokens in asked.items()
        if tokens is not None
    }


def _summarize(outputs: Sequence[RequestOutput], seconds: float) -> None:
    """A line for the log; raises `Failure` if an answer ended with an error."""
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    first = [t for output in outputs if (t := output.metrics.time_to_first_token) is not None]
    reasons = [output.outputs[0].finish_reason for output in outputs]
    _log.info(
        "%s, %d tokens in %.2f s: %.1f tokens/s, first token after %.3f s%s%s",
        "1 prompt" if len(outputs) == 1 else f"{len(outputs)} prompts",
        tokens,
        seconds,
        tokens / seconds if seconds > 0 else 0.0,
        statistics.median(first) if first else 0.0,
        " (median)" if len(first) > 1 else "",
        f"; cut off at the limit of tokens: {reasons.count('length')}" if "length" in reasons else "",
    )
    if "error" in reasons:
        raise Failure(f"{reasons.count('error')} of {len(outputs)} prompts ended with an error, see the log above")
