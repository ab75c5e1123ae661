"""`make isa`: the C++ tests of the CPU kernels optimized, under sanitizers, and on processors that are not here."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci.isa import binary, build

WORK = build.ROOT / "build" / "isa"
AARCH64 = "aarch64-linux-gnu"
NOT_EMULATED = "pcid=off,x2apic=off,tsc-deadline=off,invpcid=off,hle=off,rtm=off"
"""What a Haswell has and qemu, for programs alone, has not: said beforehand, it is not warned about in each thread."""
X86 = platform.machine().lower() in ("x86_64", "amd64")


class NotHere(Exception):
    """A run that this machine cannot do; the text says why."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: what it is called, and what returns the output of the test program, or lines of its own."""

    name: str
    call: Callable[[], str]


def _optimized() -> str:
    return _output([build.program(WORK / "optimized")])


def _sanitized() -> str:
    return _output([build.program(WORK / "sanitized", build.SANITIZERS)])


def _emulated_avx512() -> str:
    _needs("avx2" in _flags(), "SIMDe's AVX-512 is built for AVX2")
    _needs(Path("/usr/include/simde").exists(), "there is no libsimde-dev")
    built = build.emulated(WORK / "emulated", build.SANITIZERS)
    return "".join(_output([built, "--few", "--only", isa]) for isa in _avx512())


def _checked() -> str:
    _needs(X86, "the patterns are those of x86-64")
    objects = [WORK / "optimized" / f"{isa}.o" for isa in build.SETUP["VARIANTS"]]
    found = binary.complaints(build.LIBRARY, [*objects, WORK / "optimized" / "dispatch.o"])
    if found:
        raise subprocess.CalledProcessError(1, "objdump", "\n".join(found))
    return "each instruction set has the instructions it is for; what runs before the choice has none of AVX\n"


def _emulated(cpu: str, expected: str) -> str:
    _needs(X86, "qemu-user takes the programs of this machine's kind")
    return _output(["qemu-x86_64", "-cpu", cpu, WORK / "optimized" / "kernels", "--few", "--expect", expected])


def _aarch64() -> str:
    _needs(bool(shutil.which(f"{AARCH64}-g++")), f"there is no {AARCH64}-g++")
    built = build.program(WORK / "aarch64", compiler=f"{AARCH64}-g++", machine="aarch64")
    return _output(["qemu-aarch64", "-L", f"/usr/{AARCH64}", built, "--few", "--expect", "generic"])


RUNS = (
    Run("optimized", _optimized),
    Run("address,undefined", _sanitized),
    Run("instructions", _checked),
    Run("AVX-512 by SIMDe", _emulated_avx512),
    Run("qemu Haswell", lambda: _emulated(f"Haswell,{NOT_EMULATED}", "avx2")),
    Run("qemu Nehalem", lambda: _emulated("Nehalem", "generic")),
    Run("qemu aarch64", _aarch64),
)


def _needs(there: bool, why: str) -> None:
    if not there:
        raise NotHere(why)


def _output(command: Sequence[str | Path]) -> str:
    words = [str(word) for word in command]
    _needs(bool(shutil.which(words[0])), f"there is no {words[0]}")
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_WAIT_POLICY": "passive"})
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
    return done.stdout


def _try(run: Run) -> tuple[str, bool]:
    """The line of the summary, and whether it is as it should be."""
    start = time.perf_counter()
    print(f"== {run.name}", flush=True)
    try:
        print(run.call(), end="", flush=True)
        verdict, good = "passed", True
    except NotHere as why:
        verdict, good = f"NOT VERIFIED HERE: {why}", "CI" not in os.environ
    except subprocess.CalledProcessError as error:
        print(error.stdout or "", error.stderr or "", sep="", flush=True)
        verdict, good = f"FAILED with status {error.returncode}", False
    return f"{run.name:20} {time.perf_counter() - start:6.1f} s  {verdict}", good


def _flags() -> set[str]:
    """What this processor says that it has; nothing where it is no x86-64."""
    return set(Path("/proc/cpuinfo").read_text().split()) if X86 else set()


def _avx512() -> dict[str, list[str]]:
    """Variant with AVX-512 -> the flags of a processor that can run it, as Linux spells them."""
    flags = {isa: re.findall(r"-m(avx512\w+)", words) for isa, words in build.SETUP["VARIANTS"].items()}
    return {isa: [re.sub("512(vnni|bf16)", r"512_\1", f) for f in found] for isa, found in flags.items() if found}


def _not_run() -> str:
    """The variants that no processor ran: this one lacks them, and qemu has none of them."""
    missing = [isa for isa, names in _avx512().items() if not _flags().issuperset(names)]
    return f"never ran as compiled, NOT VERIFIED HERE on a processor: {', '.join(missing)}" if missing else ""


def main() -> int:
    """Every run in turn, then the summary; 1 after any failure, and with CI set where a run could not be done."""
    results = [_try(run) for run in RUNS]
    print("\n".join(["==", *(line for line, _ in results), _not_run()]))
    return 0 if all(good for _, good in results) else 1


if __name__ == "__main__":
    sys.exit(main())
