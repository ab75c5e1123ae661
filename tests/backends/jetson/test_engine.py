"""The engine on the Jetson backend's double: its defaults, what replaces them, and the budget that it logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.engine_rig import engine, greedy, some_prompts, token_ids, transformers_greedy

PROMPTS = some_prompts([3, 9, 14], seed=87)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that offers the double."""
    info = tmp_path / "jetson_double-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jetson-double\nVersion: 1.0\n")
    target = "tests.backends.jetson.double_descriptor:DoubleDescriptor"
    (info / "entry_points.txt").write_text(f"[pagedkv.backends]\njetson-double = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_steps_run_eagerly_and_give_the_right_answers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pagedkv")
    with engine(backend="jetson-double", backend_options={}) as llm:
        assert llm.engine.parts.runner.graphs is None
        assert token_ids(llm.generate(PROMPTS, greedy(8), use_tqdm=False)) == [transformers_greedy(p) for p in PROMPTS]
        assert llm.engine.parts.memory.host is None
    assert "steps run eagerly on this backend unless enforce_eager=False asks for graphs" in caplog.text
    assert "available (shared with the host)" in caplog.text


@pytest.mark.parametrize(
    ("given", "context"),
    [
        ({"enforce_eager": False}, 1024),
        ({"enforce_eager": False, "max_seq_len_to_capture": 48}, 48),
        ({"max_context_len_to_capture": 32}, 32),
    ],
)
def test_graphs_that_are_asked_for_reach_as_far_as_was_said(given: dict[str, object], context: int) -> None:
    with engine(backend="jetson-double", backend_options={}, **given) as llm:
        graphs = llm.engine.parts.runner.graphs
        assert graphs is not None and graphs.plan.max_ctx == min(context, llm.engine.parts.max_model_len)
        assert token_ids(llm.generate(PROMPTS, greedy(8), use_tqdm=False)) == [transformers_greedy(p) for p in PROMPTS]
