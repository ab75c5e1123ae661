"""torch, torch-npu and CANN by metadata and files: what is missing or does not fit, each one line with the way out."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from pagedkv.diagnosis.findings import command_in
from pagedkv.diagnosis.known import known
from pagedkv_ascend import packages
from tests.backends.ascend import machine
from tests.helpers.fake_machine import stub_torch

LIBRARIES = packages.table()["cann"]["libraries"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    machine.bare(monkeypatch)
    machine.installed(monkeypatch, torch="2.13.0+cpu", torch_npu="2.13.0")
    return monkeypatch


# -- packages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"torch": "2.13.0+cpu", "torch_npu": "2.13.0"}, None),
        ({"torch": "2.10.0+cpu", "torch_npu": "2.10.0.post4"}, None),
        ({"torch": "2.13.0"}, "torch-npu is not installed: pip install '.[ascend]' in the clone"),
        (
            {"torch_npu": "2.13.0"},
            "torch is not installed, torch-npu 2.13.0 wants 2.13: pip install '.[ascend]' in the clone",
        ),
        (
            {"torch": "2.14.1+cu130", "torch_npu": "2.13.0"},
            "torch-npu 2.13.0 is made for torch 2.13, torch 2.14.1+cu130 is installed: pip install 'torch==2.13.*', or "
            "a torch-npu 2.14",
        ),
        (
            {"torch": "2.13.0", "torch_npu": "2.10.0.post4"},
            "torch-npu 2.10.0.post4 is made for torch 2.10, torch 2.13.0 is installed: pip install 'torch==2.10.*', or "
            "a torch-npu 2.13",
        ),
    ],
)
def test_u109_torch_and_torch_npu(clean: pytest.MonkeyPatch, versions: dict[str, str], said: str | None) -> None:
    machine.installed(clean, **versions)
    assert packages.why_no_torch_npu() == said


@pytest.mark.parametrize(
    ("line", "toolkit"),
    [
        ("cuda: Optional[str] = '13.0'", "cuda 13.0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1.0'", "hip 7.1.0"),
        ("cuda = None\nxpu = '20250302'", "xpu 20250302"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\nrocm = None", None),
    ],
)
def test_what_torch_was_built_with_is_read_from_its_file(
    clean: pytest.MonkeyPatch, tmp_path: Path, line: str, toolkit: str | None
) -> None:
    clean.undo()
    package = stub_torch(tmp_path) / "torch"
    (package / "version.py").write_text(f"from typing import Optional\n__version__ = '2.13.0'\n{line}\n")
    clean.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(package / "__init__.py")))
    assert packages.torch_toolkit() == toolkit


def test_without_torch_it_has_no_toolkit(clean: pytest.MonkeyPatch) -> None:
    clean.undo()
    clean.setattr(importlib.util, "find_spec", lambda name: None)
    assert packages.torch_toolkit() is None


def test_triton_beside_triton_ascend(clean: pytest.MonkeyPatch) -> None:
    machine.installed(clean, triton="3.9.0", triton_ascend=None)
    assert packages.why_no_triton() is None
    machine.installed(clean, triton="3.9.0", triton_ascend="3.2.0")
    said = packages.why_no_triton() or ""
    assert said.startswith("triton and triton-ascend overwrite each other's files")
    assert command_in(said) == "pip uninstall -y triton triton-ascend"


def test_the_first_cause_is_said(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.installed(clean, torch="2.14.0", torch_npu="2.13.0", triton="3.9.0", triton_ascend="3.2.0")
    assert "is made for torch 2.13" in (packages.against(tmp_path) or "")
    machine.installed(clean, torch="2.13.0", torch_npu="2.13.0", triton="3.9.0", triton_ascend="3.2.0")
    assert "overwrite" in (packages.against(tmp_path) or "")
    machine.installed(clean, torch="2.13.0", torch_npu="2.13.0")
    assert "libhccl.so of CANN" in (packages.against(tmp_path) or "")
    machine.sourced(machine.cann(tmp_path), clean)
    assert packages.against(tmp_path) is None


# -- CANN --------------------------------------------------------------------------------------------------------------


def test_no_cann(tmp_path: Path) -> None:
    assert packages.why_no_cann(tmp_path) == (
        "torch-npu needs libhccl.so of CANN, which is not installed: install CANN, then source "
        "/usr/local/Ascend/ascend-toolkit/set_env.sh"
    )


@pytest.mark.parametrize("folder", packages.table()["cann"]["folders"])
def test_u108_cann_whose_script_was_not_sourced(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    for name in LIBRARIES:
        (tmp_path / folder / name).touch()
    script = tmp_path / folder.removesuffix("/lib64").removesuffix("/latest") / "set_env.sh"
    script.touch()
    said = packages.why_no_cann(tmp_path) or ""
    assert said == f"torch-npu needs libhccl.so, and {tmp_path / folder} is not on the library path: source {script}"
    assert command_in(said) == f"source {script}"


@pytest.mark.parametrize("name", LIBRARIES)
def test_u108_cann_without_a_library(clean: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    home = machine.cann(tmp_path, version="8.0.RC3", without=name)
    machine.sourced(home, clean)
    assert packages.why_no_cann(tmp_path) == (
        f"CANN 8.0.RC3 in {home} is without {name}, which torch-npu needs: install the whole toolkit of CANN, then "
        f"source {home}/set_env.sh"
    )


@pytest.mark.parametrize("variable", packages.HOMES)
def test_a_home_that_is_not_there(clean: pytest.MonkeyPatch, tmp_path: Path, variable: str) -> None:
    clean.setenv(variable, str(tmp_path / "gone"))
    said = packages.why_no_cann(tmp_path) or ""
    assert said.startswith(f"{variable}={tmp_path / 'gone'} is no folder: unset {variable}, then source /usr/local/")


@pytest.mark.parametrize("way", ["variable", "linker", "system"])
def test_every_way_to_the_library_path(clean: pytest.MonkeyPatch, tmp_path: Path, way: str) -> None:
    folder = tmp_path / ("usr/lib/x86_64-linux-gnu" if way == "system" else "opt/cann/lib64")
    folder.mkdir(parents=True)
    for name in LIBRARIES:
        (folder / name).touch()
    assert (packages.why_no_cann(tmp_path) is None) is (way == "system")
    if way == "variable":
        clean.setenv("LD_LIBRARY_PATH", f":/nowhere:{folder}")
    (tmp_path / "etc/ld.so.conf.d").mkdir(parents=True)
    if way == "linker":
        (tmp_path / "etc/ld.so.conf.d/cann.conf").write_text("# CANN\n/opt/cann/lib64\n")
    assert packages.why_no_cann(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        (
            "aarch64-linux/ascend_toolkit_install.info",
            "package_name=Ascend-cann-toolkit\nversion=9.2.0-beta.2\n",
            "9.2.0-beta.2",
        ),
        ("ascend_toolkit_install.info", "innerversion=V100R001\nversion = 8.3.RC1\n", "8.3.RC1"),
        ("version.cfg", "# version: 1.0\ntoolkit_running_version=[7.7.T20.0.B210:8.1.RC1]\n", "8.1.RC1"),
        ("version.cfg", "# version: 1.0\nruntime_running_version=[7.7]\n", None),
        ("other.info", "version=1\n", None),
    ],
)
def test_the_version_in_canns_files(tmp_path: Path, file: str, text: str, version: str | None) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert packages.cann_version(tmp_path) == version


def test_without_a_home_there_is_no_version() -> None:
    assert packages.cann_home() is None and packages.cann_version() is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ImportError("libhccl.so: cannot open shared object file: No such file or directory"),
            "torch-npu needs libhccl.so of CANN (libhccl.so: cannot open shared object file: No such file or "
            "directory): source /usr/local/Ascend/ascend-toolkit/set_env.sh, or install CANN",
        ),
        (
            OSError("/x/libop_plugin.so: undefined symbol"),
            "torch-npu needs libop_plugin.so of CANN (/x/libop_plugin.so: undefined symbol): source "
            "/usr/local/Ascend/ascend-toolkit/set_env.sh, or install CANN",
        ),
        (
            RuntimeError("Two accelerators cannot be used at the same time in PyTorch: npu and\ncuda"),
            "torch-npu 2.13.0 does not load with torch 2.13.0+cpu (Two accelerators cannot be used at the same time in "
            "PyTorch: npu and cuda): see `pagedkv doctor --backend ascend` for the versions that go together",
        ),
    ],
)
def test_u108_what_importing_raised(error: Exception, said: str) -> None:
    assert packages.why_not_imported(error) == said


def test_u108_the_first_cause_of_a_chain_is_named() -> None:
    outer = RuntimeError("Failed to load the backend extension: torch_npu")
    outer.__cause__ = ImportError("libatb.so: cannot open shared object file")
    said = packages.why_not_imported(outer)
    assert said.startswith("torch-npu needs libatb.so of CANN (libatb.so: cannot open")
    assert command_in(said) == "source /usr/local/Ascend/nnal/atb/set_env.sh"


@pytest.mark.parametrize("file", [*LIBRARIES, "libatb.so", "libascend_hal.so"])
def test_u108_doctor_knows_the_libraries_too(file: str) -> None:
    library = known().library(file)
    assert library is not None
    driver, boost = file == "libascend_hal.so", file == "libatb.so"
    wanted = "driver/lib64" if driver else "nnal/atb/set_env.sh" if boost else "ascend-toolkit/set_env.sh"
    assert wanted in library.command


# -- sets --------------------------------------------------------------------------------------------------------------


def test_every_row_names_its_source_and_fits_the_extra() -> None:
    rows = packages.sets()
    assert len({row.torch_npu for row in rows}) == len(rows)
    for row in rows:
        assert row.source and row.state in packages.STATES
        assert packages.release(row.torch_npu) == row.torch, row
        SpecifierSet(row.python)
    checked = {row.torch_npu for row in rows if row.state == "schemas"}
    assert checked == {"2.10.0.post4", "2.13.0", "2.14.0"}


@pytest.mark.parametrize(
    ("npu", "line"),
    [
        (None, "no torch-npu, no set to look up"),
        ("2.13.0", "torch-npu 2.13.0 goes with torch 2.13 and a CANN that is named nowhere, calls checked against its"),
        (
            "2.10.0.post4",
            "torch-npu 2.10.0.post4 goes with torch 2.10 and CANN 9.1, calls checked against its operators",
        ),
        ("2.12.0", "torch-npu 2.12.0 goes with torch 2.12 and CANN 9.1, not tried here (TorchNPU's COMPATIBILITY.md)"),
        ("2.99.0", "torch-npu 2.99.0 is in no set known here; known are 2.13.0, 2.14.0, 2.10.0.post4"),
    ],
)
def test_the_line_on_the_set(clean: pytest.MonkeyPatch, npu: str | None, line: str) -> None:
    machine.installed(clean, torch="2.13.0", torch_npu=npu)
    assert packages.set_line().startswith(line)


def test_another_cann_or_python_than_named_is_a_line(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.installed(clean, torch="2.12.0", torch_npu="2.12.0")
    assert packages.why_not_this_set() is None, "without CANN that is another line"
    machine.sourced(machine.cann(tmp_path, version="8.5.0"), clean)
    assert packages.why_not_this_set() == (
        "torch-npu 2.12.0 is named for CANN 9.1, CANN 8.5.0 is installed (TorchNPU's COMPATIBILITY.md)"
    )
    clean.setattr(platform, "python_version", lambda: "3.15.1")
    assert (packages.why_not_this_set() or "").startswith("torch-npu 2.12.0 is named for Python >=3.10,<3.15, this is")
    machine.installed(clean, torch="2.99.0", torch_npu="2.99.0")
    assert packages.why_not_this_set() is None


@pytest.mark.parametrize("version", ["9.1.0", "9.1.RC1"])
def test_a_cann_of_the_named_release_fits(clean: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    machine.installed(clean, torch="2.12.0", torch_npu="2.12.0")
    machine.sourced(machine.cann(tmp_path, version=version), clean)
    assert packages.why_not_this_set() is None
