"""`LLM`: a model, its cache and its scheduler in one object, for use from Python."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, overload

from pagedkv.api.errors import ModelError, PagedKVError, RequestError, RequestInvalid
from pagedkv.config import EngineConfig
from pagedkv.engine.chat import chat_prompt, is_conversation
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.metrics import EngineMetrics
from pagedkv.engine.outputs import EmbeddingRequestOutput, RequestOutput
from pagedkv.engine.prompts import Prompt, PromptType, is_single, read_prompt
from pagedkv.engine.scoring import Score, Window, window_sizes, windows
from pagedkv.engine.setup import build
from pagedkv.engine.turns import Turns
from pagedkv.logs import setup_logging
from pagedkv.models.tokenizer import Tokenizer
from pagedkv.progress import GenerationBar, loading_bar
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.pooling import PoolingParams

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
_News: TypeAlias = tuple[int, RequestOutput]


class LLM:
    """Loads a model once and answers many prompts.

        llm = LLM("demo")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
            print(output.outputs[0].text)

    `model` is a folder in Hugging Face layout, a .gguf file, a hub id, or "demo". The other settings are those of
    `pagedkv.config.EngineConfig`; a .gguf file's weights stay packed where the backend multiplies them so, unless
    `dtype` or `quantization="none"` says otherwise. Raises `ConfigError`, `ModelError`, `BackendError` or
    `OutOfDeviceMemory`.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        setup_logging()
        config = EngineConfig.of(model=model, **settings)
        with loading_bar() as progress:
            self.engine = LLMEngine(build(config, progress))
        self._turns = Turns()  # taken for one step at most, so that threads and open streams share batches
        self._inbox: dict[int, deque[_News]] = {}

    @overload
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        return_errors: Literal[False] = False,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        return_errors: bool,
    ) -> list[RequestOutput | RequestError]: ...

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        return_errors: bool = False,
    ) -> Sequence[RequestOutput | RequestError]:
        """One output for each prompt, in their order.

        All prompts are checked before any is queued, so an error leaves nothing behind: `RequestInvalid` or
        `RequestTooLong`, which says which prompt it was. With `return_errors` the error stands in its prompt's place
        instead, and the other prompts are answered. `use_tqdm` shows a progress bar on stderr.
        """
        items = [prompts] if is_single(prompts) else list(prompts)
        return self._collect(_Call(items, sampling_params, priority, return_errors), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """The next message of one conversation, or of each in a list: [{"role": "user", "content": "Hello"}, ...].

        The model's chat template writes the prompt; `chat_template` takes its place and runs in the same sandbox.
        `tools` and `chat_template_kwargs` are passed to the template. All conversations are checked before any is
        queued. Raises `RequestInvalid`, `RequestTooLong`, or `ModelError` when there is no template or it fails.
        """
        conversations = [messages] if is_conversation(messages) else list(messages)

        def read(conversation: Any) -> PromptType:
            return chat_prompt(
                self.engine.tokenizer,
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                variables=chat_template_kwargs,
            )

        call = _Call(conversations, sampling_params, priority, read=read, what="conversation")
        return [output for output in self._collect(call, use_tqdm) if isinstance(output, RequestOutput)]

    def stream(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """(index of the prompt, output so far) whenever there is news; closing the iterator aborts what is left."""
        items = [prompts] if is_single(prompts) else list(prompts)
        yield from self._run(_Call(items, sampling_params, priority), False, stream=True)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, in their order, by a model that declares pooling: `outputs.embedding`.

        All prompts are checked before any is queued. Raises `RequestInvalid` or `RequestTooLong`, and `ModelError`
        where the model gives no usable hidden states.
        """
        items = [prompts] if is_single(prompts) else list(prompts)
        call = _Call(items, pooling_params, priority, doing="Embedding", kind=PoolingParams)
        outputs = [output for output in self._collect(call, use_tqdm) if isinstance(output, RequestOutput)]
        return [EmbeddingRequestOutput.of(output) for output in outputs]

    def score(
        self,
        texts: PromptType | Sequence[PromptType],
        *,
        context: int | None = None,
        stride: int | None = None,
        use_tqdm: bool = True,
    ) -> list[Score]:
        """How probable the model finds each text: `logprob`, `tokens`, `perplexity` and each token's `logprobs`.

        A text longer than `context` tokens (unset: the longest prompt there is room for) is scored in windows `stride`
        tokens apart (unset: half of `context`): each token but the first is scored once. Raises `RequestInvalid`, and
        `ModelError` where the model gives no usable logits.
        """
        size, step = window_sizes(context, stride, self._longest_prompt())
        items = [texts] if is_single(texts) else list(texts)
        scores: list[Score] = []
        pieces: list[tuple[Score, Window, bytes]] = []
        for number, item in enumerate(items):
            with _named("text", number, len(items)):
                prompt = read_prompt(item, self.engine.tokenizer, self.engine.parts.vocab_size)
                found = windows(len(prompt.ids), size, step)
            ids = prompt.ids.tolist()
            score = Score(token_ids=ids, logprobs=[None] * len(ids), context=size, stride=step, windows=len(found))
            scores.append(score)
            pieces += [(score, window, prompt.salt) for window in found]
        self._score(pieces, use_tqdm)
        return scores

    def _longest_prompt(self) -> int:
        scheduler = self.engine.scheduler
        chunked, step = scheduler.config.chunked_prefill, scheduler.config.max_num_batched_tokens
        return scheduler.capacity() if chunked else min(scheduler.capacity(), step)

    def _score(self, pieces: list[tuple[Score, Window, bytes]], show: bool) -> None:
        """Fill in the scores. Records of a window are reduced to numbers as soon as they come."""
        items = [
            {"prompt_token_ids": score.token_ids[window.start : window.end], "cache_salt": salt}
            for score, window, salt in pieces
        ]
        params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0, detokenize=False)
        for number, output in self._run(_Call(items, params, 0, doing="Scoring"), show, stream=False):
            score, window, _ = pieces[number]
            records = output.prompt_logprobs or []
            for at in range(window.first, window.end):
                record = records[at - window.start] if output.outputs[0].finish_reason != "error" else None
                if record is None:
                    raise ModelError("the model gives no usable logits (NaN) for this text: it cannot be scored")
                score.logprobs[at] = record[score.token_ids[at]].logprob

    def metrics(self) -> EngineMetrics:
        """Requests, blocks, tokens and preemptions, in numbers."""
        with self._turns:
            return self.engine.metrics()

    def weights_changed(self) -> None:
        """To be called once the model's weights were changed in place: what the old ones computed is used no more.

        Cached blocks are forgotten, on the device and in host memory, and open requests keep their tokens, whose keys
        and values are computed anew.
        """
        with self._turns:
            self.engine.weights_changed()

    def reset_prefix_cache(self) -> int:
        """Forget cached blocks, on the device and in host memory, that no request uses; returns how many."""
        with self._turns:
            return self.engine.reset_prefix_cache()

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

    def _collect(self, call: _Call, show: bool) -> list[RequestOutput | RequestError]:
        results: dict[int, RequestOutput | RequestError] = {}
        for number, output in self._run(call, show, stream=False):
            results[number] = output
        results |= call.errors
        return [results[number] for number in sorted(results)]

    def _run(self, call: _Call, show: bool, *, stream: bool) -> Generator[_News, None, None]:
        ready = self._prepare(call)
        numbers: dict[int, int] = {}
        news: deque[_News] = deque()
        try:
            with self._turns:
                for number, prompt in ready.items():
                    key = self.engine.add_request(
                        prompt,
                        call.params[number],
                        request_id=str(number),
                        priority=call.priorities[number],
                        stream=stream,
                    )
                    numbers[key], self._inbox[key] = number, news
            with GenerationBar(len(ready), call.doing, enabled=show) as bar:
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

    def _prepare(self, call: _Call) -> dict[int, Prompt]:
        """Every prompt of the call by its number, all checked; the bad ones are in `call.errors` if it wants them."""
        ready = {}
        for number, item in enumerate(call.items):
            try:
                with _named(call.what, number, len(call.items)):
                    ready[number] = self.engine.prepare(call.read(item), call.params[number])
            except RequestError as error:
                if not call.return_errors:
                    raise
                call.errors[number] = error
        return ready


class _Call:
    """The prompts of one call with what belongs to each. Raises `RequestInvalid`."""

    def __init__(
        self,
        items: Sequence[Any],
        params: Any,
        priority: Any,
        return_errors: bool = False,
        *,
        read: Callable[[Any], PromptType] = lambda item: item,
        what: str = "prompt",
        doing: str = "Generating",
        kind: type[SamplingParams | PoolingParams] = SamplingParams,
    ) -> None:
        self.items, self.read, self.return_errors = items, read, return_errors
        self.what, self.doing = what, doing
        name = "sampling_params" if kind is SamplingParams else "pooling_params"
        default = kind() if params is None else params
        self.params: list[SamplingParams | PoolingParams] = _each(default, len(items), kind, name)
        self.priorities: list[int] = _each(priority, len(items), int, "priority")
        self.errors: dict[int, RequestError] = {}


@contextmanager
def _named(what: str, number: int, count: int) -> Iterator[None]:
    """Put "prompt 3: " in front of an error of ours, where there are several."""
    try:
        yield
    except PagedKVError as error:
        if count > 1:
            error.args = (f"{what} {number}: {error}",)
        raise


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
