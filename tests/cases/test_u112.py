"""U112: capturing many sizes exceeds what a device holds; fewer are captured, or none with a warning, answers equal."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagedkv import LLM
from pagedkv.config import EngineConfig
from pagedkv.conformance.loopback.descriptor import LoopbackDescriptor
from pagedkv.conformance.loopback.graph import LoopbackGraphs
from pagedkv.engine.graphs import ROWS, graph_plan, spread
from pagedkv.errors import OutOfDeviceMemory
from tests.backends.ascend.double import DelayingNpu
from tests.helpers.engine_rig import engine, folder, greedy, some_prompts, token_ids, transformers_greedy

ON: dict[str, Any] = {"backend": "loopback", "backend_options": {"order": "late"}, "batch_invariant": False}
PROMPTS = some_prompts([3, 9, 14], seed=12)
SIZES = (1, 2, 4, *range(8, 520, 8))
"""67 sizes, as a peer captures them."""


def test_u112_of_67_sizes_ten_are_kept_with_the_smallest_and_the_largest() -> None:
    kept = spread(SIZES, 10)
    assert (len(SIZES), len(kept)) == (67, 10)
    assert (kept[0], kept[-1]) == (1, 512) and set(kept) <= set(SIZES) and list(kept) == sorted(set(kept))
    places = [SIZES.index(size) for size in kept]
    assert {after - before for before, after in itertools.pairwise(places)} <= {7, 8}, "66 places, 9 steps"


@pytest.mark.parametrize("most", range(12))
def test_u112_there_are_never_more_than_the_limit_and_a_step_always_finds_one(most: int) -> None:
    kept = spread(SIZES, most)
    assert len(kept) == len(set(kept)) == most
    assert not most or kept[-1] == SIZES[-1], "every step has a size at least as large"
    assert most < 2 or kept[0] == SIZES[0], "a single sequence pays for no other"
    assert spread(SIZES, None) == spread(SIZES, 67) == spread(SIZES, 68) == SIZES


def test_u112_the_planner_keeps_to_the_backends_limit() -> None:
    descriptor = LoopbackDescriptor()
    can = descriptor.describe(descriptor.probe()[0])
    model: Any = SimpleNamespace(why_no_graph=None)
    config = EngineConfig.of(model="m", max_num_seqs=256, enforce_eager=False)
    plan = graph_plan(config, dataclasses.replace(can, max_graphs=10), frozenset(), model, 4096)
    assert plan is not None and len(plan.rows) == 10
    assert (plan.rows[0], plan.rows[-1]) == (ROWS[0], ROWS[-1])
    assert graph_plan(config, dataclasses.replace(can, max_graphs=0), frozenset(), model, 4096) is None


@pytest.mark.parametrize("held", [0, 3], ids=["not even one", "two measured, one kept"])
def test_u112_a_device_that_has_no_more_to_give_leaves_the_rest_eager(
    held: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captures, capture = [], LoopbackGraphs.capture

    def short(self: LoopbackGraphs, fn: Any, plans: Any) -> Any:
        captures.append(plans)
        if len(captures) > held:
            raise OutOfDeviceMemory("stream resources are insufficient")
        return capture(self, fn, plans)

    monkeypatch.setattr(LoopbackGraphs, "capture", short)
    with engine(**ON) as llm:
        assert token_ids(llm.generate(PROMPTS, greedy(6), use_tqdm=False)) == [
            transformers_greedy(prompt, 6) for prompt in PROMPTS
        ]
        assert (llm.metrics().replayed_steps > 0) == bool(held)
    assert "stream resources are insufficient" in caplog.text and "run eagerly" in caplog.text


# -- the backend of the reports, on its double -------------------------------------------------------------------------


@pytest.fixture
def ascend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of an engine on the double, which records where it is asked to."""
    info = tmp_path / "ascend_double-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ascend-double\nVersion: 1.0\n")
    target = "tests.backends.ascend.double_descriptor:DOUBLE"
    (info / "entry_points.txt").write_text(f"[pagedkv.backends]\nascend-double = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return {"backend": "ascend-double", "backend_options": {}, "dtype": "float16", "block_size": 32}


def answers(settings: dict[str, Any], **more: Any) -> tuple[list[list[int]], int]:
    """(tokens, steps that were replayed)."""
    place = folder("llama", head_dim=16)
    with LLM(place, num_blocks=33, max_num_seqs=4, max_num_batched_tokens=64, **settings, **more) as llm:
        return token_ids(llm.generate(PROMPTS, greedy(6), use_tqdm=False)), llm.metrics().replayed_steps


def test_u112_a_capture_that_raises_leaves_eager_steps_and_a_warning(
    ascend: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: DelayingNpu, work: Any) -> Any:
        raise RuntimeError(
            "capture_begin:NPUGraph.cpp:156 NPU function error: AclmdlRICaptureBegin, error code is 207008\n"
            "[Error]: Stream resources are insufficient."
        )

    wanted, replayed = answers(ascend, enforce_eager=False)
    assert replayed > 0
    monkeypatch.setattr(DelayingNpu, "capture", refuse)
    assert answers(ascend, enforce_eager=False)[0] == wanted == answers(ascend)[0]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said and all("could not be captured into a graph and runs eagerly" in line for line in said)
    assert "Stream resources are insufficient" in said[0] and "enforce_eager" in said[0]


def test_u112_a_variable_that_rules_recordings_out_is_told_once_before_any(
    ascend: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    captures = []
    monkeypatch.setattr(DelayingNpu, "capture", lambda self, work: captures.append(work))
    assert answers(ascend, enforce_eager=False)[1] == 0 and not captures
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "TASK_QUEUE_ENABLE=2: set it to 1" in said[0] and "run eagerly" in said[0]
