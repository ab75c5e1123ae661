"""What this machine offers to this process: processor, cores, memory, each under the limits of its control groups.

Every reading takes the root of the file system, so that a folder that looks like another machine can stand in for it.
Sources: proc(5), cgroups(7), and the kernel's admin guides `cgroup-v1/memory`, `cgroup-v2`.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_X86 = "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"
_X86_TILES = "amx_tile", "amx_int8", "amx_bf16", "amx_fp16"
_ARM = "asimd", "asimdhp", "asimddp", "sve", "sve2", "i8mm", "bf16"
ISA_FLAGS = _X86 + _X86_TILES + _ARM
"""Instruction sets worth showing, as the kernel spells them (x86 and Arm)."""

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16"})
_ONEDNN_WITH_BF16 = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10", "DEFAULT", "ALL")
_ONEDNN_WITH_FP16 = ("AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10", "DEFAULT", "ALL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes this process can use in all and now; None is unknown. `source` says which limit decided the total."""

    total: int | None
    available: int | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Processor cores: how many this process should use, how many there are, and what decided."""

    usable: int
    present: int
    source: str


def _read(path: Path) -> str | None:
    """The text of a file, or None where this kernel does not have it (or hides it)."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """The integer in a file; None when there is no file or it says "max"."""
    text = _read(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def _fields(text: str, separator: str = ":") -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, found, value = line.partition(separator)
        if found:
            yield name.strip(), value.strip()


# -- processor ---------------------------------------------------------------------------------------------------------


def cpu_model(root: Path = ROOT) -> str:
    """The processor's name, the machine type where the kernel gives none (most Arm boards)."""
    fields = dict(_fields(_read(root / "proc/cpuinfo") or ""))
    return fields.get("model name") or fields.get("Model") or platform.processor() or platform.machine() or "CPU"


def isa_flags(root: Path = ROOT) -> frozenset[str]:
    """The kernel's flags of the first core; empty where it lists none."""
    for name, value in _fields(_read(root / "proc/cpuinfo") or ""):
        if name in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def native_dtypes(flags: frozenset[str], onednn_limit: str | None = None) -> tuple[str, ...]:
    """The dtypes that the processor multiplies in hardware: fp32 always.

    `onednn_limit` is the variable ONEDNN_MAX_CPU_ISA, with which a user switches newer instructions off.
    """
    limit = (onednn_limit or "DEFAULT").upper()
    names = ["fp32"]
    if flags & BF16_FLAGS and limit.startswith(_ONEDNN_WITH_BF16):
        names.append("bf16")
    if flags & FP16_FLAGS and limit.startswith(_ONEDNN_WITH_FP16):
        names.append("fp16")
    return tuple(names)


def cores(root: Path = ROOT) -> Cores:
    """Cores this process may run on: its affinity, cut to the control groups' processor quota (rounded up)."""
    present = os.cpu_count() or 1
    usable, source = present, "all cores"
    with contextlib.suppress(AttributeError, OSError):  # not on every system
        usable = len(os.sched_getaffinity(0))
        source = "affinity" if usable < present else source
    for folder in _cgroup_folders("cpu", root):
        quota = _cpu_quota(folder)
        if quota is not None and quota < usable:
            usable, source = quota, f"cgroup quota {folder}"
    return Cores(usable=max(1, usable), present=present, source=source)


def _cpu_quota(folder: Path) -> int | None:
    """Whole cores that a group's quota comes to; None is no limit."""
    text = _read(folder / "cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
        numbers = (int(quota), int(period or 100_000)) if quota.isdigit() else (0, 0)
    else:
        numbers = (_number(folder / "cpu.cfs_quota_us") or 0, _number(folder / "cpu.cfs_period_us") or 0)
    if numbers[0] <= 0 or numbers[1] <= 0:
        return None
    return max(1, -(-numbers[0] // numbers[1]))


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(root: Path = ROOT) -> Memory:
    """Memory of this process: the machine's, cut to the tightest control group from its own up to the root."""
    total, available = _machine_memory(root)
    source = "machine"
    if total is None:
        return Memory(total=None, available=None, source="unknown")
    for folder in _cgroup_folders("memory", root):
        limit, room = _group_memory(folder)
        if limit is None:
            continue
        if limit < total:  # version 1 spells "no limit" as a number larger than any machine
            total, source = limit, f"cgroup limit {folder}"
        if room is not None and available is not None:
            available = min(available, room)
    return Memory(total=total, available=None if available is None else min(available, total), source=source)


def _machine_memory(root: Path) -> tuple[int | None, int | None]:
    fields = dict(_fields(_read(root / "proc/meminfo") or ""))
    if "MemTotal" not in fields:
        return _psutil_memory() if root == ROOT else (None, None)
    available = fields.get("MemAvailable", fields.get("MemFree"))
    return _kib(fields["MemTotal"]), None if available is None else _kib(available)


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024


def _psutil_memory() -> tuple[int | None, int | None]:
    """(total, available) on systems without /proc; unknown where psutil is missing too."""
    try:
        import psutil
    except ImportError:
        return None, None
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _group_memory(folder: Path) -> tuple[int | None, int | None]:
    """(limit, room left under it) of one group. Clean file pages count as room: the kernel drops them first."""
    limit = _number(folder / "memory.max")
    used = _number(folder / "memory.current")
    if limit is None:
        limit = _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return limit, limit
    stat = dict(_fields(_read(folder / "memory.stat") or "", " "))
    droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    return limit, max(0, limit - used + min(droppable, used))


# -- control groups ----------------------------------------------------------------------------------------------------


def _cgroup_folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders whose limits bind this process, its own group first, up to the mount's root.

    /proc/self/cgroup:  "0::/path" (version 2)  or  "4:cpu,cpuacct:/path" (version 1).
    Inside a container the path may name a folder that only the host sees; then the mount's root is the container's own.
    """
    base = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "0::/").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if not names:
            yield from _upward(base, path)
        elif controller in names.split(","):
            for mount in (base / controller, base / names):
                if mount.is_dir():
                    yield from _upward(mount, path)
                    break


def _upward(mount: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    for length in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:length])
        if folder.is_dir():
            yield folder
