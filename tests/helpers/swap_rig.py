"""Work that does not fit the device's cache, and what it gives where nothing has to make room."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pagedkv import LLM, RequestOutput, SamplingParams
from pagedkv.core.request import Request, State
from tests.helpers.engine_rig import drained, engine, greedy, seeded, some_prompts

TOKENS = 36
"""What the small pool holds; the work's longest request takes 22, all of it together about 100."""

PROMPTS = some_prompts([10, 9, 7, 5], seed=1)
NEW = 12

ORDERS: dict[str, dict[str, Any]] = {
    "late": {"order": "late"},
    "early": {"order": "early"},
    **{f"random{seed}": {"order": "random", "seed": seed} for seed in (1, 2)},
}


def work() -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy, seeded, scored and branching requests, whose prompts end inside blocks of 3, 4 and 16 tokens."""
    params = [
        greedy(NEW, logprobs=1),
        seeded(5, NEW, logprobs=2, presence_penalty=0.5),
        greedy(NEW, logprobs=1, prompt_logprobs=1),
        seeded(9, 8, n=3, logprobs=0),
    ]
    return PROMPTS, params


def backend(name: str) -> dict[str, Any]:
    """The settings for "cpu", or for the loopback backend by the order of its copies.

    A bandwidth that is given leaves device memory as it was made: with NaN in it on loopback.
    """
    if name == "cpu":
        return {"backend": "cpu", "backend_options": {"threads": 1}}
    return {"backend": "loopback", "backend_options": ORDERS[name], "copy_bandwidth": "1GB"}


def small(block_size: int = 4) -> dict[str, Any]:
    """A pool of `TOKENS` tokens."""
    return {"num_blocks": TOKENS // block_size + 1, "block_size": block_size, "max_model_len": 32}


def answers(outputs: Sequence[RequestOutput]) -> list[Any]:
    """All that a caller sees of the model in them."""
    return [
        (
            [(o.token_ids, o.text, o.finish_reason, o.logprobs, o.cumulative_logprob) for o in output.outputs],
            output.prompt_logprobs,
        )
        for output in outputs
    ]


def run(llm: LLM) -> list[RequestOutput]:
    """`work` in one call."""
    return llm.generate(*work(), use_tqdm=False)


@functools.cache
def undisturbed(on: str) -> list[Any]:
    """The answers where the pool is large enough and nothing is ever cached or preempted."""
    name = "cpu" if on == "cpu" else "late"
    with engine(**backend(name), num_blocks=200, max_model_len=32, enable_prefix_caching=False) as llm:
        outputs = run(llm)
        assert llm.metrics().preemptions == 0
        return answers(outputs)


@contextmanager
def swapping(on: str = "late", block_size: int = 4, **settings: Any) -> Iterator[LLM]:
    """An engine with the small pool and, unless told otherwise, host memory for 50 blocks, into which it swaps."""
    names = {"swap_blocks": 50, "preemption_mode": "swap"} | settings
    with engine(**backend(on) | small(block_size) | names) as llm:
        yield llm


def request_of(llm: LLM, group: int) -> Request:
    """The scheduler's request of the first sample of an engine's request."""
    request = llm.engine._groups[group].samples[0].request
    assert request is not None
    return request


def departing(llm: LLM, request: Request) -> bool:
    """Whether it is swapped and its blocks are on their way to the host still."""
    return request.state is State.SWAPPED and any(
        whose is request for whose in llm.engine.scheduler._departing.values()
    )


def finish(llm: LLM, most: int = 2000) -> dict[int, RequestOutput]:
    """Step until nothing is left; the finished outputs by the engine's id."""
    done = {}
    for _ in range(most):
        if not llm.engine.has_unfinished_requests():
            break
        done |= {key: output for key, output in llm.engine.step() if output.finished}
        llm.engine.scheduler.check()
    drained(llm)
    return done
