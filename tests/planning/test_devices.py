"""The table of devices: every row complete, named in the ways people do, and consistent with itself."""

from __future__ import annotations

import dataclasses
from unittest.mock import Mock

import pytest

from pagedkv import plugins
from pagedkv.api import AttentionBackend, Batch, LayerSpec, MemoryInfo, OpSpec, needs
from pagedkv.errors import BackendUnavailable, ConfigError, UnsupportedError
from pagedkv.planning.devices import Device, devices, find_device, read_data
from pagedkv.planning.stand_in import Absent, StandIn
from tests.helpers.planning_rig import GIB, capabilities

ALL = devices()


@pytest.mark.parametrize("device", ALL, ids=lambda device: device.name)
def test_a_row_has_what_a_plan_needs(device: Device) -> None:
    assert 4 * GIB <= device.memory <= 200 * GIB
    assert 0 < device.taken <= device.memory // 2
    assert 30e9 <= device.bandwidth <= 8e12
    assert set(device.peak) <= {"fp32", "bf16", "fp16"} and "fp16" in device.peak
    assert max(device.peak.values()) == device.peak["fp16"]
    assert device.source and device.title and device.kind
    # A product of two large matrices is never bound by memory, a step of one token always is.
    assert 30 < device.peak["fp16"] / device.bandwidth < 700
    assert device.free_memory == MemoryInfo(
        free=device.memory - device.taken, total=device.memory, unified=device.unified
    )


def test_no_two_rows_answer_to_one_name() -> None:
    names = [name.lower() for device in ALL for name in (device.name, *device.aliases)]
    assert len(set(names)) == len(names)


def test_the_named_kinds_are_there() -> None:
    names = {device.name for device in ALL}
    wanted = (
        "rtx-3060 rtx-3090 rtx-4090 rtx-5090 a10 a100-40gb a100-80gb l4 l40s h100 h200 b200 ascend-910b3 ascend-310p"
    )
    assert names >= set(wanted.split())
    assert len([name for name in names if "orin" in name]) >= 6
    assert {device.backend for device in ALL} == {"cuda", "jetson", "ascend"}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("rtx-4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("A100", "a100-80gb"),
        ("NVIDIA Jetson AGX Orin 64GB", "jetson-agx-orin-64gb"),
        ("Orin Nano Super", "jetson-orin-nano-super"),
        ("910B", "ascend-910b3"),
    ],
)
def test_names_as_people_write_them(given: str, name: str) -> None:
    assert find_device(given).name == name


def test_an_unknown_name_gets_the_nearest_or_all() -> None:
    with pytest.raises(ConfigError, match="did you mean rtx-4080"):
        find_device("rtx 4085")
    with pytest.raises(ConfigError) as caught:
        find_device("abacus")
    assert all(device.name in str(caught.value) for device in ALL)


@pytest.mark.parametrize("name", [f.name for f in plugins.discover() if f.name in {d.backend for d in ALL}])
def test_an_installed_backend_knows_the_kinds_in_the_table(name: str) -> None:
    descriptor = plugins.load(plugins.find(name))
    for device in (device for device in ALL if device.backend == name):
        offer = descriptor.describe(device.info)
        assert set(device.peak) <= set(offer.dtypes), device.name
        assert offer.preferred_block_size == device.block_size or name == "cuda"


def test_a_backend_that_is_not_installed_is_expected_to_do_whatever_a_layer_needs() -> None:
    device = find_device("310p")
    absent = Absent(device)
    offer = absent.describe(device.info)
    assert (offer.dtypes, offer.preferred_block_size, absent.probe()) == (("fp16",), 32, ())
    fields = [f for f in LayerSpec.__dataclass_fields__.values() if "feature" in f.metadata]
    assert {f.metadata["feature"] for f in fields} <= offer.features
    with pytest.raises(BackendUnavailable, match="ascend"):
        absent.create(0, {}, None)  # type: ignore[arg-type]


def test_a_stand_in_answers_and_runs_nothing() -> None:
    backend: AttentionBackend = StandIn(capabilities(), MemoryInfo(free=GIB, total=2 * GIB), fraction=0.75)
    assert backend.kv_budget(None, GIB // 4) == 3 * GIB // 2 - GIB - GIB // 4
    assert backend.kv_budget(0.9, 0) == int(0.9 * 2 * GIB) - GIB
    assert backend.op("linear", OpSpec(dtype="bf16")) is None
    batch: Batch = None  # type: ignore[assignment]
    for call in (
        lambda: backend.alloc_pool(None),  # type: ignore[arg-type]
        lambda: backend.plan(None, 0, batch),  # type: ignore[arg-type]
        lambda: backend.attend(None, 0, None, None, None, None),
        lambda: backend.copy_blocks(None, None, None),  # type: ignore[arg-type]
    ):
        with pytest.raises(UnsupportedError, match="runs nothing"):
            call()
    backend.close()


@pytest.mark.parametrize("device", [d for d in ALL if d.backend == "jetson"], ids=lambda device: device.name)
@pytest.mark.parametrize(("fraction", "reserved"), [(None, 0), (0.5, GIB), (1.0, 64 * GIB)])
def test_u102_a_board_has_the_budget_that_its_backend_gives(device: Device, fraction, reserved: int) -> None:
    backend = pytest.importorskip("pagedkv_jetson.backend", reason="the backend of these boards is not installed")
    memory = dataclasses.replace(device.free_memory, allocated=0)
    theirs = backend.JetsonBackend.kv_budget(Mock(memory=lambda: memory), fraction, reserved)
    ours = StandIn(capabilities(), memory, fraction=device.fraction, reserve=device.reserve)
    assert ours.kv_budget(fraction, reserved) == theirs


def test_parts_of_the_limits_are_intervals_with_a_source() -> None:
    data = read_data("rates.toml")
    assert set(data) == {"here", "published"}
    for table in data.values():
        parts = {name: value for name, value in table.items() if name != "source"}
        assert set(parts) == {"read", "attention_read", "product", "packed", "attention", "layer", "row"}
        assert all(0 < low < high for low, high in parts.values())
        assert "docs/" in table["source"]
    assert needs(LayerSpec(index=0, q_heads=1, kv_heads=1, k_dim=1, v_dim=1, scale=1.0)) == ()
