"""What the Ascend backend says before anything is loaded: every NPU judged, ranks mapped, and what doctor shows."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedkv.api import BackendUnavailable, DeviceInfo, World
from pagedkv.api.errors import ConfigError
from pagedkv.conformance import loading_child
from pagedkv.diagnosis.findings import command_in
from pagedkv.plugins.checks import capability_problems, device_problems, option_problems
from pagedkv_ascend import limits
from pagedkv_ascend.descriptor import AscendDescriptor, chip_of
from tests.backends.ascend import machine

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = machine.driver(tmp_path_factory.mktemp("machine"))
    machine.cann(folder)
    return folder


@pytest.fixture(autouse=True)
def good(monkeypatch: pytest.MonkeyPatch, root: Path) -> pytest.MonkeyPatch:
    """A machine on which nothing is wrong."""
    machine.bare(monkeypatch)
    machine.sourced(root / machine.CANN, monkeypatch)
    machine.installed(monkeypatch, torch="2.13.0+cpu", torch_npu="2.13.0")
    return monkeypatch


def probed(root: Path) -> list[tuple[int, str]]:
    return [(device.score, device.reason) for device in AscendDescriptor(root).probe()]


def test_the_entry_point_names_it() -> None:
    (entry,) = importlib.metadata.entry_points(group="pagedkv.backends", name="ascend")
    assert entry.load() is AscendDescriptor and AscendDescriptor.name == "ascend"
    assert option_problems(AscendDescriptor.options) == []


def test_u87_it_imports_no_framework_and_touches_no_device() -> None:
    asked = json.dumps(
        {"target": "pagedkv_ascend.descriptor:AscendDescriptor", "path": [str(ROOT / "backends"), *sys.path]}
    )
    done = subprocess.run([sys.executable, loading_child.__file__, asked], capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["imported"], answer["frameworks"], answer["devices"], answer["raised"]) == ([], [], [], "")


# -- scores ------------------------------------------------------------------------------------------------------------


def test_a_machine_on_which_nothing_is_wrong(root: Path) -> None:
    found = AscendDescriptor(root).probe()
    assert [(one.index, one.kind, one.total, one.free, one.score, one.reason) for one in found] == [
        (index, "Ascend910B3, Atlas A2", 64 * GIB, 60 * GIB, 80, "native, Atlas A2") for index in (0, 1)
    ]
    assert device_problems(found) == []


@pytest.mark.parametrize(
    ("chip", "npu_name", "kind", "score", "reason"),
    [
        ("Ascend910B4-1", "", "Ascend910B4-1, Atlas A2", 80, "native, Atlas A2"),
        ("Ascend910", "9392", "Ascend910_9392, Atlas A3", 80, "native, Atlas A3"),
        (
            "950PR",
            "",
            "Ascend950PR, of no series known here",
            50,
            "generic: it is in no table here, the limits of Atlas A2 are taken for it",
        ),
        (
            "310P3",
            "",
            "Ascend310P3, Atlas inference series",
            0,
            "the Atlas inference series has no npu_fused_infer_attention_score: choose backend cpu",
        ),
        ("", "", "Ascend, chip unknown", 0, "the driver does not tell its chip: update the NPU driver"),
    ],
)
def test_scores_and_reasons_by_chip(
    root: Path, good: pytest.MonkeyPatch, chip: str, npu_name: str, kind: str, score: int, reason: str
) -> None:
    good.setenv("FAKE_CHIP", chip)
    good.setenv("FAKE_NPU_NAME", npu_name)
    device = AscendDescriptor(root).probe()[0]
    assert (device.kind, device.score, device.reason) == (kind, score, reason)
    can = AscendDescriptor(root).describe(device)
    assert capability_problems(can) == []
    assert chip_of(device) == (limits.chip(device.kind.split(",")[0]) or limits.chip("910B3"))


def test_one_that_is_lost_is_listed_with_its_reason(root: Path, good: pytest.MonkeyPatch) -> None:
    good.setenv("FAKE_LOST", "10")
    good.setenv("FAKE_LOST_AT", "chip")
    first, second = AscendDescriptor(root).probe()
    assert (first.score, second.score, second.kind) == (80, 0, "Ascend, chip unknown")
    assert second.reason.startswith("the driver answers dcmi_get_device_chip_info with -8008, no such device")


def test_the_variable_leaves_and_renumbers(root: Path, good: pytest.MonkeyPatch) -> None:
    good.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    assert [device.index for device in AscendDescriptor(root).probe()] == [0]


@pytest.mark.parametrize(
    ("variables", "kind", "words"),
    [
        ({"FAKE_CARDS": "0"}, "no NPU", "the driver lists no NPU: look at npu-smi info"),
        ({"FAKE_INIT": "-8012"}, "no NPU can be asked", "with -8012, not ready: wait until the NPU has started"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,4"}, "none visible", "there is no NPU 4, there are 0, 1; unset"),
    ],
)
def test_without_an_npu_there_is_one_line(
    root: Path, good: pytest.MonkeyPatch, variables: dict[str, str], kind: str, words: str
) -> None:
    for name, text in variables.items():
        good.setenv(name, text)
    (device,) = AscendDescriptor(root).probe()
    assert (device.kind, device.score, device.total) == (kind, 0, None) and words in device.reason


def test_without_a_driver_there_is_one_line(tmp_path: Path) -> None:
    line = "no driver of Ascend NPUs is installed: install it, or choose another backend"
    assert probed(tmp_path) == [(0, line)]


def test_what_speaks_against_all_is_said_of_each(root: Path, good: pytest.MonkeyPatch) -> None:
    machine.installed(good, torch="2.13.0")
    line = "torch-npu is not installed: pip install '.[ascend]' in the clone"
    assert probed(root) == [(0, line), (0, line)]


def test_a_set_that_nobody_names_is_a_word_and_no_refusal(
    root: Path, good: pytest.MonkeyPatch, opened: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    machine.installed(good, torch="2.10.0+cpu", torch_npu="2.10.0")
    said = "torch-npu 2.10.0 is named for CANN 9.0, CANN 9.1.0 is installed (TorchNPU's COMPATIBILITY.md)"
    assert probed(root)[0] == (80, f"native, Atlas A2; {said}")
    assert AscendDescriptor(root).diagnose()["change versions"] == said
    AscendDescriptor(root).create(0, {}, World())
    assert len(opened) == 1
    assert [r.getMessage() for r in caplog.records] == [f"{said}: see `pagedkv doctor --backend ascend`"]


# -- creating ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(good: pytest.MonkeyPatch) -> list[Any]:
    """What would be opened."""
    from pagedkv_ascend import opening

    calls: list[Any] = []
    good.setattr(opening, "open_backend", lambda *given, **more: calls.append((*given, more)))
    return calls


@pytest.mark.parametrize("world", [World(), World(rank=1, size=2, rendezvous="tcp://127.0.0.1:1")])
def test_opening_gets_chip_options_and_world(root: Path, opened: list[Any], world: World) -> None:
    AscendDescriptor(root).create(1, {"task_queue_enable": 2}, world)
    assert opened == [(1, limits.chip("910B3"), {"task_queue_enable": 2}, {"world": world})]


@pytest.mark.parametrize(
    ("device", "rank", "size", "said"),
    [
        (
            0,
            0,
            3,
            "3 ranks need 3 NPUs and 2 are visible: set ASCEND_RT_VISIBLE_DEVICES, or lower tensor_parallel_size to 2",
        ),
        (
            0,
            1,
            2,
            "rank 1 was given NPU 0, and rank r takes the r-th visible NPU: choose others with "
            "ASCEND_RT_VISIBLE_DEVICES, leave device unset",
        ),
        (2, 0, 1, "NPU 2: there is none, the last one is 1: choose with device=N"),
    ],
)
def test_ranks_and_npus_are_one_to_one(
    root: Path, opened: list[Any], device: int, rank: int, size: int, said: str
) -> None:
    world = World(rank=rank, size=size, rendezvous="tcp://127.0.0.1:1")
    with pytest.raises(BackendUnavailable) as raised:
        AscendDescriptor(root).create(device, {}, world)
    assert str(raised.value) == said and opened == []


def test_every_rank_hears_of_one_that_cannot_run(root: Path, good: pytest.MonkeyPatch, opened: list[Any]) -> None:
    good.setenv("FAKE_LOST", "10")
    good.setenv("FAKE_LOST_AT", "chip")
    with pytest.raises(BackendUnavailable, match="NPU 1, which rank 1 needs: the driver answers"):
        AscendDescriptor(root).create(0, {}, World(rank=0, size=2, rendezvous="tcp://127.0.0.1:1"))
    assert opened == []


def test_what_cannot_be_is_said_before_torch_is_loaded(root: Path, good: pytest.MonkeyPatch, opened: list[Any]) -> None:
    with pytest.raises(ConfigError, match="backend option hccl_buffsize=0: it is 1 or more"):
        AscendDescriptor(root).create(0, {"hccl_buffsize": 0}, World())
    good.setenv("HCCL_IF_IP", "host")
    with pytest.raises(ConfigError, match="HCCL_IF_IP='host': it is an IP address of this machine; unset HCCL_IF_IP"):
        AscendDescriptor(root).create(0, {}, World())
    assert opened == []


def test_what_is_unusable_does_not_open(root: Path, good: pytest.MonkeyPatch, opened: list[Any]) -> None:
    machine.installed(good, torch="2.13.0")
    with pytest.raises(BackendUnavailable, match="NPU 0: torch-npu is not installed"):
        AscendDescriptor(root).create(0, {}, World())
    assert opened == []


# -- dtypes ------------------------------------------------------------------------------------------------------------


def test_u115_a_chip_with_fp16_alone_offers_that(root: Path) -> None:
    device = DeviceInfo.of(index=0, kind="Ascend310P3, Atlas inference series", score=0)
    can = AscendDescriptor(root).describe(device)
    assert (can.dtypes, can.native_dtypes, can.kv_dtypes) == (("fp16",), ("fp16",), ("fp16",))


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_shows_versions_devices_ranks_and_whose_variables(root: Path, good: pytest.MonkeyPatch) -> None:
    good.setenv("HCCL_CONNECT_TIMEOUT", "600")
    good.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    said = AscendDescriptor(root).diagnose()
    assert said["state"].startswith("not run on hardware: calls were checked against the operators of three versions")
    assert "emulation" in said["state"] and "`pagedkv certify ascend`" in said["state"]
    assert said["versions"].startswith("torch 2.13.0+cpu, torch-npu 2.13.0; torch-npu 2.13.0 goes with torch 2.13")
    assert said["CANN"] == f"9.1.0 in {root / machine.CANN}"
    assert said["NPU 0"] == said["NPU 1"] == "Ascend910B3, Atlas A2, 60.0 GiB free of 64.0 GiB"
    assert said["ranks"] == "0: NPU 1"
    shown = said["variables"].split(", ")
    assert "HCCL_CONNECT_TIMEOUT=600 (yours)" in shown and "TASK_QUEUE_ENABLE=1 (default)" in shown
    assert not [key for key in said if key.startswith("change")]


@pytest.mark.parametrize(
    ("variables", "key", "words", "command"),
    [
        ({"HCCL_BUFFSIZE": "big"}, "change variables", "it is a whole number", "unset HCCL_BUFFSIZE"),
        ({"FAKE_INIT": "-8005"}, "change driver", "answers dcmi_init with -8005", ""),
        ({"ASCEND_RT_VISIBLE_DEVICES": "1,1"}, "change devices", "names 1 twice", "unset ASCEND_RT_VISIBLE_DEVICES"),
        (
            {"LD_LIBRARY_PATH": ""},
            "change",
            "is not on the library path",
            "source {root}/usr/local/Ascend/cann/set_env.sh",
        ),
    ],
)
def test_doctor_names_what_to_change(
    root: Path, good: pytest.MonkeyPatch, variables: dict[str, str], key: str, words: str, command: str
) -> None:
    for name, text in variables.items():
        good.setenv(name, text)
    said = AscendDescriptor(root).diagnose()
    assert words in said[key]
    assert command_in(said[key]) == command.format(root=root)


def test_doctor_without_driver_or_cann(tmp_path: Path, good: pytest.MonkeyPatch) -> None:
    machine.bare(good)
    said = AscendDescriptor(tmp_path).diagnose()
    assert said["NPUs"] == "no driver of Ascend NPUs is installed" and said["CANN"] == "ASCEND_HOME_PATH is not set"
    assert not [key for key in said if key.startswith("change")]


def test_doctor_of_npus_that_are_lost_or_tell_no_memory(root: Path, good: pytest.MonkeyPatch) -> None:
    good.setenv("FAKE_SIZE", "0")
    good.setenv("FAKE_LOST", "10")
    good.setenv("FAKE_LOST_AT", "id")
    said = AscendDescriptor(root).diagnose()
    assert said["NPU 0"] == "Ascend910B3, Atlas A2, memory unknown"
    assert said["NPU without a number, 2 in the list"].startswith("card 10, device 0: the driver answers")
    good.setenv("FAKE_CARDS", "0")
    assert AscendDescriptor(root).diagnose()["NPUs"] == "the driver lists none"
