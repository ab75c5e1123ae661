"""What the Jetson backend says before anything is loaded: every board judged, every reason with the way out."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pagedkv.api import BackendUnavailable, DeviceInfo, World
from pagedkv.checking.capabilities import exceeds
from pagedkv.cli import main as cli
from pagedkv.conformance import loading_child
from pagedkv.plugins import check_options
from pagedkv_cuda import devices, packages
from pagedkv_cuda.capabilities import declared
from pagedkv_cuda.descriptor import CudaDescriptor, generation_of
from pagedkv_jetson import backend as backend_module
from pagedkv_jetson.descriptor import EXTRA, JetsonDescriptor, narrowed
from tests.backends.jetson import trees
from tests.backends.jetson.trees import BOARDS, ORINS, TREE
from tests.helpers.plugin_dists import install

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """A torch and a Triton that fit, or what speaks against them."""
    against: dict[str, str | None] = {"torch": None, "triton": None}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(packages, "why_no_torch", lambda driver: against["torch"])
    monkeypatch.setattr(packages, "why_no_triton", lambda extra: against["triton"])
    return against


def probed(root: Path) -> DeviceInfo:
    (device,) = JetsonDescriptor(root).probe()
    return device


def test_the_entry_point_names_it() -> None:
    (entry,) = importlib.metadata.entry_points(group="pagedkv.backends", name="jetson")
    assert entry.load() is JetsonDescriptor and JetsonDescriptor.name == "jetson"


def test_elsewhere_there_is_none() -> None:
    device = probed(Path("/"))
    assert (device.score, device.reason) == (0, "this machine is not a Jetson")
    said = JetsonDescriptor().diagnose()
    assert said.keys() == {"state", "board"} and said["board"] == "this machine is not a Jetson"


def test_u87_it_is_as_light_as_the_one_that_it_extends() -> None:
    asked = json.dumps(
        {"target": "pagedkv_jetson.descriptor:JetsonDescriptor", "path": [str(ROOT / "backends"), *sys.path]}
    )
    done = subprocess.run([sys.executable, loading_child.__file__, asked], capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["imported"], answer["frameworks"], answer["devices"], answer["raised"]) == ([], [], [], "")


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ORINS)
def test_orins_are_native_and_share_their_memory(tmp_path: Path, name: str) -> None:
    shown = BOARDS[name]
    device = probed(trees.board(tmp_path, name))
    assert (device.score, device.reason) == (80, "native, Orin")
    assert device.kind == f"{shown.name}, compute capability 8.7"
    assert (device.total, device.unified) == (shown.total >> 10 << 10, True)
    assert device.free == shown.total * 6 // 10 >> 10 << 10, "what is available, not what lies unused"


@pytest.mark.parametrize("name", ORINS)
def test_an_orin_in_a_container_is_one(tmp_path: Path, name: str) -> None:
    assert probed(trees.container(tmp_path, name)).score == 80


@pytest.mark.parametrize(
    ("name", "score", "words"),
    [
        ("thor", 10, "no kernel was compiled for 11.0 in any test: choose it by name"),
        ("agx-xavier", 0, "has code for 7.2: choose backend cpu"),
        ("xavier-nx", 0, "Xavier ends with JetPack 5"),
    ],
)
def test_other_boards_are_named_and_judged(tmp_path: Path, name: str, score: int, words: str) -> None:
    device = probed(trees.board(tmp_path, name))
    assert (device.score, words in device.reason) == (score, True)
    assert device.kind.startswith(BOARDS[name].name)


def test_the_cuda_backend_leaves_a_board_to_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = devices.is_tegra
    for root in (trees.board(tmp_path / "a", "orin-nx-8"), trees.container(tmp_path / "b", "orin-nx-8")):
        monkeypatch.setattr(devices, "is_tegra", lambda root=root: seen(root))
        (device,) = CudaDescriptor().probe()
        assert device.score == 0 and "choose backend jetson" in device.reason


@pytest.mark.parametrize(
    ("release", "words"),
    [(trees.R35, "JetPack 5 has CUDA 11.4 and Python 3.8"), (trees.release(32, "7.4"), "JetPack 4 has CUDA 10.2")],
)
def test_a_release_that_is_too_old_is_said(tmp_path: Path, release: str, words: str) -> None:
    trees.write(trees.board(tmp_path, "agx-orin-64"), "etc/nv_tegra_release", release)
    assert probed(tmp_path).score == 0 and words in probed(tmp_path).reason


def test_a_container_without_the_gpu_is_told_how_to_get_it(tmp_path: Path) -> None:
    (trees.container(tmp_path, "orin-nano-8") / "dev/nvmap").unlink()
    assert probed(tmp_path).score == 0 and "docker run --runtime nvidia" in probed(tmp_path).reason


@pytest.mark.parametrize(("value", "score"), [("", 0), ("-1", 0), ("1", 0), ("0", 80), ("0,1", 80)])
def test_the_variable_can_hide_the_only_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, score: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    device = probed(trees.board(tmp_path, "agx-orin-32"))
    assert device.score == score and ("unset it" in device.reason) == (score == 0)


def test_a_missing_extra_is_named(tmp_path: Path, packs: dict[str, str | None]) -> None:
    packs["triton"] = f"triton is not installed: {EXTRA}"
    assert probed(trees.board(tmp_path, "orin-nx-16")).reason.endswith("pip install 'pagedkv[jetson]'")


@pytest.mark.parametrize(
    ("name", "words"),
    [("orin-nx-16", "folder jp6/cu126"), ("orin-nx-8", "for JetPack 7 and CUDA 13"), ("thor", "PyPI's own wheel")],
)
def test_u105_a_torch_without_cuda_is_said_with_where_a_fitting_one_is(
    tmp_path: Path, packs: dict[str, str | None], name: str, words: str
) -> None:
    packs["torch"] = "torch 2.13.0 is built without CUDA"
    device = probed(trees.board(tmp_path, name))
    assert device.score == 0 and device.reason.startswith("torch 2.13.0 is built without CUDA; a torch for this board")
    assert words in device.reason


@pytest.mark.skipif(packages.torch_cuda() is not None, reason="needs a torch without CUDA")
def test_u105_doctor_says_it_of_a_boards_files_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = trees.board(tmp_path / "board", "orin-nano-8")
    source = f"""
from pathlib import Path
from pagedkv_jetson.descriptor import JetsonDescriptor
class Fake(JetsonDescriptor):
    name = "fake"
    def __init__(self):
        super().__init__(Path({str(root)!r}))
"""
    monkeypatch.syspath_prepend(str(install(tmp_path / "site", source)))
    result = CliRunner().invoke(cli.pagedkv, ["doctor", "--backend", "fake", "--json"])
    assert result.exit_code != 0
    (row,) = json.loads(result.stdout)["backends"]
    said = " ".join(row["reasons"])
    assert "is built without CUDA" in said and "folder jp6/cu126" in said
    assert row["diagnose"]["board"].startswith("Jetson Orin Nano 8GB, developer kit")
    assert "jp6/cu126" in row["diagnose"]["change"]


def test_u105_without_a_release_the_guide_is_named(tmp_path: Path, packs: dict[str, str | None]) -> None:
    packs["torch"] = "torch is not installed"
    assert "docs/jetson.md" in probed(trees.container(tmp_path, "agx-orin-64")).reason


# -- what it may do ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["agx-orin-64", "thor"])
def test_one_memory_and_one_gpu_and_no_graphs_unless_asked_for(tmp_path: Path, name: str) -> None:
    device = probed(trees.board(tmp_path, name))
    can = JetsonDescriptor(tmp_path).describe(device)
    assert (can.placements, can.collectives) == (frozenset({"device"}), frozenset())
    assert (can.graph_default, can.graph_context, can.graph) == (False, 1024, "decode")
    for kernels in ("triton", "torch"):
        assert exceeds(narrowed(declared(generation_of(device), kernels)), can) == []


def test_opening_gets_the_board_and_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "open_backend", lambda *given, **more: (given, more))
    descriptor = JetsonDescriptor(trees.board(tmp_path, "orin-nx-16"))
    options = check_options(descriptor, {})
    monkeypatch.setattr(packages, "why_no_triton", lambda *extra: None)
    (uuid, device, capability, can), more = descriptor.create(0, options, World())
    assert (uuid, device, capability, can.placements) == ("", 0, (8, 7), frozenset({"device"}))
    assert (more["root"], more["kernels"]) == (tmp_path, "triton") and "jp6/cu126" in more["wheels"]


def test_what_is_unusable_does_not_open(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="Xavier ends with JetPack 5"):
        JetsonDescriptor(trees.board(tmp_path, "xavier-nx")).create(0, {}, World())
    with pytest.raises(BackendUnavailable, match="there is none"):
        JetsonDescriptor(tmp_path).create(1, {}, World())


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_shows_the_board(tmp_path: Path) -> None:
    said = JetsonDescriptor(trees.board(tmp_path, "orin-nano-8-super", current=0)).diagnose()
    assert said["board"].startswith("Jetson Orin Nano 8GB, developer kit Super (NVIDIA Jetson Orin Nano Engineering")
    assert said["JetPack"] == "JetPack 6, Jetson Linux 36.4.3, CUDA 12.6 (6.0: 12.2), Python 3.10"
    assert said["memory"] == "4.2 GiB available of 7.0 GiB, shared with the GPU; 0.7 GiB unused"
    assert said["power mode"] == "15W (id 0)"
    assert said["change power mode"].startswith(
        "the power mode is 15W (id 0), the fastest is MAXN_SUPER (id 2): `pagedkv "
    )
    assert said["clocks"] == "GPU 306 of 918 MHz, by load (jetson_clocks holds them)"
    assert said["state"].startswith("not run on hardware: ") and "change" not in said


def test_doctor_asks_for_the_compiler_that_triton_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    said = JetsonDescriptor(trees.board(tmp_path, "orin-nx-8")).diagnose()
    assert "`sudo apt install build-essential python3-dev`" in said["change compiler"]


@pytest.mark.parametrize("name", BOARDS)
def test_doctor_gives_no_hint_in_the_fastest_mode(tmp_path: Path, name: str) -> None:
    shown = BOARDS[name]
    trees.clocks(trees.board(tmp_path, name), shown, 918, 918, 918)
    said = JetsonDescriptor(tmp_path).diagnose()
    assert said["power mode"] == f"{shown.modes[shown.fastest]} (id {shown.fastest}), the fastest"
    assert said["clocks"] == "GPU 918 of 918 MHz, held there"
    assert ("change" in said) == (shown.capability == "7.2") and "change power mode" not in said


@pytest.mark.parametrize("name", BOARDS)
def test_doctor_in_a_container_says_what_it_cannot_see(tmp_path: Path, name: str) -> None:
    said = JetsonDescriptor(trees.container(tmp_path, name)).diagnose()
    assert "mount /etc/nv_tegra_release" in said["JetPack"]
    assert said["power mode"] == "not shown here, `sudo nvpmodel -q` on the board tells"


def test_doctor_names_the_usual_fastest_mode_where_the_module_is_known(tmp_path: Path) -> None:
    said = JetsonDescriptor(trees.container(tmp_path, "orin-nano-8", keep=(TREE,))).diagnose()
    assert said["power mode"].endswith("; the fastest one of this board is 15W, MAXN_SUPER from JetPack 6.2 on")


def test_doctor_says_what_to_change(tmp_path: Path, packs: dict[str, str | None]) -> None:
    packs["torch"] = "torch 2.13.0 is built without CUDA"
    assert "jp6/cu126" in JetsonDescriptor(trees.board(tmp_path, "orin-nx-16")).diagnose()["change"]
