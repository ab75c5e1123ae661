"""System, processor, memory and limits of this process; files are read below a root, so that tests can replace them.

Sources: os-release(5), proc(5), cgroups(7), getrlimit(2).
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import psutil

from pagedkv.config import show_bytes
from pagedkv.diagnosis.findings import Finding

ROOT = Path("/")
INSTRUCTIONS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "asimddp", "sve", "sve2", "i8mm", "bf16"),
)
"""Instruction sets that kernels use, as Linux spells them (x86 and Arm)."""

LOW_MEMORY = 1 << 30
FEW_FILES = 1024
"""Less available memory than this holds no useful model; fewer open files not the streams of a server."""

_CONTAINERS = {".dockerenv": "docker", "run/.containerenv": "podman"}
_CONTAINER_GROUPS = ("docker", "kubepods", "containerd", "libpod", "lxc")


def system(root: Path = ROOT) -> dict[str, Any]:
    """Operating system, kernel, distribution, container and Windows subsystem (its version, or None)."""
    return {
        "system": platform.system(),
        "release": _read(root / "proc/sys/kernel/osrelease") or platform.release(),
        "machine": platform.machine(),
        "distribution": _distribution(root),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "container": _container(root),
        "wsl": _wsl(root),
    }


def system_findings(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """What of `system` should be changed."""
    if facts["wsl"] == 1:
        yield Finding(
            level="warning",
            about="system",
            what="this is version 1 of the Windows subsystem for Linux",
            why="it translates system calls and reaches no device; version 2 has a real kernel",
            command="wsl --set-default-version 2",
        )


def processor(root: Path = ROOT) -> dict[str, Any]:
    """Name, instruction sets, cores there are, cores of the affinity, and the quota of the control group in cores."""
    fields = _fields(_read(root / "proc/cpuinfo") or "")
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    present = os.cpu_count() or 1
    own = psutil.Process()
    return {
        "name": fields.get("model name") or platform.processor() or platform.machine(),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "cores": present,
        "affinity": len(own.cpu_affinity()) if hasattr(own, "cpu_affinity") else present,
        "quota": min((quota for folder in _groups("cpu", root) if (quota := _quota(folder))), default=None),
    }


def processor_findings(facts: Mapping[str, Any], container: str | None = None) -> Iterator[Finding]:
    """What keeps this process from cores that are there."""
    if facts["affinity"] < facts["cores"]:
        yield Finding(
            level="note",
            about="processor",
            what=f"this process may use {facts['affinity']} of {facts['cores']} cores",
            why="its affinity, which taskset, a batch system or the container has set",
            command=f"taskset -c 0-{facts['cores'] - 1} pagedkv ...",
        )
    if facts["quota"] is not None and facts["quota"] < facts["affinity"]:
        yield Finding(
            level="note",
            about="processor",
            what=f"a quota gives this process the time of {facts['quota']:g} cores",
            why="its control group; more threads than that wait for each other",
            command=_raise_limit(container, "cpu", facts["cores"]),
        )


def memory(root: Path = ROOT) -> dict[str, Any]:
    """Bytes of memory and swap, and the limit of the tightest control group with what is left under it.

    `usable` is what this process can still get: the less of what the machine has available and what the group leaves.
    """
    total, available, swap, swap_free = _machine_memory(root)
    groups = [_group_memory(folder) for folder in _groups("memory", root)]
    limits = [(limit, left) for limit, left in groups if limit is not None and (total is None or limit < total)]
    limit, left = min(limits, key=lambda group: group[1]) if limits else (None, None)
    return {
        "total": total,
        "available": available,
        "swap_total": swap,
        "swap_used": None if swap is None or swap_free is None else swap - swap_free,
        "cgroup_limit": limit,
        "cgroup_left": left,
        "usable": min((size for size in (available, left) if size is not None), default=None),
    }


def memory_findings(facts: Mapping[str, Any], container: str | None = None) -> Iterator[Finding]:
    """Shortage, said as shortage, and a limit that is not the machine's."""
    usable, limit, left = facts["usable"], facts["cgroup_limit"], facts["cgroup_left"]
    bound = left is not None and left == usable
    if usable is not None and usable < LOW_MEMORY:
        where = f"of the {show_bytes(limit)} of its control group" if bound else f"of {show_bytes(facts['total'])}"
        yield Finding(
            level="warning",
            about="memory",
            what=f"only {show_bytes(usable)} {where} are left",
            why="other processes hold the rest: weights, workspace and cache must fit into what is left",
            command=_raise_limit(container, "memory", "SIZE") if bound else "ps -eo rss,pid,comm --sort=-rss | head",
        )
    if limit is not None:
        yield Finding(
            level="note",
            about="memory",
            what=f"a control group limits this process to {show_bytes(limit)} of {show_bytes(facts['total'])}",
            why="a container or service manager has set it; whoever goes above is ended by the kernel",
        )


def _raise_limit(container: str | None, what: Literal["cpu", "memory"], value: int | str) -> str:
    """The command that raises a control group's limit, for whoever has set it: `value` is cores, or a size."""
    if container == "kubepods":
        return f"kubectl set resources deployment NAME --limits={what}={value}"
    if container in ("docker", "podman"):
        return f"{container} update --{'cpus' if what == 'cpu' else what} {value} CONTAINER"
    limit = f"CPUQuota={100 * int(value)}%" if what == "cpu" else f"MemoryMax={value}"
    return f"sudo systemctl set-property UNIT {limit}"


def limits() -> dict[str, int | None]:
    """Limits of this process (ulimit); None is unlimited or unknown to the system. Bytes, files are a number."""
    names = {"locked_memory": "RLIMIT_MEMLOCK", "open_files": "RLIMIT_NOFILE", "address_space": "RLIMIT_AS"}
    if sys.platform == "win32":
        return dict.fromkeys(names)
    import resource

    soft = {name: resource.getrlimit(getattr(resource, constant))[0] for name, constant in names.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def limit_findings(facts: Mapping[str, int | None], machine: int | None, pins: bool) -> Iterator[Finding]:
    """Limits that will be hit. `machine`: bytes of memory; `pins`: a usable device has memory of its own beside it."""
    files, space, locked = facts["open_files"], facts["address_space"], facts["locked_memory"]
    if files is not None and files < FEW_FILES:
        yield Finding(
            level="warning",
            about="limits",
            what=f"at most {files} files can be open",
            why="every shard of a model and every connection takes one",
            command=f"ulimit -n {4 * FEW_FILES}",
        )
    if space is not None and machine is not None and space < machine:
        yield Finding(
            level="warning",
            about="limits",
            what=f"the address space ends at {show_bytes(space)} of {show_bytes(machine)}",
            why="mapping a model's files fails there although memory is free",
            command="ulimit -v unlimited",
        )
    if pins and locked is not None and machine is not None and locked < machine // 2:
        yield Finding(
            level="note",
            about="limits",
            what=f"at most {show_bytes(locked)} can be locked",
            why="where the driver counts pinned host memory, swap_space cannot be larger",
            command="ulimit -l unlimited",
        )


# -- files -------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> str | None:
    """The text of a file; None where this kernel does not have it or hides it."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _fields(text: str, separator: str = ":") -> dict[str, str]:
    """name -> value of lines "name: value", the first of each name."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, found, value = line.partition(separator)
        if found:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None


def _distribution(root: Path) -> str | None:
    for name in ("etc/os-release", "usr/lib/os-release"):
        if text := _read(root / name):
            return _fields(text, "=").get("PRETTY_NAME", "").strip("\"'") or None
    return None


def _container(root: Path) -> str | None:
    for name, kind in _CONTAINERS.items():
        if (root / name).exists():
            return kind
    groups = _read(root / "proc/1/cgroup") or ""
    return next((kind for kind in _CONTAINER_GROUPS if kind in groups), None)


def _wsl(root: Path) -> int | None:
    release = (_read(root / "proc/sys/kernel/osrelease") or "").lower()
    if "microsoft" not in release:
        return None
    return 2 if "wsl2" in release or "-microsoft-standard" in release else 1


def _machine_memory(root: Path) -> tuple[int | None, int | None, int | None, int | None]:
    """Bytes: total, available, swap, swap that is free."""
    fields = _fields(_read(root / "proc/meminfo") or "")
    if "MemTotal" not in fields and root == ROOT:
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        return memory.total, memory.available, swap.total, swap.free
    available = fields.get("MemAvailable", fields.get("MemFree"))
    total, swap_total, free = (fields.get(name) for name in ("MemTotal", "SwapTotal", "SwapFree"))
    return _kib(total), _kib(available), _kib(swap_total), _kib(free)


def _kib(text: str | None) -> int | None:
    number = (text or "").split()[:1]
    return int(number[0]) * 1024 if number and number[0].isdigit() else None


# -- control groups ----------------------------------------------------------------------------------------------------


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders whose limits bind this process, from its own group up to the mount's root.

    /proc/self/cgroup:  "0::/path" (version 2)  or  "4:cpu,cpuacct:/path" (version 1).
    """
    base = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "0::/").splitlines():
        names, _, path = line.partition(":")[2].partition(":")
        if names and controller not in names.split(","):
            continue
        mount = base if not names else next((m for m in (base / names, base / controller) if m.is_dir()), None)
        if mount is not None:
            yield from _upward(mount, path)


def _upward(mount: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    folders = (mount.joinpath(*parts[:length]) for length in range(len(parts), -1, -1))
    return (folder for folder in folders if folder.is_dir())


def _quota(folder: Path) -> float | None:
    """Cores that a group's quota comes to; None is no limit."""
    quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
    if not quota:
        quota, period = (_read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    if not quota.isdigit() or not (period or "100000").isdigit():
        return None
    return int(quota) / int(period or 100_000)


def _group_memory(folder: Path) -> tuple[int | None, int]:
    """(limit, bytes left under it) of one group. Clean file pages count as left: the kernel drops them first."""
    limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    if limit is None:
        limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is None:
        return None, 0
    stat = _fields(_read(folder / "memory.stat") or "", " ")
    droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    return limit, max(0, limit - (used or 0) + min(droppable, used or 0))
