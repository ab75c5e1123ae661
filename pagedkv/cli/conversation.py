"""A conversation with a model: its messages, and the next answer with the room that is left for it."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedkv.api.errors import ConfigError, RequestTooLong
from pagedkv.engine.chat import chat_prompt

if TYPE_CHECKING:
    from pagedkv.engine.outputs import RequestOutput
    from pagedkv.llm import LLM
    from pagedkv.sampling.params import SamplingParams

Message = dict[str, str]
_log = logging.getLogger("pagedkv.cli")


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer as it grows. Seconds; `prompt_tokens` counts the whole conversation before it."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    first: float | None = None

    @property
    def speed(self) -> float | None:
        """Tokens a second after the first one; None where there was none after it."""
        if self.first is None or self.output_tokens < 2 or self.seconds <= self.first:
            return None
        return (self.output_tokens - 1) / (self.seconds - self.first)

    def take(self, output: RequestOutput, began: float) -> str:
        """Take in what the engine says and return the new text."""
        answer = output.outputs[0]
        self.text, self.finish_reason, self.output_tokens = answer.text, answer.finish_reason, len(answer.token_ids)
        self.cached_tokens = output.num_cached_tokens
        self.seconds = time.monotonic() - began
        if self.first is None and answer.token_ids:
            self.first = self.seconds
        return answer.new_text

    def figures(self) -> dict[str, Any]:
        """The answer as JSON values."""
        return {
            "role": "assistant",
            "content": self.text,
            "finish_reason": self.finish_reason,
            "num_prompt_tokens": self.prompt_tokens,
            "num_cached_tokens": self.cached_tokens,
            "num_output_tokens": self.output_tokens,
            "time_to_first_token": self.first,
            "total_time": self.seconds,
            "tokens_per_second": self.speed,
        }

    def line(self) -> str:
        """The figures for people."""
        speed = "" if self.speed is None else f", {self.speed:.1f} tokens/s"
        first = "" if self.first is None else f", the first after {self.first:.2f} s"
        return (
            f"{self.output_tokens} tokens{speed}{first}; conversation before it: {self.prompt_tokens} tokens, "
            f"{self.cached_tokens} of them from the cache"
        )


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The messages so far, in turns of a question and its answer; a turn whose answer failed is not kept."""

    llm: LLM
    params: SamplingParams
    system: str | None = None
    turns: list[tuple[Message, Message]] = field(default_factory=list)
    last: Answer | None = None

    def messages(self, text: str | None = None) -> list[Message]:
        """All messages; with `text`, as the user's next one behind them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        asked = [] if text is None else [{"role": "user", "content": text}]
        return [*system, *(message for turn in self.turns for message in turn), *asked]

    def ask(self, text: str) -> Generator[str, None, None]:
        """The answer to `text`, piece by piece; it is kept when the iterator ends, also when it is interrupted.

        Raises `RequestTooLong` with the numbers and what to do when no room is left for an answer.
        """
        prompt = chat_prompt(self.llm.engine.tokenizer, self.messages(text))
        params = self._fitting(len(prompt["prompt_token_ids"]))
        answer = Answer(prompt_tokens=len(prompt["prompt_token_ids"]))
        began = time.monotonic()
        try:
            with closing(self.llm.stream([prompt], params)) as outputs:
                for _, output in outputs:
                    yield answer.take(output, began)
        finally:
            answer.seconds = time.monotonic() - began
            answer.finish_reason = answer.finish_reason or "abort"
            self._keep(text, answer)

    def _keep(self, text: str, answer: Answer) -> None:
        self.last = answer
        if answer.finish_reason != "error" and answer.output_tokens:
            self.turns.append(({"role": "user", "content": text}, {"role": "assistant", "content": answer.text}))

    def _fitting(self, length: int) -> SamplingParams:
        """The parameters, `max_tokens` lowered to what is left, which is said."""
        capacity = self.llm.engine.scheduler.capacity()
        left, wanted = capacity - length, self.params.max_tokens
        if left < max(1, self.params.min_tokens):
            raise RequestTooLong(
                f"with this message the conversation has {length} tokens; model and cache hold {capacity}, and an "
                f"answer needs {max(1, self.params.min_tokens)} at least. /drop forgets the oldest turn, /drop N the "
                f"{len(self.turns)} oldest at most, then /retry sends the message again; /reset starts anew; or start "
                "with more room (--max-model-len, --kv-cache-memory)",
                needed=length + 1,
                available=capacity,
            )
        if wanted is not None and wanted > left:
            _log.warning("only %d tokens are left for this answer, not %d: the context is nearly full", left, wanted)
            return dataclasses.replace(self.params, max_tokens=left)
        return self.params

    def take_back(self, text: str) -> None:
        """Forget the last turn if it is the one that began with `text`."""
        if self.turns and self.turns[-1][0]["content"] == text:
            self.turns.pop()

    def drop(self, count: int) -> int:
        """Forget the `count` oldest turns; returns how many there were to forget."""
        gone = min(count, len(self.turns))
        del self.turns[:gone]
        return gone

    def save(self, path: Path) -> int:
        """Write the messages, one JSON object a line, to a new file; returns how many. Raises `ConfigError`."""
        lines = [json.dumps(message, ensure_ascii=False) + "\n" for message in self.messages()]
        try:
            with path.open("x", encoding="utf-8") as file:
                file.writelines(lines)
        except FileExistsError as error:
            raise ConfigError(f"{path} is there already and is left as it is; give another name") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be written: {error}") from error
        return len(lines)
