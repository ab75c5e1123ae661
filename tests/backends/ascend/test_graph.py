"""Recordings on a stand-in for torch.npu: the vendor's order of calls, their streams and memory, and refusals."""

from __future__ import annotations

import pytest

from pagedkv_ascend.runtime import NpuRuntime, why_no_recordings
from tests.backends.ascend import fake_npu
from tests.backends.ascend.fake_npu import FakeNpu

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
        for layer in ("first", "second"):
            self.runtime.task(lambda layer=layer: self.issue(layer))  # type: ignore[misc]

    def issue(self, layer: str) -> None:
        self.issued.append((layer, self.length, self.npu.current.name))
        self.npu.work(f"{layer} {len(self.issued)}")


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
    assert [(layer, length) for layer, length, _ in step.issued] == [
        (layer, length) for length in (5, 6) for layer in ("first", "second")
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
    assert [layer for layer, _, _ in step.issued] == ["first", "second"] and not npu.calls
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
