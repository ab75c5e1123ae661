"""What to answer: prompts from the command line and from files, every line checked before a model is loaded."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pagedkv.api.errors import ConfigError, PagedKVError, RequestInvalid
from pagedkv.sampling.params import SamplingParams

STDIN = "-"
_OWN = ("id", "prompt", "prompt_token_ids", "cache_salt")
_SAMPLING = tuple(f.name for f in dataclasses.fields(SamplingParams))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to answer. `where` says where it came from, for errors; `id` is its label in JSON output."""

    where: str
    id: str | int
    text: str | None
    ids: list[int] | None = None
    salt: str | None = None
    params: SamplingParams


def read_jobs(prompts: Sequence[str], files: Sequence[str], sampling: Mapping[str, Any]) -> list[Job]:
    """The prompts of the command line, then those of the files in their order.

    `sampling` is what holds where a line does not say otherwise. Raises `ConfigError` or `RequestInvalid` for the first
    bad line, with its file and number.
    """
    params = SamplingParams(**sampling)
    jobs = [Job(where=f"--prompt {n + 1}", id=n, text=text, params=params) for n, text in enumerate(prompts)]
    for name in files:
        for where, line, as_json in lines_of(name):
            with placed(where):
                jobs.append(_job(line, as_json, where, len(jobs), sampling, params))
    return jobs


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Put the place in front of an error of ours."""
    try:
        yield
    except PagedKVError as error:
        error.args = (f"{where}: {error}",)
        raise


def lines_of(name: str) -> Iterator[tuple[str, str, bool]]:
    """(file:line, text, whether it must be a JSON object) of every line that is not blank."""
    if name == STDIN:
        yield from _decoded(sys.stdin.buffer, "standard input", False)
        return
    try:
        with open(name, "rb") as file:
            yield from _decoded(file, name, Path(name).suffix.lower() == ".jsonl")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}; check --prompt-file") from error


def _decoded(file: BinaryIO, name: str, as_json: bool) -> Iterator[tuple[str, str, bool]]:
    for number, raw in enumerate(file, 1):
        where = f"{name}:{number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise RequestInvalid(f"{where}: not UTF-8 ({error.reason}); convert the file", field="prompt") from error
        if line.strip():
            yield where, line, as_json


def _job(line: str, as_json: bool, where: str, number: int, sampling: Mapping[str, Any], params: SamplingParams) -> Job:
    if not as_json and not line.lstrip().startswith('{"'):
        return Job(where=where, id=number, text=line, params=params)
    fields = _object(line)
    _check_fields(fields)
    own = {name: value for name, value in fields.items() if name in _SAMPLING}
    return Job(
        where=where,
        id=number if fields.get("id") is None else fields["id"],
        text=fields.get("prompt"),
        ids=fields.get("prompt_token_ids"),
        salt=fields.get("cache_salt"),
        params=SamplingParams(**{**sampling, **own}) if own else params,
    )


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise RequestInvalid(
            f'not a JSON object ({error}); write {{"prompt": "..."}}, also for a text that begins with {{"',
            field="prompt",
        ) from error
    if not isinstance(value, dict):
        raise RequestInvalid(
            f'a JSON object is needed, not {type(value).__name__}; write {{"prompt": "..."}}', field="prompt"
        )
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name stands in it twice")
    return fields


def _check_fields(fields: Mapping[str, Any]) -> None:
    for name in fields:
        if name not in _OWN and name not in _SAMPLING:
            near = difflib.get_close_matches(name, (*_OWN, *_SAMPLING), n=1)
            known = f"did you mean {near[0]!r}?" if near else f"known are {', '.join((*_OWN, *_SAMPLING))}"
            raise RequestInvalid(f"unknown name {name!r}; {known}", field=name)
    kinds: dict[str, tuple[type, ...]] = {"prompt": (str,), "prompt_token_ids": (list,), "cache_salt": (str,)}
    for name, kind in (kinds | {"id": (str, int)}).items():
        value = fields.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            wanted = {"prompt_token_ids": "a list of token ids", "id": "text or a whole number"}.get(name, "text")
            raise RequestInvalid(f"{name!r} must be {wanted}, not {type(value).__name__}", field=name)
    if fields.get("prompt") is None and fields.get("prompt_token_ids") is None:
        raise RequestInvalid('"prompt" or "prompt_token_ids" is needed', field="prompt")
