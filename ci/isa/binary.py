"""What the built kernels consist of: each instruction set keeps to itself, and what runs everywhere uses none."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

BASELINE = "baseline"
"""All that is in no instruction set's namespace: it runs before any choice."""
_HIGH = r"%zmm|%k[0-7]|%[xy]mm(?:1[6-9]|2\d|3[01])"
NEEDED: Mapping[str, tuple[str, ...]] = {
    BASELINE: (),
    "generic": (r"^mulps",),
    "avx2": (r"^vfmadd\d+ps.*%ymm", r"^vpmaddubsw.*%ymm", r"^vcvtph2ps"),
    "avx512": (r"^vfmadd\d+ps.*%zmm", r"^vpmaddubsw.*%zmm"),
    "avx512_vnni": (r"^vfmadd\d+ps.*%zmm", r"^vpdpbusd.*%zmm"),
    "avx512_bf16": (r"^vfmadd\d+ps.*%zmm", r"^vpdpbusd.*%zmm", r"^vdpbf16ps.*%zmm"),
}
"""Instruction set -> what its code must contain to be worth its name, as patterns of objdump's lines."""
FORBIDDEN: Mapping[str, str] = {
    BASELINE: r"^v",
    "generic": r"^v",
    "avx2": rf"{_HIGH}|^vpdp",
    "avx512": r"^vpdp|^vdpbf16|^vcvtne",
    "avx512_vnni": r"^vdpbf16|^vcvtne",
    "avx512_bf16": r"^tdp|^vp2intersect|^v(?:add|mul|fmadd\d+)ph",
}
"""Instruction set -> what a processor that has no more than it would stop at; ^v: every AVX instruction."""
_FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")


def complaints(library: Path, objects: Sequence[Path] = ()) -> list[str]:
    """What is wrong with an x86-64 library of kernels, and with the objects that it was linked from; none: nothing."""
    found = [f"{built.name}: {name} may be shared with other objects" for built in objects for name in _shared(built)]
    code = _instructions(library)
    for isa in sorted(NEEDED.keys() | code.keys()):
        if isa not in NEEDED or isa not in FORBIDDEN:
            found.append(f"{isa}: say in {__name__} what its code must and must not contain")
            continue
        found += [f"{isa}: nothing matches {p}" for p in NEEDED[isa] if not any(re.search(p, i) for i in code[isa])]
        found += [f"{isa}: contains {line}" for line in sorted(set(code[isa])) if re.search(FORBIDDEN[isa], line)][:5]
    return found


def _shared(built: Path) -> Iterator[str]:
    """Symbols of an object that its namespace or prefix does not keep apart.

    The linker takes one of several equal inline functions: one compiled for AVX could replace the one for all.
    """
    own = "pkv_" if built.stem == "dispatch" else f"{built.stem}::"
    for line in _output("nm", "-C", "--defined-only", "--extern-only", "--format=posix", str(built)):
        name = line.rsplit(maxsplit=3)[0]
        if not name.startswith((own, "DW.ref.")):  # the latter is a pointer for the exception tables, no code
            yield name


def _instructions(library: Path) -> dict[str, list[str]]:
    """Instruction set -> its instructions, one a line."""
    found: dict[str, list[str]] = defaultdict(list)
    isa = BASELINE
    for line in _output("objdump", "-d", "-C", "--no-show-raw-insn", str(library)):
        if match := _FUNCTION.match(line):
            isa = _namespace(match[1])
        elif "\t" in line:
            found[isa].append(" ".join(line.split("\t", 1)[1].split()))
    return found


def _namespace(function: str) -> str:
    """The namespace that the kernels were compiled in; a name from elsewhere counts as baseline."""
    match = re.match(r"(?:\S+ )?(\w+)::", function)
    return match[1] if match and match[1] != "std" else BASELINE


def _output(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
