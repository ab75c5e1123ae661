"""`AsyncLLM`: shared batches, streams that end in every way, slow readers, several loops, death and close."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pagedkv import AsyncLLM, RequestOutput, SamplingParams
from pagedkv.async_llm import RequestStream
from pagedkv.engine.background import merged
from pagedkv.engine.outputs import CompletionOutput, RequestMetrics
from pagedkv.errors import DeviceError, EngineDead, ModelError, RequestInvalid, RequestTooLong
from tests.helpers.engine_rig import SETTINGS, drained, fail_at, folder, greedy, seeded, solo, some_prompts

PROMPTS = some_prompts([5, 9, 7, 12])


@asynccontextmanager
async def engine(**settings: Any) -> AsyncIterator[AsyncLLM]:
    """An `AsyncLLM` that must have come to rest when the block ends."""
    async with AsyncLLM(folder(), **SETTINGS | settings) as llm:
        yield llm
        await resting(llm)


async def resting(llm: AsyncLLM) -> None:
    for _ in range(200):
        if not (llm.engine.has_unfinished_requests() or llm._background._open):
            break
        await asyncio.sleep(0.01)
    drained(llm)  # type: ignore[arg-type]


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def read(stream: RequestStream, text: str = "") -> RequestOutput:
    """The last output; what the stream says on the way is checked."""
    last = None
    async for output in stream:
        text += output.outputs[0].new_text
        assert output.outputs[0].text == text
        assert last is None or not last.finished
        last = output
    assert last is not None and last.finished
    return last


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def test_many_callers_share_steps_and_each_gets_its_own_tokens() -> None:
    async def main() -> None:
        params = [greedy(20), seeded(3, 20), greedy(17), seeded(4, 20, top_k=30)]
        async with engine() as llm:
            assert llm.is_alive and llm.last_step_time is None
            before = time.monotonic()
            streams = [llm.generate(p, q) for p, q in zip(PROMPTS, params, strict=True)]
            outputs = await asyncio.gather(*map(read, streams))
            assert [ids(o) for o in outputs] == [solo(p, q) for p, q in zip(PROMPTS, params, strict=True)]
            assert llm.engine.stats.steps < 60, "some steps served several callers"
            assert llm.last_step_time is not None and before < llm.last_step_time <= time.monotonic()
            labels = [stream.request_id for stream in streams]
            assert [o.request_id for o in outputs] == labels and len(set(labels)) == 4
        assert not llm.is_alive

    run(main())


def test_text_and_conversations_are_encoded_and_answered() -> None:
    async def main() -> None:
        async with engine() as llm:
            output = await read(llm.generate("kůň", greedy(4)))
            assert ids(output) == solo(output.prompt_token_ids, greedy(4))
            hello = [{"role": "user", "content": "Hello"}]
            output = await read(llm.chat(hello, greedy(4), chat_template="{{ messages[0].content }}!"))
            assert output.prompt == "Hello!" and ids(output) == solo(list(b"Hello!"), greedy(4))
            with pytest.raises(ModelError, match="SecurityError"):
                await read(llm.chat(hello, greedy(4), chat_template="{{ ''.__class__.__mro__ }}"))
            assert llm.get_tokenizer() is llm.engine.tokenizer

    run(main())


def test_a_request_starts_before_it_is_read_and_a_slow_reader_gets_larger_pieces() -> None:
    async def main() -> None:
        async with engine() as llm:
            slow = llm.generate(PROMPTS[0], greedy(40))
            other = await read(llm.generate(PROMPTS[1], greedy(60)))
            assert len(ids(other)) == 60
            pieces = [output async for output in slow]
            assert len(pieces) == 1, "the engine did not wait, and what it said became one piece"
            answer = pieces[0].outputs[0]
            assert answer.token_ids == solo(PROMPTS[0], greedy(40))
            assert answer.new_text == answer.text != ""

    run(main())


def test_the_event_loop_goes_on_while_the_model_and_the_tokenizer_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, waited = [0], []

    def until_the_loop_ticks(name: str) -> None:
        before, deadline = ticks[0], time.monotonic() + 20
        while ticks[0] < before + 5 and time.monotonic() < deadline:
            time.sleep(0.001)
        waited.append((name, ticks[0] >= before + 5))

    async def main() -> None:
        async with engine() as llm:
            step, prepare = llm.engine.step, llm.engine.prepare
            monkeypatch.setattr(llm.engine, "prepare", lambda *a: until_the_loop_ticks("prepare") or prepare(*a))
            monkeypatch.setattr(llm.engine, "step", lambda: until_the_loop_ticks("step") or step())
            reading = asyncio.create_task(read(llm.generate(PROMPTS[0], greedy(3))))
            while not reading.done():
                await asyncio.sleep(0.001)
                ticks[0] += 1
            assert ids(await reading) == solo(PROMPTS[0], greedy(3))

    run(main())
    assert waited == [("prepare", True)] + [("step", True)] * 3


# -- the ways to end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["aclose", "cancel", "break", "drop", "timeout"])
def test_whoever_stops_reading_aborts_the_request_and_its_blocks_return(way: str) -> None:
    async def main() -> None:
        async with engine() as llm:
            kept = asyncio.create_task(read(llm.generate(PROMPTS[1], greedy(60))))
            stream = llm.generate(PROMPTS[0], greedy(200))
            first = await anext(stream)
            assert len(first.outputs[0].token_ids) >= 1 and not first.finished
            if way == "aclose":
                await stream.aclose()
                assert llm._background.labelled(stream.request_id) == []
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
                await stream.aclose()
            elif way == "cancel":
                task = asyncio.create_task(read(stream, first.outputs[0].text))
                await asyncio.sleep(0.02)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif way == "timeout":
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(read(stream, first.outputs[0].text), 0.02)
            elif way == "break":
                async for _ in stream:
                    break
            label = stream.request_id
            del stream
            gc.collect()
            for _ in range(100):
                if not llm._background.labelled(label):
                    break
                await asyncio.sleep(0.005)
            assert llm._background.labelled(label) == []
            assert ids(await kept) == solo(PROMPTS[1], greedy(60))

    run(main())


def test_an_aborted_stream_gives_what_there_was() -> None:
    async def main() -> None:
        async with engine() as llm:
            stream = llm.generate(PROMPTS[0], greedy(200), request_id="mine")
            await anext(stream)
            assert await llm.abort("mine")
            assert not llm.engine.has_unfinished_requests(), "its blocks are free when abort returns"
            rest = [output async for output in stream]
            assert rest[-1].finished and rest[-1].outputs[0].finish_reason == "abort"
            got = ids(rest[-1])
            assert 1 <= len(got) < 200 and got == solo(PROMPTS[0], greedy(200))[: len(got)]
            assert not await llm.abort("mine") and not await llm.abort(stream) and not await llm.abort("unknown")

    run(main())


def test_a_request_is_aborted_before_it_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with engine() as llm:
            prepare, released = llm.engine.prepare, threading.Event()
            monkeypatch.setattr(llm.engine, "prepare", lambda *a: released.wait(20) and prepare(*a))
            aborted, closed = llm.generate(PROMPTS[0], greedy(9)), llm.generate(PROMPTS[1], greedy(9))
            assert await llm.abort(aborted)
            await closed.aclose()
            released.set()
            output = await read(aborted)
            assert (output.outputs[0].finish_reason, ids(output)) == ("abort", [])
            assert llm.engine.stats.steps == 0

    run(main())


BAD: list[tuple[Any, Any, type[Exception], str]] = [
    ("", {"max_tokens": 500}, RequestTooLong, "max_model_len is 256"),
    ([], {}, RequestInvalid, "the prompt is empty"),
    ([320], {}, RequestInvalid, "outside the vocabulary"),
    (3, {}, RequestInvalid, "must be a list of whole numbers"),
    ({"prompt": "x", "salt": 1}, {}, RequestInvalid, "unknown keys"),
    ([1], {"stop_token_ids": [320]}, RequestInvalid, "stop_token_ids must be ids"),
    ("\ud800", {}, RequestInvalid, "lone surrogate"),
]


def test_bad_requests_raise_from_their_own_stream_only() -> None:
    async def main() -> None:
        async with engine() as llm:
            good = asyncio.create_task(read(llm.generate(PROMPTS[0], greedy(30))))
            for prompt, names, kind, message in BAD:
                stream = llm.generate(prompt, greedy(**names))
                with pytest.raises(kind, match=message):
                    await anext(stream)
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            with pytest.raises(RequestInvalid, match="sampling_params must be a SamplingParams, not dict"):
                await anext(llm.generate([1], {"temperature": 0}))  # type: ignore[arg-type]
            with pytest.raises(RequestInvalid, match="priority='high'"):
                await anext(llm.generate([1], greedy(1), priority="high"))  # type: ignore[arg-type]
            with pytest.raises(RequestInvalid, match="request_id=7 must be text"):
                llm.generate([1], greedy(1), request_id=7)  # type: ignore[arg-type]
            assert ids(await good) == solo(PROMPTS[0], greedy(30))

    run(main())


def test_a_stream_has_one_reader() -> None:
    async def main() -> None:
        async with engine() as llm:
            stream = llm.generate(PROMPTS[0], greedy(40))
            first = asyncio.create_task(read(stream))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="another task reads this stream"):
                await anext(stream)
            assert len(ids(await first)) == 40

    run(main())


# -- loops, threads, the end -------------------------------------------------------------------------------------------


def test_several_event_loops_share_one_engine() -> None:
    llm = AsyncLLM(folder(), **SETTINGS)
    results: dict[int, list[int]] = {}

    def work(number: int) -> None:
        async def main() -> None:
            for _ in range(2):
                results[number] = ids(await read(llm.generate(PROMPTS[number], greedy(12))))

        run(main())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {n: solo(PROMPTS[n], greedy(12)) for n in range(3)}
    streams = []

    async def leave_open() -> None:
        streams.append(llm.generate(PROMPTS[0], greedy(40)))
        await anext(streams[0])

    run(leave_open())

    async def go_on() -> None:
        assert ids(await read(llm.generate(PROMPTS[1], greedy(4)))) == solo(PROMPTS[1], greedy(4))
        rest = [output async for output in streams[0]]
        assert ids(rest[-1]) == solo(PROMPTS[0], greedy(40)), "a stream may be read on in another loop"
        await resting(llm)

    run(go_on())
    llm.close()
    llm.close()


def test_a_loop_that_ends_with_a_waiting_reader_costs_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, released = AsyncLLM(folder(), **SETTINGS), threading.Event()
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: released.wait(20) and step())
    loop, stream = asyncio.new_event_loop(), llm.generate(PROMPTS[0], greedy(240))
    reading = loop.create_task(read(stream))
    loop.run_until_complete(asyncio.sleep(0.02))
    loop.close()  # and the task still waits
    released.set()

    async def main() -> None:
        assert ids(await read(llm.generate(PROMPTS[1], greedy(4)))) == solo(PROMPTS[1], greedy(4))
        assert llm._background.labelled(stream.request_id) == []
        await resting(llm)

    run(main())
    llm.close()
    assert not reading.done()
    reading._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_failure_of_the_device_ends_every_stream() -> None:
    async def main() -> None:
        async with AsyncLLM(folder(), **SETTINGS) as llm:
            streams = [llm.generate(prompt, greedy(50)) for prompt in PROMPTS]
            first = await anext(streams[0])
            fail_at(llm, 1, lambda: DeviceError("it burns"))  # type: ignore[arg-type]
            for stream in streams:
                with pytest.raises(EngineDead, match="it burns"):
                    await read(stream, first.outputs[0].text if stream is streams[0] else "")
            assert not llm.is_alive
            with pytest.raises(EngineDead, match="it burns"):
                await read(llm.generate(PROMPTS[0], greedy(1)))
            assert not await llm.abort(streams[0])

    run(main())


def test_close_ends_open_streams_and_the_thread() -> None:
    async def main() -> None:
        llm = AsyncLLM(folder(), **SETTINGS)
        stream = llm.generate(PROMPTS[0], greedy(200))
        await anext(stream)
        await asyncio.to_thread(llm.close)
        assert not llm.is_alive and not llm._background._thread.is_alive()
        with pytest.raises(EngineDead, match="it was closed"):
            await read(stream)
        with pytest.raises(EngineDead, match="it was closed"):
            await read(llm.generate(PROMPTS[0], greedy(1)))

    run(main())


def test_letting_go_of_it_ends_the_thread() -> None:
    llm = AsyncLLM(folder(), **SETTINGS)
    stream, thread = llm.generate(PROMPTS[0], greedy(200)), llm._background._thread
    del llm
    gc.collect()
    assert thread.is_alive(), "a stream keeps its engine"
    del stream
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_merging_keeps_every_piece_of_every_answer() -> None:
    def output(*answers: tuple[int, str, str]) -> RequestOutput:
        return RequestOutput(
            request_id="x",
            prompt=None,
            prompt_token_ids=[1],
            outputs=[CompletionOutput(index=i, text=text, token_ids=[], new_text=new) for i, text, new in answers],
            metrics=RequestMetrics(arrival_time=0.0),
        )

    both = merged(output((0, "ab", "b"), (1, "x", "x")), output((0, "abc", "c")))
    assert [(a.index, a.text, a.new_text) for a in both.outputs] == [(0, "abc", "bc"), (1, "x", "x")]


def test_the_default_parameters_are_sixteen_tokens() -> None:
    async def main() -> None:
        async with engine() as llm:
            assert 1 <= len(ids(await read(llm.generate([1, 2, 3])))) <= SamplingParams().max_tokens  # type: ignore[operator]

    run(main())
