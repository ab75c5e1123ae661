"""Recordings on a stand-in for torch.npu: the vendor's order of calls, their streams and memory, and refusals.

The whole backend records there too, its operators emulated: what a replay computes from what the host knows by then.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch

from pagedkv.api import LayerSpec, UnsupportedError
from pagedkv.api.extensions import GraphShape
from pagedkv.core.step import padded
from pagedkv_ascend import limits
from pagedkv_ascend.backend import AscendBackend
from pagedkv_ascend.capabilities import declared
from pagedkv_ascend.operators import Operators
from pagedkv_ascend.runtime import NpuRuntime, why_no_recordings
from tests.backends.ascend import fake_npu
from tests.backends.ascend.emulation import operators
from tests.backends.ascend.fake_npu import FakeNpu
from tests.backends.ascend.pools import layer, spec
from tests.backends.ascend.sequences import Sequences, batch

TASK = ["event.wait", "event.reset", "group_begin", "group_end"]
UPDATE = ["update_begin", "update_end", "event.record"]


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    return fake_npu.install(monkeypatch)


class Step:
    """Two layers, each a call whose lengths the host knows."""

    def __init__(self, npu: FakeNpu, runtime: NpuRuntime) -> None:
        self.npu, self.runtime = npu, runtime
        self.length = 1
        self.issued: list[tuple[str, int, str]] = []

    def __call__(self) -> None:
        for name in ("first", "second"):
            self.runtime.task(partial(self.issue, name))

    def issue(self, name: str) -> None:
        self.issued.append((name, self.length, self.npu.current.name))
        self.npu.work(f"{name} {len(self.issued)}")


@pytest.fixture
def step(npu: FakeNpu) -> Step:
    return Step(npu, NpuRuntime(0, pooled=True))


def test_a_task_is_behind_an_event_in_the_recording_and_recorded_by_its_update(npu: FakeNpu, step: Step) -> None:
    """The order of the vendor's page of graph_task_group_begin."""
    recording = step.runtime.capture(step)
    assert [call for call, _ in npu.calls] == TASK * 2
    assert {stream for _, stream in npu.calls} == {npu.calls[0][1]} != {"compute"}, "on the stream that is recorded"
    npu.calls.clear()
    step.length = 7
    recording.replay()
    assert [call for call, _ in npu.calls] == [*UPDATE * 2, "replay"]
    assert npu.calls[-1] == ("replay", "compute")
    assert len({stream for _, stream in npu.calls[:-1]} | {"compute"}) == 2, "updates have a stream of their own"


def test_the_lengths_of_a_replay_are_those_of_its_time(npu: FakeNpu, step: Step) -> None:
    recording = step.runtime.capture(step)
    step.issued.clear()
    for length in (5, 6):
        step.length = length
        recording.replay()
    assert [(name, length) for name, length, _ in step.issued] == [
        (name, length) for length in (5, 6) for name in ("first", "second")
    ]


def test_an_update_waits_for_the_replay_before_it_and_the_replay_for_its_update(npu: FakeNpu, step: Step) -> None:
    recording = step.runtime.capture(step)
    step.issued.clear()
    npu.ran.clear()
    recording.replay()
    recording.replay()
    names = list(npu.ran)
    assert [name.partition(" ")[0] for name in names] == ["first", "second", "replay"] * 2
    assert names[2] in npu.before(names[3]), "the lengths of a replay stay until it has read them"
    assert {names[3], names[4]} <= npu.before(names[5])


def test_outside_of_a_recording_a_call_is_made_at_once_and_once(npu: FakeNpu, step: Step) -> None:
    step()
    assert [name for name, _, _ in step.issued] == ["first", "second"] and not npu.calls
    assert not step.runtime.recording


def test_a_step_runs_once_before_it_is_recorded_on_another_stream(npu: FakeNpu, step: Step) -> None:
    npu.work("weights")
    step.runtime.capture(step)
    streams = [stream for _, _, stream in step.issued]
    assert len(step.issued) == 4 and len({*streams, "compute"}) == 3, "twice: for real, and recorded"
    assert "weights" in npu.before("first 1")
    npu.work("after")
    assert "second 2" in npu.before("after")


def test_u112_recordings_share_memory_and_streams(npu: FakeNpu, step: Step) -> None:
    made = [step.runtime.capture(step) for _ in range(3)]
    shared = npu.graph_pools[0]
    assert shared is not None and npu.graph_pools == [shared] * 3
    assert npu.streams == 3, "one for copies, one for all updates, and the vendor's for all captures"
    assert [one.nbytes for one in made] == [1 << 20] * 3
    for one in made:
        one.close()
    assert not any(graph.open for graph in npu.graphs)
    step.runtime.capture(step)
    assert npu.graph_pools[3] is not shared, "what the closed ones shared is gone"


def test_u113_what_recordings_hold_is_not_to_be_had_again(npu: FakeNpu, step: Step) -> None:
    made = step.runtime.capture(step)
    npu.pools["common"]["left"] = 5 << 20
    assert step.runtime.memory().reclaimable == 5 << 20
    made.close()
    assert step.runtime.memory().reclaimable == 6 << 20


def test_u112_a_refused_capture_ends_nothing_and_compute_goes_on_where_it_was(npu: FakeNpu, step: Step) -> None:
    npu.refused_capture = RuntimeError(
        "capture_end:NPUGraph.cpp:240 NPU function error: AclmdlRICaptureEnd(capture_stream_, &model_ri), "
        "error code is 207008\n[Error]: Stream resources are insufficient."
    )
    with pytest.raises(RuntimeError, match="Stream resources are insufficient"):
        step.runtime.capture(step)
    assert npu.current is npu.compute and not step.runtime.recording
    step.runtime.check()
    npu.refused_capture = None
    step.runtime.capture(step).replay()
    assert npu.calls[-1] == ("replay", "compute")


@pytest.mark.parametrize("value", ["", "0", "1", "2"])
def test_task_queue_enable_2_rules_recordings_out_in_one_line(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", value)
    reason = why_no_recordings()
    assert (reason is not None) == (value == "2")
    if reason is not None:
        assert "TASK_QUEUE_ENABLE=2" in reason and "set it to 1" in reason and "\n" not in reason


# -- a step of the backend ---------------------------------------------------------------------------------------------


class Decode:
    """Recorded decode of up to four rows over their own blocks; results are the first layer's."""

    def __init__(self, npu: FakeNpu, *layers: LayerSpec, size: int) -> None:
        operators.install()
        chip = limits.chip("910B3")
        assert chip is not None
        runtime = NpuRuntime(0, pooled=True)
        runtime.torch_device = "cpu"
        self.backend = AscendBackend(declared(chip), runtime)
        self.graphs = self.backend.extension("graph")
        self.rows = Sequences(self.backend, spec(*layers, block_size=size, num_blocks=9), [40, 30, 20])
        self.plan = self.graphs.static_plan(self.rows.pool, 0, GraphShape(rows=4, tokens=4, max_ctx=64))
        self.q, self.k, self.v = (torch.zeros(4, heads, 32, dtype=torch.float16) for heads in (4, 2, 2))
        self.outs = [torch.full_like(self.q, torch.nan) for _ in layers]
        self.graph = self.graphs.capture(self.attend, [self.plan])

    def attend(self) -> None:
        for index, out in enumerate(self.outs):
            self.backend.attend(self.plan, index, self.q, self.k, self.v, out)

    def replay(self, done: list[int]) -> list[torch.Tensor]:
        """The token after `done` of the first rows."""
        count = len(done)
        for target, many in ((self.q, self.rows.q), (self.k, self.rows.k), (self.v, self.rows.v)):
            for row, at in enumerate(done):
                target[row] = many[row][at]
        step = batch([(at + 1, 1) for at in done], size=self.rows.size)
        self.graphs.refresh(self.plan, padded(step, 4))
        for out in self.outs:
            out.fill_(torch.nan)
        self.graph.replay()
        assert all(bool((out[count:] == 0).all()) for out in self.outs), "rows without a sequence"
        return list(self.outs[0][:count].split(1))


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("window", [None, 5])
def test_a_replay_computes_from_the_lengths_and_tensors_of_its_time(
    npu: FakeNpu, size: int, window: int | None
) -> None:
    decode = Decode(npu, layer(window=window), size=size)
    decode.rows.check(decode.rows.step([0, 0, 0], [20, 10, 5]), [0, 0, 0])
    for done in ([20, 10, 5], [21, 11], [22, 12, 6], [23]):
        decode.rows.check(decode.replay(done), done)
    assert [call for call, _ in npu.calls].count("replay") == 4
    decode.graph.close()
    assert not any(graph.open for graph in npu.graphs)


def test_what_a_recording_keeps_can_be_written_in_either_mode(npu: FakeNpu) -> None:
    with torch.inference_mode():
        decode = Decode(npu, layer(), size=32)
        decode.rows.step([0], [20])
        results = decode.replay([20])
    decode.rows.check(results, [20])
    (kept,) = decode.backend._attention._kept.values()
    assert not any(one.is_inference() for one in (kept.query, kept.result, kept.logs, kept.workspace))


def test_u113_layers_of_one_shape_take_turns_in_what_a_recording_keeps(
    npu: FakeNpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, workspace = [], Operators.workspace

    def counted(self: Operators, call: Any) -> torch.Tensor:
        asked.append(call.query.shape)
        return workspace(self, call)

    monkeypatch.setattr(Operators, "workspace", counted)
    layers = [layer(index, window=window) for index, window in enumerate((None, 5, None, 5, None))]
    decode = Decode(npu, *layers, size=32)
    assert len(asked) == 2, "one with a mask, one without"
    assert len(decode.backend._attention._kept) == 2
    decode.rows.step([0], [20])
    decode.rows.check(decode.replay([20]), [20])
    decode.graph.close()
    del decode.graph
    gc.collect()
    assert not decode.backend._attention._kept


def test_a_recording_that_is_refused_runs_eagerly_with_the_same_results(
    npu: FakeNpu, caplog: pytest.LogCaptureFixture
) -> None:
    npu.refused_capture = RuntimeError("capture_end:NPUGraph.cpp:240 NPU function error: error code is 207008")
    decode = Decode(npu, layer(), size=32)
    assert "could not be captured into a graph and runs eagerly" in caplog.text and "207008" in caplog.text
    decode.rows.step([0], [20])
    decode.rows.check(decode.replay([20]), [20])
    assert not npu.calls.count(("replay", "compute"))


def test_with_task_queue_enable_2_nothing_is_recorded_and_the_reason_is_told(
    npu: FakeNpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    with pytest.raises(UnsupportedError, match="TASK_QUEUE_ENABLE=2"):
        Decode(npu, layer(), size=32)
    assert not npu.graphs
