"""The engine alone under the work of a server: C requests at once, each replaced when it ends, no front and no pipe.

    python serve_engine.py '{"model": ..., "settings": {...}, "threads": 2}'

Speaks the JSON lines of peers/protocol.py. With "stream", every token gives an output, its new text included; without,
each request gives one output at its end, as the server asks its engine for both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_figures import Answered, figures

from pagedkv.cli.machine import engine_facts
from pagedkv.config import EngineConfig
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.setup import build
from pagedkv.logs import setup_logging
from pagedkv.sampling.params import SamplingParams

sys.path.append(str(Path(__file__).resolve().parent / "peers"))
from protocol import Run, serve


class Feed:
    """One run: requests in their order, `clients` of them in the engine at any time."""

    def __init__(self, engine: LLMEngine, prompts: Sequence[list[int]], output_len: int, stream: bool) -> None:
        self._engine, self._stream = engine, stream
        self._params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        self._left = iter(prompts)
        self._sent: dict[int, float] = {}
        self._news: dict[int, list[float]] = {}

    def run(self, clients: int) -> list[Answered]:
        """Answer all of them."""
        answers: list[Answered] = []
        for _ in range(clients):
            self._add()
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for key, output in outputs:
                if self._stream:
                    self._news[key].append(now)
                if output.finished:
                    answers.append(self._answered(key, now, len(output.outputs[0].token_ids)))
                    self._add()
        return answers

    def _add(self) -> None:
        prompt = next(self._left, None)
        if prompt is not None:
            now = time.perf_counter()
            key = self._engine.add_request({"prompt_token_ids": prompt}, self._params, stream=self._stream)
            self._sent[key], self._news[key] = now, []

    def _answered(self, key: int, now: float, tokens: int) -> Answered:
        return Answered(sent=self._sent.pop(key), ended=now, news=self._news.pop(key), tokens=tokens)


def load(given: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """The engine with these settings."""
    setup_logging()
    engine = LLMEngine(build(EngineConfig.of(model=given["model"], **given["settings"])))

    def run(prompts: Sequence[list[int]], output_len: int, *, clients: int = 1, stream: bool = False) -> dict[str, Any]:
        began = time.process_time()
        answers = Feed(engine, prompts, output_len, stream).run(clients)
        spent = time.process_time() - began
        if any(each.tokens != output_len for each in answers):
            raise SystemExit("a request ended early, as the log says: there is nothing to measure")
        return {**figures(answers), "cpu": {"engine": spent}}

    return run, engine_facts(engine.parts)


if __name__ == "__main__":
    serve(load)
