"""Every board by name, from its own files and from what a container shows of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv_cuda import devices
from pagedkv_jetson.board import identify, meminfo, table
from tests.backends.jetson import trees
from tests.backends.jetson.trees import BOARDS, DPKG, TREE


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_is_known_from_its_own_files(tmp_path: Path, name: str) -> None:
    shown = BOARDS[name]
    found = identify(trees.board(tmp_path, name))
    assert found is not None
    assert (found.name, found.model) == (shown.name, shown.model)
    assert found.chip["capability"] == shown.capability
    assert found.reachable and found.release == shown.release.split()[1][1:] + "." + shown.release.split()[4].rstrip(
        ","
    )


@pytest.mark.parametrize("name", BOARDS)
def test_a_container_with_nothing_mounted_still_tells_chip_and_model(tmp_path: Path, name: str) -> None:
    found = identify(trees.container(tmp_path, name))
    assert found is not None
    assert (found.name, found.chip["capability"]) == (BOARDS[name].model, BOARDS[name].capability)
    assert (found.release, found.jetpack, found.module) == ("", {}, {})


@pytest.mark.parametrize("name", BOARDS)
def test_a_container_whose_device_tree_is_not_masked_tells_the_module(tmp_path: Path, name: str) -> None:
    found = identify(trees.container(tmp_path, name, keep=(TREE, "etc/nv_tegra_release")))
    assert found is not None and found.name == BOARDS[name].name and found.jetpack


def test_the_release_also_stands_in_the_package_list(tmp_path: Path) -> None:
    trees.container(tmp_path, "agx-orin-64")
    trees.write(tmp_path, "var/lib/dpkg/status", DPKG)
    found = identify(tmp_path)
    assert found is not None and (found.release, found.jetpack["name"]) == ("36.4.3", "JetPack 6")


def test_a_package_without_a_version_takes_none_from_the_next(tmp_path: Path) -> None:
    trees.container(tmp_path, "agx-orin-64")
    trees.write(tmp_path, "var/lib/dpkg/status", "Package: nvidia-l4t-core\nStatus: gone\n\nPackage: a\nVersion: 9.9\n")
    found = identify(tmp_path)
    assert found is not None and found.release == ""


def test_a_tegra_that_is_not_in_the_table_is_said_to_be_unknown(tmp_path: Path) -> None:
    trees.write(tmp_path, f"{TREE}/compatible", "acme,board\0nvidia,tegra999\0")
    found = identify(tmp_path)
    assert found is not None and found.chip["score"] == 0 and "report its /proc/device-tree" in found.chip["why"]
    assert found.name == "a board that does not tell its model"


@pytest.mark.parametrize("files", [{}, {TREE + "/compatible": "raspberrypi,5\0brcm,bcm2712\0"}])
def test_other_machines_are_none(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        trees.write(tmp_path, name, text)
    assert identify(tmp_path) is None
    assert not devices.is_tegra(tmp_path)


def test_this_machine_is_none() -> None:
    assert identify() is None


@given(st.dictionaries(st.sampled_from(["compatible", "model"]), st.binary(max_size=60)), st.binary(max_size=60))
def test_no_bytes_in_the_files_raise(tmp_path_factory, files: dict[str, bytes], release: bytes) -> None:
    root = tmp_path_factory.mktemp("tree")
    trees.write(root, "sys/devices/soc0/family", "Tegra\n")
    for name, text in {
        **{f"{TREE}/{key}": value for key, value in files.items()},
        "etc/nv_tegra_release": release,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    found = identify(root)
    assert found is not None and found.name


def test_memory_in_bytes(tmp_path: Path) -> None:
    trees.meminfo(tmp_path, total=64 << 30, available=40 << 30, free=1 << 30)
    told = meminfo(tmp_path)
    assert (told["MemTotal"], told["MemAvailable"], told["MemFree"]) == (64 << 30, 40 << 30, 1 << 30)
    assert meminfo(tmp_path / "nowhere") == {}


# -- the table ---------------------------------------------------------------------------------------------------------


def test_each_row_has_its_source_or_its_reason() -> None:
    rows = table()
    assert all(row["source"] and row["memory_gb"] > 0 and row["bandwidth"] > 0 for row in rows["module"])
    assert all(row["score"] == 80 or row["why"] for row in rows["chip"])
    assert all(row["wheels"] or row["why"] for row in rows["jetpack"])


def test_a_module_is_found_before_a_row_that_covers_more() -> None:
    numbers = [row["number"] for row in table()["module"]]
    later = [(a, b) for i, a in enumerate(numbers) for b in numbers[i + 1 :] if b.startswith(a)]
    assert later == []


@pytest.mark.parametrize("capability", ["8.7", "11.0", "7.2"])
def test_chips_are_told_apart(capability: str) -> None:
    (row,) = [row for row in table()["chip"] if row["capability"] == capability]
    assert (row["score"], "why" in row) == {"8.7": (80, False), "11.0": (10, True), "7.2": (0, True)}[capability]
