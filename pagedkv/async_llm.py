"""`AsyncLLM`: one model for many callers in event loops."""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from pagedkv.api.errors import EngineDead, RequestInvalid
from pagedkv.config import EngineConfig
from pagedkv.engine.background import Background, Channel, Reader
from pagedkv.engine.chat import chat_prompt
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.metrics import EngineMetrics
from pagedkv.engine.outputs import EmbeddingRequestOutput, RequestOutput
from pagedkv.engine.prompts import Prompt, PromptType
from pagedkv.engine.setup import build
from pagedkv.logs import setup_logging
from pagedkv.models.tokenizer import Tokenizer
from pagedkv.progress import loading_bar
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.pooling import PoolingParams

_ENCODERS = 4  # threads, so that one very long prompt does not hold up the others


class AsyncLLM:
    """Loads a model once and answers many callers at the same time, each through a stream of its own.

        async with AsyncLLM("demo") as llm:
            async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
                print(output.outputs[0].new_text, end="")

    Settings and errors are those of `LLM`. Making one loads the model and takes seconds: inside a coroutine write
    `await asyncio.to_thread(AsyncLLM, "demo")`. A thread of its own steps the engine, so that no event loop ever waits
    for the model or the tokenizer; streams may be read in different event loops.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        setup_logging()
        config = EngineConfig.of(model=model, **settings)
        with loading_bar() as progress:
            self.engine = LLMEngine(build(config, progress))
        self._background = Background(self.engine)
        self._encoders = ThreadPoolExecutor(_ENCODERS, "pagedkv-encode")
        self._numbers = itertools.count()
        self._close = weakref.finalize(self, _shut, self._encoders, self._background)

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestStream:
        """Queue one prompt and return the stream of its outputs, the last of which is `finished`.

        Each output holds all the text so far, and in `new_text` what is new since the one before. A reader that is
        slower than the engine gets fewer, larger pieces. `request_id` is a label that need not be unique. Whatever is
        wrong with the request is raised by the stream: `RequestInvalid`, `RequestTooLong`, or `EngineDead`.
        """
        return self._start(lambda: prompt, _sampling(sampling_params), request_id, priority)

    async def embed(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> EmbeddingRequestOutput:
        """The vector of one prompt, by a model that declares pooling; cancelling this aborts the request.

        Raises what the streams of `generate` do, and `ModelError` where the model gives no usable hidden states.
        """
        wanted = PoolingParams() if pooling_params is None else pooling_params
        if not isinstance(wanted, PoolingParams):
            raise RequestInvalid(
                f"pooling_params must be a PoolingParams, not {type(wanted).__name__}", field="pooling_params"
            )
        stream = self._start(lambda: prompt, wanted, request_id, priority)
        return EmbeddingRequestOutput.of([output async for output in stream][-1])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestStream:
        """The next message of one conversation, as a stream; arguments as in `LLM.chat`."""
        tokenizer = self.engine.tokenizer

        def read() -> PromptType:
            return chat_prompt(
                tokenizer,
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                variables=chat_template_kwargs,
            )

        return self._start(read, _sampling(sampling_params), request_id, priority)

    async def abort(self, request: str | RequestStream) -> bool:
        """End a request, given by its stream or its label; False if there is none, or it has finished.

        Its blocks are free when this returns. Its stream still gives what there was, with finish_reason "abort".
        Raises `RequestInvalid` for a label that several open requests have.
        """
        if isinstance(request, RequestStream):
            return await asyncio.wrap_future(self._background.abort(request.channel))
        found = self._background.labelled(request)
        if len(found) > 1:
            raise RequestInvalid(
                f"{len(found)} open requests are called {request!r}: give abort the stream of the one to end",
                field="request_id",
            )
        return bool(found) and await asyncio.wrap_future(self._background.abort(found[0]))

    def metrics(self) -> EngineMetrics:
        """Requests, blocks, tokens and preemptions, in numbers; a step may be under way meanwhile."""
        return self.engine.metrics()

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None with `skip_tokenizer_init`."""
        return self.engine.tokenizer

    @property
    def is_alive(self) -> bool:
        """Whether requests are still answered."""
        return self._background.is_alive

    @property
    def last_step_time(self) -> float | None:
        """When the engine last finished a step, in seconds of `time.monotonic()`; None before the first."""
        return self._background.last_step_time

    def close(self) -> None:
        """End every request and free model and cache; open streams raise `EngineDead`. Idempotent.

        Waits for the step that runs: inside a coroutine use `async with`, or `await asyncio.to_thread(llm.close)`.
        """
        self._close()
        self._background.stop()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _start(
        self,
        read: Callable[[], PromptType],
        params: SamplingParams | PoolingParams,
        request_id: str | None,
        priority: int,
    ) -> RequestStream:
        label = str(next(self._numbers)) if request_id is None else request_id
        if not isinstance(label, str):
            raise RequestInvalid(f"request_id={request_id!r} must be text", field="request_id")
        engine, background = self.engine, self._background
        channel = background.open(label)

        def queue(encoded: Future[Prompt]) -> None:
            if encoded.cancelled():  # closed meanwhile, which has ended the stream already
                return
            error = encoded.exception()
            if error is not None:
                background.refuse(channel, error)
            else:
                background.submit(channel, encoded.result(), params, priority)

        if background.is_alive:
            try:
                self._encoders.submit(_encode, engine, read, params).add_done_callback(queue)
            except RuntimeError:  # closed at this very moment
                background.refuse(channel, EngineDead("the engine stopped: it was closed; make a new one"))
        return RequestStream(self, background, channel)


class RequestStream(AsyncIterator[RequestOutput]):
    """One request's outputs as they come. Closing it, cancelling its reader or letting go of it aborts the request."""

    def __init__(self, owner: AsyncLLM, background: Background, channel: Channel) -> None:
        self._owner = owner  # an engine lives as long as somebody reads from it
        self.request_id = channel.label
        self.channel = channel
        self._background = background
        self._over = False
        self._read = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._over:
            raise StopAsyncIteration
        if self._read:
            raise RuntimeError("another task reads this stream already; each request has one reader")
        self._read = True
        try:
            output = await self._next()
            self._over = output.finished
            return output
        except BaseException:
            self._drop()
            raise
        finally:
            self._read = False

    async def _next(self) -> RequestOutput:
        loop = asyncio.get_running_loop()
        while True:
            reader = Reader(loop, loop.create_future(), self.channel)
            output = self.channel.take(reader)
            if output is not None:
                return output
            await reader.woken

    async def aclose(self) -> None:
        """Abort the request if it still runs; its blocks are free when this returns."""
        if not self._over:
            self._over = True
            await asyncio.wrap_future(self._background.drop(self.channel))

    def _drop(self) -> None:
        if not self._over:
            self._over = True
            self._background.drop(self.channel)

    def __del__(self) -> None:
        if not getattr(self, "_over", True):
            self._drop()


def _sampling(params: SamplingParams | None) -> SamplingParams:
    return SamplingParams() if params is None else params


def _encode(engine: LLMEngine, read: Callable[[], PromptType], params: SamplingParams | PoolingParams) -> Prompt:
    if not isinstance(params, SamplingParams | PoolingParams):
        raise RequestInvalid(
            f"sampling_params must be a SamplingParams, not {type(params).__name__}", field="sampling_params"
        )
    return engine.prepare(read(), params)


def _shut(encoders: ThreadPoolExecutor, background: Background) -> None:
    encoders.shutdown(wait=False, cancel_futures=True)
    background.stop()
