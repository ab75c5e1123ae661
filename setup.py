"""Builds the CPU backend's kernels; everything else about the package stands in pyproject.toml.

The library has a plain C interface: it belongs to no version of Python and is not linked to torch. It is optional:
where there is no C++ compiler the package is installed without it, and the CPU backend says so when it starts.
PAGEDKV_REQUIRE_KERNELS=1 makes a failed build an error. CXX names the compiler.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("backends/pagedkv_cpu/csrc")
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math"]
AVX2 = "-mavx2 -mfma -mf16c"
AVX512 = f"{AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512"
VNNI = f"{AVX512} -mavx512vnni"
VARIANTS = {
    "generic": "",
    "avx2": AVX2,
    "avx512": AVX512,
    "avx512_vnni": VNNI,
    "avx512_bf16": f"{VNNI} -mavx512bf16",
}


def compile_commands(compiler: list[str], machine: str, work: Path) -> dict[Path, list[str]]:
    """Object in `work` -> the command that compiles it, for `machine` as `platform.machine` names it."""
    x86 = machine.lower() in ("x86_64", "amd64")
    variants = VARIANTS if x86 else {"generic": VARIANTS["generic"]}
    jobs = [("kernels.cpp", name, [*flags.split(), f"-DPKV_ISA={name}"]) for name, flags in variants.items()]
    jobs.append(("dispatch.cpp", "dispatch", []))
    return {
        work / f"{name}.o": [*compiler, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(work / f"{name}.o")]
        for source, name, flags in jobs
    }


class BuildKernels(build_ext):
    """One object for each instruction set, linked into one library that chooses at run time."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / "libpagedkv_cpu.so")

    def build_extension(self, ext: Extension) -> None:
        compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or "c++"]
        work, target = Path(self.build_temp), Path(self.get_ext_fullpath(ext.name))
        for folder in (work, target.parent):
            folder.mkdir(parents=True, exist_ok=True)
        commands = compile_commands(compiler, platform.machine(), work)
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda command: subprocess.run(command, check=True), commands.values()))
            subprocess.run([*compiler, "-shared", "-fopenmp", *map(str, commands), "-o", str(target)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            if os.environ.get("PAGEDKV_REQUIRE_KERNELS", "") not in ("", "0"):
                raise
            self.warn(f"the CPU kernels were not built ({error}); the CPU backend will compute with torch alone")
            target.unlink(missing_ok=True)

    def copy_extensions_to_source(self) -> None:
        """For an editable install: beside the sources; nothing where nothing was built."""
        for ext in self.extensions:
            built = Path(self.build_lib) / self.get_ext_filename(ext.name)
            if built.exists():
                target = Path("backends") / self.get_ext_filename(ext.name)
                fresh = target.with_suffix(".new")
                # Replaced, never overwritten: processes that run on the old library keep it.
                shutil.copy2(built, fresh)
                fresh.replace(target)


class AnyPython(bdist_wheel):
    """The wheel depends on the platform, not on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("pagedkv_cpu._kernels", [], optional=True)],
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
    )
