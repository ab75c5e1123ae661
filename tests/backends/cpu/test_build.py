"""The library of kernels is there and up to date wherever it could have been built; an explicit choice is kept."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from pagedkv.api import BackendUnavailable, World
from pagedkv.api.errors import ConfigError
from pagedkv_cpu import native
from pagedkv_cpu.descriptor import CpuDescriptor

COMPILER = shutil.which("c++") or shutil.which("g++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
def test_where_a_compiler_is_the_library_is_built_and_newer_than_its_sources():
    assert native.why_missing() is None
    newest = max(path.stat().st_mtime for path in native.SOURCES.iterdir())
    assert native.LIBRARY.stat().st_mtime >= newest, "build again: pip install -e ."


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernels": "fast"}, "auto, native, torch"),
        ({"isa": "avx9"}, "auto, generic, avx2"),
        ({"kernels": "torch", "isa": "avx2"}, "needs the native kernels"),
    ],
)
def test_wrong_options_name_what_is_accepted(options, words):
    with pytest.raises(ConfigError, match=words):
        CpuDescriptor().create(0, {"threads": 1, **options}, World())


def test_without_the_library_auto_computes_with_torch_and_says_so_and_native_is_refused(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "missing.so")
    made = CpuDescriptor().create(0, {"threads": 1}, World())
    assert "torch alone" in caplog.text and "C++ compiler" in caplog.text and native.WITHOUT in caplog.text
    made.close()
    for options in ({"kernels": "native"}, {"isa": "generic"}):
        with pytest.raises(BackendUnavailable, match="C\\+\\+ compiler"):
            CpuDescriptor().create(0, {"threads": 1, **options}, World())
    told = CpuDescriptor().diagnose()["kernels"]
    assert "C++ compiler" in told and native.WITHOUT in told
    assert "`pip install" in CpuDescriptor().diagnose()["change kernels"]
    assert f"no native kernels: {native.WITHOUT}" in CpuDescriptor().probe()[0].kind


def test_with_the_library_the_listing_says_nothing_of_kernels():
    if reason := native.why_missing():
        pytest.skip(reason)
    assert "kernels" not in CpuDescriptor().probe()[0].kind


def test_a_library_of_another_version_is_not_used(monkeypatch):
    if reason := native.why_missing():
        pytest.skip(reason)
    monkeypatch.setattr(native, "VERSION", 999)
    assert "version" in str(native.why_missing()) and "999" in str(native.why_missing())


def test_an_instruction_set_that_is_not_here_is_refused():
    if reason := native.why_missing():
        pytest.skip(reason)
    code = "from pagedkv_cpu.native import Kernels\nfor isa in ('avx512', 'avx512_vnni', 'avx512_bf16', 'generic'):\n"
    code += "    try: print(Kernels(isa).isa)\n    except OSError as error: print('no', error)\n"
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[-1] == "generic"
    assert all(
        line in ("avx512", "avx512_vnni", "avx512_bf16") or line.startswith("no this processor") for line in lines[:-1]
    )
