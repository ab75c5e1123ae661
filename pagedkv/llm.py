"""`LLM`: a model, its cache and its scheduler in one object, for use from Python."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from pagedkv.api.errors import RequestError, RequestInvalid
from pagedkv.config import EngineConfig
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.prompts import Prompt, PromptType, is_single
from pagedkv.engine.setup import build
from pagedkv.engine.turns import Turns
from pagedkv.logs import setup_logging
from pagedkv.models.tokenizer import Tokenizer
from pagedkv.progress import GenerationBar, loading_bar
from pagedkv.sampling.params import SamplingParams

_News: TypeAlias = tuple[int, RequestOutput]


class LLM:
    """Loads a model once and answers many prompts.

        llm = LLM("demo")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
            print(output.outputs[0].text)

    `model` is a folder in Hugging Face layout, a .gguf file, a hub id, or "demo". The other settings are those of
    `pagedkv.config.EngineConfig`. Raises `ConfigError`, `ModelError`, `BackendError` or `OutOfDeviceMemory`.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        setup_logging()
        config = EngineConfig.of(model=model, **settings)
        with loading_bar() as progress:
            self.engine = LLMEngine(build(config, progress))
        self._turns = Turns()  # taken for one step at most, so that threads and open streams share batches
        self._inbox: dict[int, deque[_News]] = {}

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """One output for each prompt, in their order.

        All prompts are checked before any is queued, so an error leaves nothing behind: `RequestInvalid` or
        `RequestTooLong`, which says which prompt it was. `use_tqdm` shows a progress bar on stderr.
        """
        outputs = {}
        for number, output in self._run(prompts, sampling_params, priority, use_tqdm, stream=False):
            outputs[number] = output
        return [outputs[number] for number in sorted(outputs)]

    def stream(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """(index of the prompt, output so far) whenever there is news; closing the iterator aborts what is left."""
        yield from self._run(prompts, sampling_params, priority, False, stream=True)

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None with `skip_tokenizer_init`."""
        return self.engine.tokenizer

    def close(self) -> None:
        """End every request and free the model and its cache. Idempotent."""
        with self._turns:
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, prompts: Any, sampling_params: Any, priority: Any, show: bool, *, stream: bool
    ) -> Iterator[tuple[int, RequestOutput]]:
        items = [prompts] if is_single(prompts) else list(prompts)
        default = SamplingParams() if sampling_params is None else sampling_params
        params = _each(default, len(items), SamplingParams, "sampling_params")
        priorities = _each(priority, len(items), int, "priority")
        ready = self._prepare(items, params)
        numbers: dict[int, int] = {}
        news: deque[_News] = deque()
        try:
            with self._turns:
                for number, prompt in enumerate(ready):
                    key = self.engine.add_request(
                        prompt, params[number], request_id=str(number), priority=priorities[number], stream=stream
                    )
                    numbers[key], self._inbox[key] = number, news
            with GenerationBar(ready, enabled=show) as bar:
                while numbers:
                    self._wait_for(news)
                    key, output = news.popleft()
                    bar.update(output)
                    yield (numbers.pop(key) if output.finished else numbers[key]), output
        finally:
            with self._turns:
                for key in numbers:
                    self._inbox.pop(key, None)
                    self.engine.abort_request(key)

    def _wait_for(self, news: deque[_News]) -> None:
        """Step until there is some; whoever steps takes in the outputs of every open call."""
        while not news:
            with self._turns:
                if news:  # another thread's step brought it
                    return
                for key, output in self.engine.step():
                    box = self._inbox.pop(key, None) if output.finished else self._inbox.get(key)
                    if box is not None:
                        box.append((key, output))

    def _prepare(self, items: Sequence[Any], params: Sequence[SamplingParams]) -> list[Prompt]:
        ready = []
        for number, (prompt, p) in enumerate(zip(items, params, strict=True)):
            try:
                ready.append(self.engine.prepare(prompt, p))
            except RequestError as error:
                if len(items) > 1:
                    error.args = (f"prompt {number}: {error}",)
                raise
        return ready


def _each(value: Any, count: int, kind: type, name: str) -> list[Any]:
    """`value` for each of `count` prompts: one for all, or a list with one for each."""
    if isinstance(value, kind):
        return [value] * count
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str | Mapping)
        or not all(isinstance(v, kind) for v in value)
    ):
        raise RequestInvalid(f"{name} must be a {kind.__name__} or a list of them", field=name)
    if len(value) != count:
        raise RequestInvalid(f"{len(value)} {name} for {count} prompts: give one for all or one for each", field=name)
    return list(value)
