"""Models that say what a test wants them to, and whole answers put together from a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedkv import LLM, CompletionOutput, RequestOutput, SamplingParams


def replace_logits(llm: LLM, rows: Callable[[torch.Tensor, Any, int], torch.Tensor]) -> None:
    """From now on, sampled logits are what `rows` makes of (the model's row, the request, its output tokens)."""
    runner, scheduler = llm.engine.parts.runner, llm.engine.scheduler
    run = runner.run

    def replaced(step: Any) -> torch.Tensor:
        logits = run(step).clone()
        for at, request in enumerate(scheduler.holders(step)):
            logits[at] = rows(logits[at], request, int(step.output_index[at]))
        return logits

    runner.run = replaced  # type: ignore[method-assign]


def force(llm: LLM, ids: Sequence[int]) -> None:
    """Every answer is `ids`, then zeros."""

    def wanted(row: torch.Tensor, _: Any, index: int) -> torch.Tensor:
        row = torch.zeros_like(row)
        row[ids[index] if index < len(ids) else 0] = 90.0
        return row

    replace_logits(llm, wanted)


@dataclass
class Told:
    """One sample of a stream: the pieces as they came, and the last output."""

    pieces: list[str]
    last: CompletionOutput | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def told(llm: LLM, prompt: Any, params: SamplingParams) -> tuple[list[Told], RequestOutput]:
    """Stream one prompt, and check that every output agrees with the pieces before it."""
    samples = [Told([]) for _ in range(params.n)]
    output = None
    for _, output in llm.stream(prompt, params):
        assert [c.index for c in output.outputs] == list(range(params.n))
        for sample, completion in zip(samples, output.outputs, strict=True):
            assert sample.last is None or not (sample.last.finish_reason and completion.new_text)
            sample.pieces.append(completion.new_text)
            assert completion.text == sample.text
            sample.last = completion
    assert output is not None and output.finished
    return samples, output
