"""The budget after loading: the largest step by the process's own count, and recordings, whatever others do (U101)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from pagedkv.api import MemoryInfo
from pagedkv.conformance.loopback.backend import LoopbackBackend
from pagedkv.engine.profile import nowhere
from tests.helpers.engine_rig import engine, greedy, some_prompts, token_ids, transformers_greedy

ON: dict[str, Any] = {"backend": "loopback", "backend_options": {}, "batch_invariant": False, "num_blocks": None}
GIB = 1 << 30
WEIGHTS, STEP = 3 * GIB, 5 << 20


class Counting:
    """What a device with 16 GiB says of its memory: a step takes `STEP` bytes, others take and give as `noise` says."""

    def __init__(self, noise: Any = (0,)) -> None:
        self._noise, self.asked, self.resets = itertools.cycle(noise), 0, 0

    def memory(self) -> MemoryInfo:
        self.asked += 1
        free = 12 * GIB + next(self._noise)
        peak = WEIGHTS + STEP if self.resets else WEIGHTS
        return MemoryInfo(free=free, total=16 * GIB, reclaimable=0, allocated=WEIGHTS, peak=peak)

    def reset_peak(self) -> None:
        self.resets += 1


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Counting:
    made = Counting(getattr(request, "param", (0,)))
    monkeypatch.setattr(LoopbackBackend, "memory", lambda self: made.memory())
    monkeypatch.setattr(LoopbackBackend, "reset_peak", lambda self: made.reset_peak())
    return made


def test_the_workspace_is_what_the_largest_step_took(counting: Counting, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pagedkv")
    with engine(**ON, enforce_eager=True, kv_cache_memory="1MiB") as llm:
        memory = llm.engine.parts.memory
        assert (memory.workspace, memory.graphs, counting.resets) == (STEP, 0, 1)
        assert memory.cache <= 1 << 20
    assert "memory budget, the largest step measured" in caplog.text


@pytest.mark.parametrize(
    "counting", [(0, 2 * GIB, -2 * GIB), (2 * GIB, -2 * GIB), (-2 * GIB, 2 * GIB, 0)], indirect=True
)
def test_other_processes_taking_and_giving_change_nothing_of_it(counting: Counting) -> None:
    """U101"""
    with engine(**ON, enforce_eager=True, kv_cache_memory="1MiB", swap_space=0) as llm:
        assert llm.engine.parts.memory.workspace == STEP
        prompts = some_prompts([5, 9])
        answers = token_ids(llm.generate(prompts, greedy(4), use_tqdm=False))
        assert answers == [transformers_greedy(prompt, 4) for prompt in prompts]


def test_recordings_are_reserved_before_the_cache_is_sized() -> None:
    with engine(**ON, kv_cache_memory="1MiB", max_num_seqs=8) as llm:
        memory, graphs = llm.engine.parts.memory, llm.engine.parts.runner.graphs
        assert graphs.rows == (1, 2, 4, 8)
        assert graphs.nbytes <= memory.graphs <= 2 * graphs.nbytes
        assert f"graphs     {memory.graphs / 1024:.1f} KiB (enforce_eager=True leaves them out)" in memory.table()
        assert memory.total == memory.weights + memory.workspace + memory.graphs + memory.cache
    with engine(**ON, kv_cache_memory="1MiB", enforce_eager=True) as llm:
        assert llm.engine.parts.memory.graphs == 0
        assert "graphs" not in llm.engine.parts.memory.table()


def test_a_backend_that_counts_nothing_keeps_the_upper_bound() -> None:
    with engine(backend="cpu") as llm:
        config = llm.engine.parts.config
        tokens = config.max_num_batched_tokens
        assert llm.engine.parts.memory.workspace > tokens * 4  # no measurement: the formula's
        assert llm.engine.parts.runner.graphs is None


@pytest.mark.parametrize(
    ("tokens", "rows", "context", "counts"),
    [(64, 8, 256, [64]), (64, 8, 24, [24, 24, 16]), (64, 2, 24, [24, 24]), (5, 9, 1, [1] * 5), (7, 7, 7, [7])],
)
def test_the_largest_step_has_as_many_tokens_as_fit(tokens: int, rows: int, context: int, counts: list[int]) -> None:
    batch = nowhere(tokens, rows, context)
    assert np.diff(batch.cu_q).tolist() == batch.ctx_len.tolist() == counts
    assert (batch.num_seqs, batch.num_tokens) == (len(counts), sum(counts))
    assert batch.slots is not None and (batch.slots == -1).all() and (batch.block_table == 0).all()
    assert batch.block_table.shape[1] >= max(counts)
