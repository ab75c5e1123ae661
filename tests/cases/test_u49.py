"""U49: a request id is only a label: two at once with one id are both answered, and one can be aborted."""

from __future__ import annotations

import asyncio

import pytest

from pagedkv import AsyncLLM, RequestOutput
from pagedkv.errors import RequestInvalid
from tests.helpers.engine_rig import SETTINGS, drained, folder, greedy, solo, some_prompts

FIRST, SECOND = some_prompts([6, 9])


async def last(llm: AsyncLLM, prompt: list[int]) -> RequestOutput:
    return [output async for output in llm.generate(prompt, greedy(20), request_id="same")][-1]


def test_u49_two_requests_with_one_id_are_both_answered() -> None:
    async def main() -> None:
        async with AsyncLLM(folder(), **SETTINGS) as llm:
            outputs = await asyncio.gather(last(llm, FIRST), last(llm, SECOND), last(llm, FIRST))
            assert [o.request_id for o in outputs] == ["same"] * 3
            assert [o.outputs[0].token_ids for o in outputs] == [solo(p, greedy(20)) for p in (FIRST, SECOND, FIRST)]
            drained(llm)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_u49_abort_of_one_leaves_the_other() -> None:
    async def main() -> None:
        async with AsyncLLM(folder(), **SETTINGS) as llm:
            gone = llm.generate(FIRST, greedy(200), request_id="same")
            kept = asyncio.create_task(last(llm, SECOND))
            await anext(gone)
            with pytest.raises(RequestInvalid, match="2 open requests are called 'same': give abort the stream"):
                await llm.abort("same")
            assert await llm.abort(gone)
            (*_, output) = [output async for output in gone]
            assert output.outputs[0].finish_reason == "abort"
            assert (await kept).outputs[0].token_ids == solo(SECOND, greedy(20))
            drained(llm)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(main(), 60))
