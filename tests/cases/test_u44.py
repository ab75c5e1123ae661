"""U44: characters of several byte tokens never arrive broken; bytes that end inside one are one mark at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pagedkv import LLM, AsyncLLM
from tests.helpers.engine_rig import SETTINGS, engine, folder, greedy

TEXT = "🐎日č"
BYTES = TEXT.encode()
CUT = [(len(BYTES), TEXT), (len(BYTES) - 1, "🐎日\ufffd"), (3, "\ufffd"), (5, "🐎\ufffd"), (6, "🐎\ufffd"), (7, "🐎日")]


def saying(llm: LLM | AsyncLLM) -> Callable[[Any], Any]:
    """The runner of a model that says the bytes of TEXT."""
    run = llm.engine.parts.runner.run

    def forced(step: Any) -> Any:
        logits = run(step).clone()
        for at, index in enumerate(step.output_index.tolist()):
            logits[at, BYTES[index]] = 1e9
        return logits

    return forced


@pytest.mark.parametrize(("count", "text"), CUT)
def test_u44_in_a_stream(monkeypatch: pytest.MonkeyPatch, count: int, text: str) -> None:
    with engine() as llm:
        monkeypatch.setattr(llm.engine.parts.runner, "run", saying(llm))
        pieces = [output.outputs[0].new_text for _, output in llm.stream([[1, 2]], greedy(count))]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces[:-1])
        (whole,) = llm.generate([[1, 2]], greedy(count), use_tqdm=False)
        assert whole.outputs[0].text == text


def test_u44_in_streams_of_several_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pieces(llm: AsyncLLM, count: int) -> list[str]:
        return [output.outputs[0].new_text async for output in llm.generate([1, 2], greedy(count))]

    async def main() -> None:
        async with AsyncLLM(folder(), **SETTINGS) as llm:
            monkeypatch.setattr(llm.engine.parts.runner, "run", saying(llm))
            got = await asyncio.gather(*(pieces(llm, count) for count, _ in CUT))
            assert ["".join(each) for each in got] == [text for _, text in CUT]
            assert not any("\ufffd" in piece for each in got for piece in each[:-1])

    asyncio.run(asyncio.wait_for(main(), 60))
