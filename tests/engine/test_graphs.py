"""Recorded decode steps: they answer as eager ones do, serve what they were recorded for, and give way with a line."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from pagedkv import LLM
from pagedkv.api import UnsupportedError
from pagedkv.api.records import Batch
from pagedkv.conformance.loopback.graph import LoopbackGraphs
from pagedkv.core.step import padded
from pagedkv.engine.graphs import ROWS
from pagedkv.errors import ConfigError, DeviceError, EngineDead, OutOfDeviceMemory
from tests.helpers.engine_rig import engine, greedy, some_prompts, token_ids, transformers_greedy
from tests.helpers.swap_rig import run, small, undisturbed

ON: dict[str, Any] = {"backend": "loopback", "backend_options": {"order": "late"}, "batch_invariant": False}
PROMPTS = some_prompts([3, 9, 14, 5, 21], seed=4)


def _ids(llm: LLM) -> list[list[int]]:
    return token_ids(llm.generate(PROMPTS, greedy(8), use_tqdm=False))


@pytest.mark.parametrize("order", ["late", "early"])
def test_the_answers_are_those_of_eager_steps_and_of_transformers(order: str) -> None:
    with engine(**ON | {"backend_options": {"order": order}}) as llm:
        assert llm.engine.parts.runner.graphs.rows == (1, 2, 4, 8)
        assert _ids(llm) == [transformers_greedy(prompt) for prompt in PROMPTS]
        metrics = llm.metrics()
        assert 7 <= metrics.replayed_steps < metrics.steps  # every step after the prompts
    with engine(**ON, enforce_eager=True) as llm:
        assert llm.engine.parts.runner.graphs is None
        assert _ids(llm) == [transformers_greedy(prompt) for prompt in PROMPTS]
        assert llm.metrics().replayed_steps == 0


def test_no_law_is_broken_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_CHECK", "1")
    with engine(**ON) as llm:
        assert _ids(llm) == [transformers_greedy(prompt) for prompt in PROMPTS]
        assert llm.metrics().replayed_steps >= 7


def test_swap_forks_scores_and_penalties_around_recorded_steps() -> None:
    with engine(**ON | small(), swap_blocks=50, copy_bandwidth="1GB", preemption_mode="swap") as llm:
        outputs = run(llm)
        metrics = llm.metrics()
        assert metrics.preemptions > 0 and metrics.replayed_steps > 0
    for output, (samples, prompt_logprobs) in zip(outputs, undisturbed("late"), strict=True):
        assert [o.token_ids for o in output.outputs] == [sample[0] for sample in samples]
        sums = [sample[4] for sample in samples if sample[4] is not None]
        mine = [o.cumulative_logprob for o in output.outputs if o.cumulative_logprob is not None]
        assert mine == pytest.approx(sums, abs=1e-4)
        assert (output.prompt_logprobs is None) == (prompt_logprobs is None)


def test_contexts_beyond_the_limit_run_eagerly() -> None:
    with engine(**ON, max_seq_len_to_capture=16) as llm:
        (prompt,) = some_prompts([10])
        assert token_ids(llm.generate([prompt], greedy(16), use_tqdm=False)) == [transformers_greedy(prompt, 16)]
        # Output token n + 1 comes from a step of context 10 + n: contexts 11 to 16 replay, 17 to 25 do not.
        assert (llm.metrics().steps, llm.metrics().replayed_steps) == (16, 6)


@pytest.mark.parametrize(("most", "rows"), [(1, (1,)), (3, (1, 2, 3)), (6, (1, 2, 4, 6)), (300, ROWS)])
def test_the_sizes_end_with_max_num_seqs(most: int, rows: tuple[int, ...]) -> None:
    with engine(**ON, max_num_seqs=most, max_num_batched_tokens=512) as llm:
        assert llm.engine.parts.runner.graphs.rows == rows


def test_more_rows_than_the_largest_size_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedkv.engine.graphs.ROWS", (1, 2))
    with engine(**ON) as llm:
        assert llm.engine.parts.runner.graphs.rows == (1, 2)
        assert _ids(llm) == [transformers_greedy(prompt) for prompt in PROMPTS]
        assert llm.metrics().replayed_steps == 0


# -- what keeps them away ----------------------------------------------------------------------------------------------


def test_where_there_is_no_room_the_others_are_used_with_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capture = LoopbackGraphs.capture

    def full(self: LoopbackGraphs, fn: Any, plans: Any) -> Any:
        if plans[0]._shape.rows == 2:
            raise OutOfDeviceMemory("no room for a recording", requested=9, free=1)
        return capture(self, fn, plans)

    monkeypatch.setattr(LoopbackGraphs, "capture", full)
    with engine(**ON) as llm:
        assert llm.engine.parts.runner.graphs.rows == (4, 8)
        assert _ids(llm) == [transformers_greedy(prompt) for prompt in PROMPTS]
    assert "decode steps of 2 rows and fewer could not be recorded" in caplog.text
    assert "no room for a recording" in caplog.text and "enforce_eager=True" in caplog.text


def test_a_shape_that_the_backend_refuses_leaves_eager_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise UnsupportedError("not this shape")

    monkeypatch.setattr(LoopbackGraphs, "static_plan", refuse)
    with engine(**ON) as llm:
        assert _ids(llm) == [transformers_greedy(prompt) for prompt in PROMPTS]
        assert (llm.engine.parts.runner.graphs, llm.metrics().replayed_steps) == (None, 0)
    assert caplog.text.count("not this shape") == 1, "it is tried once, and told once"


def test_a_device_that_fails_in_a_replay_ends_the_engine_and_says_so() -> None:
    with LLM(**_settings(backend_options={"order": "late", "fail_at": 400})) as llm, pytest.raises(EngineDead) as dead:
        for _ in range(50):
            llm.generate(PROMPTS, greedy(8), use_tqdm=False)
    assert isinstance(dead.value.__cause__, DeviceError)
    assert llm.engine.parts.runner.graphs.replays > 0


def _settings(**more: Any) -> dict[str, Any]:
    from tests.helpers.engine_rig import SETTINGS, folder

    return {"model": folder(), **SETTINGS, **ON, **more}


@pytest.mark.parametrize(
    ("settings", "level", "text"),
    [
        ({"backend": "cpu", "backend_options": {"threads": 1}, "enforce_eager": False}, "WARNING", "has no graphs"),
        ({"backend": "cpu", "backend_options": {"threads": 1}, "max_seq_len_to_capture": 9}, "WARNING", "has no graph"),
        ({**ON, "batch_invariant": None}, "INFO", "batch_invariant=False allows graphs"),
        ({**ON, "batch_invariant": None, "enforce_eager": False}, "WARNING", "batch_invariant=False allows graphs"),
        ({**ON, "model_impl": "transformers", "enforce_eager": False}, "WARNING", "runs through transformers"),
    ],
)
def test_a_wish_that_cannot_be_met_is_told(
    settings: dict[str, Any], level: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagedkv")
    with engine(**settings) as llm:
        assert llm.engine.parts.runner.graphs is None
    said = [r for r in caplog.records if "decode steps are not recorded" in r.getMessage()]
    assert [(r.levelname, text in r.getMessage()) for r in said] == [(level, True)]


def test_experts_are_chosen_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    with engine("mixtral", **ON, enforce_eager=False) as llm:
        assert llm.engine.parts.runner.graphs is None
    assert "experts are chosen on the host" in caplog.text


@pytest.mark.parametrize(
    "settings", [{"max_seq_len_to_capture": 0}, {"max_seq_len_to_capture": True}, {"enforce_eager": 1}]
)
def test_settings_that_are_none(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        LLM(**_settings(**settings))


def test_a_backend_that_would_rather_not_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from pagedkv.conformance.loopback.backend import LoopbackBackend

    can = LoopbackBackend.capabilities
    monkeypatch.setattr(
        LoopbackBackend,
        "capabilities",
        lambda self: dataclasses.replace(can(self), graph_default=False, graph_context=12, max_graphs=3),
    )
    with engine(**ON) as llm:
        assert llm.engine.parts.runner.graphs is None
    with engine(**ON, enforce_eager=False) as llm:
        graphs = llm.engine.parts.runner.graphs
        assert (graphs.rows, graphs.plan.max_ctx) == ((1, 4, 8), 12)  # of 1, 2, 4 and 8
    with engine(**ON, max_seq_len_to_capture=20) as llm:
        assert llm.engine.parts.runner.graphs.plan.max_ctx == 20


# -- padding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_padding_adds_rows_without_a_query(rows: int) -> None:
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    batch = Batch(
        num_seqs=2,
        num_tokens=2,
        cu_q=np.array([0, 1, 2], np.int32),
        ctx_len=np.array([5, 9], np.int32),
        block_table=table,
        rows=np.array([2, 1], np.int32),
        slots=np.array([17, 33], np.int64),
        max_q=1,
        max_ctx=9,
        num_decode=2,
    )
    wide, more = padded(batch, rows), rows - 2
    assert (wide.num_seqs, wide.num_tokens, wide.num_decode, wide.max_q, wide.max_ctx) == (2, 2, 2, 1, 9)
    assert wide.cu_q.tolist() == [0, 1, 2] + [2] * more
    assert wide.ctx_len.tolist() == [5, 9] + [0] * more
    assert wide.rows.tolist() == [2, 1] + [0] * more
    assert wide.slots is not None and wide.slots.tolist() == [17, 33] + [-1] * more
    assert wide.block_table is table
    assert [a.dtype for a in (wide.cu_q, wide.ctx_len, wide.rows, wide.slots)] == ["int32", "int32", "int32", "int64"]
