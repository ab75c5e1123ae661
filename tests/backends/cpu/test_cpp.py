"""The C++ tests of the kernels: over the library as it is installed, and with sanitizers. `make isa` does more."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from ci.isa import binary, build
from pagedkv_cpu import native

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and not os.environ.get("CI"), reason="no C++ compiler (c++) here"
)


@pytest.fixture
def kernels() -> str:
    """Once, not for each path of the backend: there is no backend here."""
    return "native"


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The objects of the test program, without kernels."""
    return build.compiled(build.tests(tmp_path_factory.mktemp("tests")))


def run(program: Path, *words: str) -> str:
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, env={**os.environ, "OMP_WAIT_POLICY": "passive"}
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


@needs_compiler
def test_every_kernel_of_the_installed_library_computes_its_formula_on_every_instruction_set_that_is_here(
    tests, tmp_path
):
    if (reason := native.why_missing()) and not os.environ.get("CI"):
        pytest.skip(reason)
    said = run(build.linked([*tests, native.LIBRARY], tmp_path / "program"), "--few")
    best = native.Kernels("auto").isa
    assert f"auto: {best}\n" in said and "\n0 failures\n" in said
    for isa in ("generic", best):
        assert said.count(f"\n{isa} ") == 11, said


@needs_compiler
def test_no_kernel_reads_or_writes_beside_its_arrays_or_does_what_the_language_leaves_undefined(tests, tmp_path):
    checked = build.compiled(build.kernels(tmp_path, [*build.SANITIZERS, "-O0"]))  # sooner compiled
    said = run(build.linked([*tests, *checked], tmp_path / "program", build.SANITIZERS), "--few")
    assert "\n0 failures\n" in said and said.count("\ngeneric ") == 11


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the patterns are those of x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None and not os.environ.get("CI"), reason="no objdump here")
def test_nothing_in_the_library_needs_avx_before_the_choice_and_each_variant_has_what_it_is_for():
    if (reason := native.why_missing()) and not os.environ.get("CI"):
        pytest.skip(reason)
    assert binary.complaints(native.LIBRARY) == []


@pytest.mark.parametrize(
    ("code", "isa", "words"),
    [
        ("inline int shared(int x) { return x; }\nint (*kept)(int) = shared;", "avx2", "shared(int)"),
        ("namespace avx2 { int fine(int x) { return x; } }", "avx2", ""),
        ("namespace avx2 { int wrong(int x) { return x; } }", "generic", "avx2::wrong(int)"),
    ],
)
@needs_compiler
def test_an_object_that_shares_a_function_is_found(tmp_path, code, isa, words):
    source, built = tmp_path / "code.cpp", tmp_path / f"{isa}.o"
    source.write_text(code)
    subprocess.run(["c++", "-O0", "-c", str(source), "-o", str(built)], check=True)
    found = " ".join(binary._shared(built))
    assert words in found if words else not found
