"""What this machine can do at most: bytes a second from memory, operations a second from registers.

Arithmetic is measured by a C++ program of its own (peaks.cpp), compiled here for the instruction set that the kernels
run on: neither numpy nor torch has a loop that leaves memory alone.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from models import ROOT

from pagedkv.api import AttentionBackend
from pagedkv.planning.rates import read_bandwidth
from pagedkv_cpu.native import SOURCES

PEAKS = Path(__file__).with_name("peaks.cpp")
READ_BYTES = 1 << 29
COPY_BYTES = 1 << 28
"""Of each side of the copy: more than any processor's caches hold."""
COPIES = 5
STEPS = {
    "generic": "16-bit products of 8 lanes, a lower bound",
    "avx2": "maddubs and a 16-bit add",
    "avx512": "maddubs and a 16-bit add",
    "avx512_vnni": "dpbusd",
}
"""Instruction set -> the step of a product of bytes that is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of so many threads together, each a second: bytes read, bytes copied (read and written), operations.

    `flops` counts a float32 multiply-add as 2, `macs` an 8-bit multiply-add as 1.
    """

    threads: int
    read: float
    copy: float
    flops: float
    macs: float

    def floor(self, nbytes: int, copies: bool, operations: int, macs: bool) -> tuple[float, str]:
        """(the least seconds of that work, which limit sets them)."""
        memory = nbytes / (self.copy if copies else self.read)
        arithmetic = operations / (self.macs if macs else self.flops)
        return max((memory, "memory"), (arithmetic, "arithmetic"))


def measure_limits(backend: AttentionBackend, isa: str, threads: int) -> Limits:
    """The limits of `threads` threads. Reading is the faster of torch's sum and of a loop that asks for bytes ahead."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        summed, copied = read_bandwidth(backend), copy_bandwidth()
    finally:
        torch.set_num_threads(before)
    flops, macs, read = peaks(isa, threads)
    return Limits(threads=threads, read=max(summed, read), copy=copied, flops=flops, macs=macs)


def copy_bandwidth() -> float:
    """Bytes a second, those read and those written: torch's copy of one large array, the fastest of a few."""
    source, target = torch.ones(COPY_BYTES // 4), torch.empty(COPY_BYTES // 4)
    return 2 * COPY_BYTES / min(seconds_of(lambda: target.copy_(source)) for _ in range(COPIES))


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def peaks(isa: str, threads: int) -> tuple[float, float, float]:
    """(float32 operations, 8-bit multiply-adds, bytes read) a second, from the program in peaks.cpp."""
    with tempfile.TemporaryDirectory() as work:
        program = Path(work, "peaks")
        try:
            subprocess.run(compile_command(isa, program), check=True, cwd=ROOT)
        except (OSError, subprocess.CalledProcessError) as error:
            raise click.ClickException(
                f"the arithmetic limits are measured by a C++ program, which was not built: {error}; install a C++ "
                "compiler, or name one in CXX"
            ) from error
        told = subprocess.run([program, str(threads), str(READ_BYTES)], check=True, capture_output=True, text=True)
    flops, macs, read = map(float, told.stdout.split())
    return flops, macs, read


def compile_command(isa: str, program: Path) -> list[str]:
    """As setup.py compiles the kernels for this instruction set."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or "c++"]
    flags = [*setup["FLAGS"], *setup["VARIANTS"][isa].split(), f"-DPKV_ISA={isa}", f"-I{SOURCES}"]
    return [*compiler, *flags, str(PEAKS), "-o", str(program)]
