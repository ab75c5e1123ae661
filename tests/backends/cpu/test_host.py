"""Readings of processor, cores and memory, from folders that look like other machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagedkv_cpu import host

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """Write files under a root that says 16 GiB, 10 of them available."""

    def write(files: dict[str, str]) -> Path:
        for name, text in {"proc/meminfo": meminfo(16, 10), **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def meminfo(total: int, available: int, free: int = 1) -> str:
    return f"MemTotal: {total << 20} kB\nMemFree: {free << 20} kB\nMemAvailable: {available << 20} kB\n"


def test_a_machine_without_groups(machine):
    memory = host.memory(machine({}))
    assert (memory.total, memory.available, memory.source) == (16 * GIB, 10 * GIB, "machine")


def test_an_old_kernel_without_memavailable(machine):
    root = machine({"proc/meminfo": f"MemTotal: {16 << 20} kB\nMemFree: {3 << 20} kB\n"})
    assert host.memory(root).available == 3 * GIB


def test_u99_page_cache_is_not_counted_as_used(machine):
    assert host.memory(machine({"proc/meminfo": meminfo(64, 40, free=1)})).available == 40 * GIB


def test_unknown_without_proc(tmp_path):
    memory = host.memory(tmp_path)
    assert memory.total is None and memory.available is None


def v2(path: str, limit: str, used: int = 0, stat: str = "") -> dict[str, str]:
    base = f"sys/fs/cgroup/{path}"
    return {f"{base}/memory.max": limit, f"{base}/memory.current": str(used), f"{base}/memory.stat": stat}


def test_version_2_limit_of_the_own_group(machine):
    root = machine({"proc/self/cgroup": "0::/a/b\n", **v2("a/b", str(4 * GIB), GIB)})
    memory = host.memory(root)
    assert (memory.total, memory.available) == (4 * GIB, 3 * GIB)
    assert memory.source.endswith("sys/fs/cgroup/a/b")


def test_version_2_the_tightest_of_nested_groups_decides(machine):
    root = machine(
        {
            "proc/self/cgroup": "0::/a/b\n",
            **v2("a/b", "max", GIB),
            **v2("a", str(6 * GIB), 5 * GIB, f"anon 1\ninactive_file {2 * GIB}\n"),
        }
    )
    memory = host.memory(root)
    assert (memory.total, memory.available) == (6 * GIB, 3 * GIB)  # 6 - 5 + 2 of clean file pages
    assert memory.source.endswith("cgroup/a")


def test_version_2_inside_a_container_that_does_not_see_its_path(machine):
    root = machine({"proc/self/cgroup": "0::/../../host/only\n", **v2(".", str(2 * GIB), GIB)})
    assert host.memory(root).total == 2 * GIB


def test_version_2_max_is_no_limit(machine):
    memory = host.memory(machine({"proc/self/cgroup": "0::/a\n", **v2("a", "max", GIB)}))
    assert (memory.total, memory.available) == (16 * GIB, 10 * GIB)


@pytest.mark.parametrize(("limit", "total"), [(3 * GIB, 3 * GIB), (9223372036854771712, 16 * GIB)])
def test_version_1(machine, limit, total):
    base = "sys/fs/cgroup/memory/job"
    root = machine(
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/job\n7:memory:/job\n1:name=systemd:/x\n",
            f"{base}/memory.limit_in_bytes": str(limit),
            f"{base}/memory.usage_in_bytes": str(GIB),
            f"{base}/memory.stat": f"cache 5\ntotal_inactive_file {GIB // 2}\n",
        }
    )
    memory = host.memory(root)
    assert memory.total == total
    assert memory.available == min(10 * GIB, limit - GIB + GIB // 2)


def test_u102_use_above_the_limit_leaves_nothing(machine):
    memory = host.memory(machine({"proc/self/cgroup": "0::/a\n", **v2("a", str(GIB), 2 * GIB)}))
    assert memory.available == 0


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("3200000 100000", 8)]
)
def test_version_2_processor_quota(machine, monkeypatch, text, cores):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    root = machine({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": text})
    found = host.cores(root)
    assert (found.usable, found.present) == (cores, 8)
    assert ("quota" in found.source) == (cores < 8)


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("250000", 3)])
def test_version_1_processor_quota(machine, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    base = "sys/fs/cgroup/cpu,cpuacct/job"
    root = machine(
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/job\n",
            f"{base}/cpu.cfs_quota_us": quota,
            f"{base}/cpu.cfs_period_us": "100000",
        }
    )
    assert host.cores(root).usable == cores


def test_affinity_counts(machine, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5}, raising=False)
    found = host.cores(machine({}))
    assert (found.usable, found.source) == (2, "affinity")


def test_no_affinity_on_this_system(machine, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert host.cores(machine({})).usable == 6


def test_processor_of_x86_and_arm(machine):
    root = machine({"proc/cpuinfo": "processor : 0\nmodel name : Some CPU @ 2 GHz\nflags : fpu avx2 amx_bf16\n"})
    assert host.cpu_model(root) == "Some CPU @ 2 GHz"
    assert host.isa_flags(root) == {"fpu", "avx2", "amx_bf16"}
    root = machine({"proc/cpuinfo": "processor : 0\nFeatures : fp asimd bf16\nCPU part : 0xd40\n"})
    assert host.isa_flags(root) == {"fp", "asimd", "bf16"}
    assert host.cpu_model(root)


@pytest.mark.parametrize(
    ("flags", "limit", "native"),
    [
        ("avx2", None, ("fp32",)),
        ("avx512f avx512_bf16", None, ("fp32", "bf16")),
        ("amx_bf16 avx512_fp16", None, ("fp32", "bf16", "fp16")),
        ("amx_fp16", None, ("fp32", "fp16")),
        ("asimd bf16", None, ("fp32", "bf16")),
        ("amx_bf16 avx512_fp16", "AVX2", ("fp32",)),
        ("amx_bf16 avx512_fp16", "avx512_core_bf16", ("fp32", "bf16")),
        ("", None, ("fp32",)),
    ],
)
def test_u93_native_dtypes_follow_the_instructions(flags, limit, native):
    assert host.native_dtypes(frozenset(flags.split()), limit) == native
