"""Builds the C++ test program of the CPU kernels, with the compiler flags that setup.py gives the library."""

from __future__ import annotations

import os
import platform
import runpy
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
KERNELS = ROOT / "backends" / "pagedkv_cpu" / "csrc"
LIBRARY = ROOT / "backends" / "pagedkv_cpu" / "libpagedkv_cpu.so"
SETUP: Mapping[str, Any] = runpy.run_path(str(ROOT / "setup.py"))
WARNINGS = ("-Wall", "-Wextra", "-Wno-maybe-uninitialized")
"""Without the one that GCC 12 gives for its own intrinsics."""
SANITIZERS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
"""Every finding ends the program. Threads are not among them: libgomp's barriers are unknown to that sanitizer."""


def program(work: Path, flags: Sequence[str] = (), *, compiler: str = "c++", machine: str | None = None) -> Path:
    """The test program in `work`, all of it compiled with `flags`, for `machine` as `platform.machine` names it.

    Raises `subprocess.CalledProcessError` after the compiler's own words on stderr, as all functions here do.
    """
    built = compiled({**kernels(work, flags, compiler, machine), **tests(work, flags, compiler)})
    return linked(built, work / "kernels", flags, compiler)


def emulated(work: Path, flags: Sequence[str] = ()) -> Path:
    """`program` with the branches for AVX-512 on a processor that has AVX2, by SIMDe's intrinsics."""
    commands = {built: _emulating(command) for built, command in kernels(work, flags).items()}
    built = compiled({**commands, **tests(work, flags)})
    return linked(built, work / "kernels", flags)


def _emulating(command: Sequence[str]) -> list[str]:
    """The same, with the header that emulates in the place of options for AVX-512; every choice of a variant is yes."""
    kept = [word for word in command if not word.startswith(("-mavx512", "-mprefer-vector"))]
    if kept == command:
        return [*kept, "-D__builtin_cpu_supports(name)=1"]
    more = [f"-DEMULATE_{name.upper()}" for name in ("vnni", "bf16") if f"-mavx512{name}" in command]
    return [*kept, *more, "-include", str(HERE / "avx512_by_simde.h")]


def kernels(
    work: Path, flags: Sequence[str] = (), compiler: str = "c++", machine: str | None = None
) -> dict[Path, list[str]]:
    """Object of the library -> the command that compiles it: the library's own, then `flags`."""
    commands: dict[Path, list[str]] = SETUP["compile_commands"]([compiler], machine or platform.machine(), work)
    return {built: [*command, *WARNINGS, *flags] for built, command in commands.items()}


def tests(work: Path, flags: Sequence[str] = (), compiler: str = "c++") -> dict[Path, list[str]]:
    """Object of the tests -> the command that compiles it."""
    plain = [compiler, "-std=c++17", "-O1", *WARNINGS, *flags, f"-I{KERNELS}"]
    sources = {work / f"{source.stem}.test.o": source for source in sorted(HERE.glob("*.cpp"))}
    return {built: [*plain, "-c", str(source), "-o", str(built)] for built, source in sources.items()}


def compiled(commands: Mapping[Path, list[str]]) -> list[Path]:
    """The objects, on all cores at once."""
    for folder in {built.parent for built in commands}:
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands.values()))
    return list(commands)


def linked(parts: Sequence[Path], target: Path, flags: Sequence[str] = (), compiler: str = "c++") -> Path:
    """One program of objects and libraries, which it finds again where they are now."""
    paths = [f"-Wl,-rpath,{part.parent}" for part in parts if part.suffix == ".so"]
    _run([compiler, *flags, "-fopenmp", *map(str, parts), *paths, "-o", str(target)])
    return target


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, cwd=ROOT)
